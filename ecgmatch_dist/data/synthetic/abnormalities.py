"""Abnormalities of the synthetic heart: how each changes rhythm, conduction, repolarisation, axis and voltage.

Every function changes a `Heart` by a severity in 0..1: near 0 it is barely outside the normal range, at 1 it is obvious.
Names are the Challenge's abbreviations.
"""

from collections.abc import Callable

import numpy as np

from ecgmatch_dist.data.synthetic.heart import LATE, ONSET, P1, P2, QRS, ST, T1, T_WAVE, XYZ, Array, Heart, Q, R, S

Change = Callable[[Heart, float], None]


def toward(heart: Heart, directions: list[list[float]]) -> Array:
    """One of the directions, with a little noise."""
    return np.asarray(heart.rng.choice(np.array(directions)) + heart.rng.normal(0, 0.12, 3))


# Rhythm


def atrial_fibrillation(heart: Heart, s: float) -> None:
    heart.rate = float(np.clip(heart.rng.normal(88, 20), 55, 150))
    heart.fibrillation, heart.irregularity = 0.03 + 0.09 * s, 0.13 + 0.15 * s
    heart.atrial_hz = heart.rng.uniform(5.2, 7.6)


def atrial_flutter(heart: Heart, s: float) -> None:
    heart.flutter, heart.atrial_hz = 0.06 + 0.12 * s, heart.rng.uniform(4.3, 5.3)
    heart.rate = 60 * heart.atrial_hz / heart.rng.choice([2, 3, 4, 4])


def sinus_bradycardia(heart: Heart, s: float) -> None:
    heart.rate = 59 - 20 * s


def sinus_tachycardia(heart: Heart, s: float) -> None:
    heart.rate = 101 + 50 * s**1.5


def sinus_arrhythmia(heart: Heart, s: float) -> None:
    heart.breathing = 0.065 + 0.17 * s


def pacing(heart: Heart, s: float) -> None:
    left_bundle_block(heart, 0.5 + 0.5 * s)
    heart.set_axis(heart.rng.uniform(-85, -55))
    heart.waves[ONSET] = [-0.06, 0.0016, 0.6 + s, -0.8 - s, -0.5]
    heart.waves[[P1, P2], XYZ] *= heart.rng.choice([0.0, 1.0])
    heart.rate, heart.breathing, heart.irregularity = heart.rng.choice([60.0, 65.0, 70.0, 75.0]), 0.0, 0.001


# Conduction


def first_degree_block(heart: Heart, s: float) -> None:
    heart.waves[[P1, P2], 0] = [-0.212 - 0.12 * s, -0.188 - 0.12 * s]


def second_degree_block(heart: Heart, s: float) -> None:
    heart.conduction = int(heart.rng.integers(3, 6)) if s < 0.7 else 2
    heart.rate = max(heart.rate, 80.0)


def left_bundle_block(heart: Heart, s: float) -> None:
    heart.widen(1.25 + 0.3 * s)
    w = heart.waves
    w[Q, XYZ] = [0.15 * s, 0.05, 0.20 * s]  # the septum is activated from the right: no q in V6, little r in V1
    w[R, XYZ] = np.array([0.90, 0.35, 0.55]) * heart.rng.normal(1, 0.1, 3)
    w[S, :2] = [0.035, 0.018]
    w[S, XYZ] = [0.50, 0.10, 0.60]
    w[LATE] = [0.062 + 0.012 * s, 0.018, 0.45 + 0.45 * s, 0.10, 0.45 + 0.2 * s]
    w[ST, XYZ] = np.array([-0.09, -0.02, -0.14]) * (0.4 + s)  # repolarisation opposes the slow QRS
    w[T_WAVE, XYZ] = np.array([-0.17, -0.05, -0.19]) * (0.3 + s)


def incomplete_left_bundle_block(heart: Heart, s: float) -> None:
    left_bundle_block(heart, 0.25 * s)


def right_bundle_block(heart: Heart, s: float) -> None:
    w = heart.waves
    w[LATE] = [0.052 + 0.014 * s, 0.017 + 0.006 * s, *(np.array([-0.55, -0.02, -0.72]) * (0.4 + 0.7 * s))]
    w[T_WAVE, 4] += 0.05 + 0.16 * s
    w[ST:, 0] += 0.03


def incomplete_right_bundle_block(heart: Heart, s: float) -> None:
    heart.waves[LATE] = [0.044, 0.011, *(np.array([-0.35, -0.02, -0.6]) * (0.2 + 0.55 * s))]


def anterior_fascicular_block(heart: Heart, s: float) -> None:
    left_axis(heart, 0.4 + 0.6 * s)
    heart.waves[Q, XYZ] = [-0.18, 0.25 + 0.1 * s, -0.15]  # first down, then up and to the left: qR in aVL, rS in III


def wide_qrs(heart: Heart, s: float) -> None:
    heart.widen(1.22 + 0.5 * s)
    heart.waves[LATE] = [0.06, 0.016, *heart.rng.normal(0, 0.12 + 0.15 * s, 3)]


def preexcitation(heart: Heart, s: float) -> None:
    heart.waves[[P1, P2], 0] += 0.03
    heart.waves[ONSET] = [-0.034, 0.017, *(heart.waves[R, XYZ] * (0.2 + 0.3 * s))]
    heart.waves[Q, XYZ] *= 0.3
    heart.waves[T_WAVE, XYZ] *= 0.7 - 0.9 * s


# ST and T


def t_wave_abnormal(heart: Heart, s: float) -> None:
    heart.waves[T_WAVE, XYZ] *= 0.55 - 0.85 * s  # from flat to inverted


def t_wave_inversion(heart: Heart, s: float) -> None:
    region = toward(heart, [[1.0, 0.3, 0.2], [0.4, 0.1, -1.0], [0.1, 1.0, 0.0]])  # lateral, anterior, inferior
    heart.waves[T_WAVE, XYZ] -= region * (0.12 + 0.24 * s) + 0.4 * heart.waves[T_WAVE, XYZ]


def st_depression(heart: Heart, s: float) -> None:
    heart.waves[ST, :2] = [0.115, 0.042]
    heart.waves[ST, XYZ] -= toward(heart, [[1.0, 0.5, -0.5], [0.6, 0.3, -1.0]]) * (0.05 + 0.17 * s)
    heart.waves[T1, XYZ] *= 0.6


def st_elevation(heart: Heart, s: float) -> None:
    region = toward(heart, [[0.3, 0.0, -1.0], [-0.2, 1.0, 0.0], [1.0, 0.0, -0.2]]) * (0.07 + 0.22 * s)
    heart.waves[ST, :2] = [0.12, 0.048]
    heart.waves[ST, XYZ] += region
    heart.waves[T_WAVE, XYZ] += 0.5 * region


def lateral_ischaemia(heart: Heart, s: float) -> None:
    heart.waves[ST, 2] -= 0.04 + 0.10 * s
    heart.waves[T_WAVE, 2] = 0.08 - 0.28 * s


def inferior_ischaemia(heart: Heart, s: float) -> None:
    heart.waves[ST, 3] -= 0.04 + 0.09 * s
    heart.waves[T_WAVE, 3] = 0.04 - 0.22 * s


def nonspecific_st(heart: Heart, s: float) -> None:
    direction = heart.rng.normal(0, 1, 3)
    heart.waves[ST, XYZ] += direction / np.linalg.norm(direction) * (0.035 + 0.10 * s)
    heart.waves[T_WAVE, XYZ] *= 0.8 - 0.4 * s


def long_qt(heart: Heart, s: float) -> None:
    heart.qt = 1.10 + 0.22 * s


# Ectopy, axis, voltage


def left_axis(heart: Heart, s: float) -> None:
    heart.set_axis(-31 - 45 * s)


def right_axis(heart: Heart, s: float) -> None:
    heart.set_axis(96 + 55 * s)
    heart.waves[R, 2] *= 0.8


def low_voltage(heart: Heart, s: float) -> None:
    heart.waves[QRS, XYZ] *= 0.55 - 0.28 * s
    heart.waves[ST:, XYZ] *= 0.8 - 0.2 * s


def premature_atrial(heart: Heart, s: float) -> None:
    heart.premature = 1 + int(4 * s)


def premature_ventricular(heart: Heart, s: float) -> None:
    heart.ventricular = 1 + int(4 * s)


def q_waves(heart: Heart, s: float) -> None:
    old_scar = toward(heart, [[0.1, -1.0, 0.1], [-0.2, 0.0, 1.0], [-1.0, 0.0, 0.2]])  # inferior, anteroseptal, lateral
    heart.waves[Q] = [-0.028, 0.012, *(old_scar * (0.25 + 0.5 * s))]


def poor_progression(heart: Heart, s: float) -> None:
    heart.waves[Q, 4] *= 0.35 - 0.3 * s
    heart.waves[R, 4] += 0.25 + 0.45 * s


# Abbreviation: SNOMED CT code, change. Class by class, in the order of the five-class rule.
CONDUCTION: dict[str, tuple[str, Change]] = {
    "IAVB": ("270492004", first_degree_block),
    "AVB": ("233917008", second_degree_block),
    "IIAVB": ("195042002", second_degree_block),
    "LBBB": ("164909002", left_bundle_block),
    "CLBBB": ("733534002", left_bundle_block),
    "ILBBB": ("251120003", incomplete_left_bundle_block),
    "RBBB": ("59118001", right_bundle_block),
    "CRBBB": ("713427006", right_bundle_block),
    "IRBBB": ("713426002", incomplete_right_bundle_block),
    "LAnFB": ("445118002", anterior_fascicular_block),
    "NSIVCB": ("698252002", wide_qrs),
    "WPW": ("74390002", preexcitation),
}
RHYTHM: dict[str, tuple[str, Change]] = {
    "AF": ("164889003", atrial_fibrillation),
    "AFL": ("164890007", atrial_flutter),
    "SB": ("426177001", sinus_bradycardia),
    "STach": ("427084000", sinus_tachycardia),
    "SA": ("427393009", sinus_arrhythmia),
    "PR": ("10370003", pacing),
}
REPOLARISATION: dict[str, tuple[str, Change]] = {
    "TAb": ("164934002", t_wave_abnormal),
    "TInv": ("59931005", t_wave_inversion),
    "STD": ("429622005", st_depression),
    "STE": ("164931005", st_elevation),
    "LIs": ("425623009", lateral_ischaemia),
    "IIs": ("425419005", inferior_ischaemia),
    "NSSTTA": ("428750005", nonspecific_st),
    "STC": ("55930002", nonspecific_st),
    "STIAb": ("164930006", nonspecific_st),
    "LQT": ("111975006", long_qt),
}
OTHER: dict[str, tuple[str, Change]] = {
    "LAD": ("39732003", left_axis),
    "RAD": ("47665007", right_axis),
    "LQRSV": ("251146004", low_voltage),
    "PAC": ("284470004", premature_atrial),
    "SVPB": ("63593006", premature_atrial),
    "PVC": ("427172004", premature_ventricular),
    "VPB": ("17338001", premature_ventricular),
    "VEsB": ("164884008", premature_ventricular),
    "QAb": ("164917005", q_waves),
    "PRWP": ("365413008", poor_progression),
}
ABNORMALITIES = CONDUCTION | RHYTHM | REPOLARISATION | OTHER

# Without P waves there is neither a PR interval nor an atrial extrasystole; a paced beat hides what is beneath it.
NO_ATRIA = frozenset({"IAVB", "AVB", "IIAVB", "WPW", "PAC", "SVPB"})
ONE_SIDED = {"AF": NO_ATRIA, "AFL": NO_ATRIA, "PR": frozenset(CONDUCTION) | frozenset(OTHER), "LAD": frozenset({"RAD"})}
EXCLUDES = {
    name: ONE_SIDED.get(name, frozenset()) | {other for other, excluded in ONE_SIDED.items() if name in excluded}
    for name in ABNORMALITIES
}
