"""The heart as a moving dipole: Gaussian waves along each beat, beats along a rhythm, seen from twelve leads.

Axes of the heart vector (Frank): x to the left, y to the feet, z to the back; millivolts and seconds throughout.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

# One row per wave of a beat: centre relative to the R peak (s), width σ (s), vector x, y, z (mV). LATE is the terminal
# force of a delayed ventricle, ONSET an early one (delta wave, pacing spike); both are zero in a healthy heart.
P1, P2, ONSET, Q, R, S, LATE, ST, T1, T2 = range(10)
HEALTHY: Array = np.array(
    [
        [-0.172, 0.019, 0.050, 0.100, -0.040],
        [-0.148, 0.017, 0.070, 0.060, 0.030],
        [-0.050, 0.010, 0.0, 0.0, 0.0],
        [-0.022, 0.0075, -0.10, 0.02, -0.28],
        [0.000, 0.0105, 1.10, 0.80, 0.35],
        [0.025, 0.0100, -0.15, -0.10, 0.60],
        [0.045, 0.0150, 0.0, 0.0, 0.0],
        [0.105, 0.0300, 0.010, 0.010, -0.015],
        [0.235, 0.0520, 0.120, 0.080, -0.100],
        [0.285, 0.0300, 0.180, 0.120, -0.140],
    ]
)
QRS = slice(ONSET, LATE + 1)
T_WAVE = slice(T1, T2 + 1)
XYZ = slice(2, 5)

# Leads I, II, V1..V6 from x, y, z: Dower's transform (Dower, Machado, Osborne 1980).
DOWER: Array = np.array(
    [
        [0.632, -0.235, 0.059],
        [0.235, 1.066, -0.132],
        [-0.515, 0.157, -0.917],
        [0.044, 0.164, -1.387],
        [0.882, 0.098, -1.277],
        [1.213, 0.127, -0.601],
        [1.125, 0.127, -0.086],
        [0.831, 0.076, 0.230],
    ]
)
# The frontal plane as electrocardiographers measure the axis: (I, 2/√3 aVF) from (x, y).
FRONTAL: Array = np.array([DOWER[0, :2], (DOWER[1, :2] - DOWER[0, :2] / 2) * 2 / np.sqrt(3)])

SINUS, PREMATURE, VENTRICULAR, DROPPED = range(4)


@dataclass
class Heart:
    """One heart. The functions in `abnormalities.py` change it in place."""

    rng: np.random.Generator
    waves: Array  # [10, 5], as HEALTHY
    rate: float  # beats per minute
    breathing: float = 0.03  # RR swings by this fraction with respiration
    irregularity: float = 0.01  # and by this one at random
    qt: float = 1.0
    fibrillation: float = 0.0  # mV; > 0: no P waves
    flutter: float = 0.0  # mV; > 0: no P waves, RR a multiple of the flutter's cycle
    atrial_hz: float = 5.0
    conduction: int = 0  # every n-th P wave is not conducted (0: all are)
    premature: int = 0  # atrial and ventricular extrasystoles per recording
    ventricular: int = 0

    def rotate(self, degrees: float, rows: slice = QRS) -> None:
        """Turn vectors in the frontal plane as the leads see it: positive is clockwise, towards the feet and the right."""
        a = np.deg2rad(degrees)
        turn = np.array([[np.cos(a), -np.sin(a)], [np.sin(a), np.cos(a)]])
        self.waves[rows, 2:4] = self.waves[rows, 2:4] @ (np.linalg.inv(FRONTAL) @ turn @ FRONTAL).T

    def axis(self) -> float:
        """Electrical axis of the R wave in degrees."""
        lead_one, foot = FRONTAL @ self.waves[R, 2:4]
        return float(np.rad2deg(np.arctan2(foot, lead_one)))

    def set_axis(self, degrees: float) -> None:
        self.rotate(degrees - self.axis())

    def widen(self, factor: float) -> None:
        """Slow the ventricles: the QRS waves spread and last longer."""
        self.waves[QRS, :2] *= factor
        self.waves[ST:, 0] += 0.04 * (factor - 1)


def healthy(rng: np.random.Generator, fast: float = 0.0) -> Heart:
    """A normal heart: sinus rhythm at 60 to 100 (`fast` is added to the mean), all values in the normal range."""
    waves = HEALTHY.copy()
    waves[:, 1] *= rng.normal(1, 0.06, 10).clip(0.85, 1.15)
    waves[:, XYZ] *= rng.lognormal(0, 0.17, (10, 1)) * rng.normal(1, 0.08, (10, 3))
    waves[P1 : P2 + 1, 0] += rng.uniform(-0.024, 0.022)
    waves[QRS, :2] *= rng.uniform(0.86, 1.16)
    waves[T_WAVE, XYZ] *= rng.lognormal(0, 0.3)
    waves[ST, XYZ] += rng.normal(0, 0.018, 3)
    heart = Heart(rng, waves, rate=float(np.clip(rng.normal(74 + fast, 10), 60.5, 99.5)))
    heart.breathing, heart.qt = rng.uniform(0.005, 0.05), rng.normal(1, 0.045)
    heart.set_axis(float(np.clip(rng.normal(45, 30), -28, 89)))
    heart.rotate(float(rng.normal(0, 18)), T_WAVE)
    turn = np.deg2rad(rng.normal(0, 12))  # position of the heart in the chest: shifts the precordial transition
    x, z = waves[:, 2].copy(), waves[:, 4].copy()
    waves[:, 2], waves[:, 4] = x * np.cos(turn) - z * np.sin(turn), x * np.sin(turn) + z * np.cos(turn)
    return heart


def intervals(heart: Heart, seconds: float) -> Array:
    """RR intervals (s) that cover `seconds` and two more."""
    rng, mean = heart.rng, 60 / heart.rate
    n = int((seconds + 2) / (0.5 * mean)) + 8
    if heart.fibrillation:
        # Refractory period plus a gamma variable: the ventricles follow at random, never too soon.
        shape = (0.55 / heart.irregularity) ** 2
        return np.asarray(mean * (0.45 + 0.55 * rng.gamma(shape, 1 / shape, n)))
    if heart.flutter:
        ratio = max(2, round(mean * heart.atrial_hz))
        blocks = np.full(n, ratio) + rng.choice([0, 0, 1, -1], n) * (rng.random() < 0.4)
        return np.asarray(np.maximum(blocks, 2) / heart.atrial_hz)
    phase = np.cumsum(np.full(n, mean)) * rng.uniform(0.18, 0.3) + rng.random()
    return np.asarray(
        mean * (1 + heart.breathing * np.sin(2 * np.pi * phase) + heart.irregularity * rng.standard_normal(n))
    )


def beats(heart: Heart, seconds: float) -> tuple[Array, NDArray[np.int64]]:
    """Times of the R peaks [b] and the kind of each beat [b]."""
    rng, rr = heart.rng, intervals(heart, seconds)
    kinds = np.full(len(rr), SINUS)
    start = -rng.random() * rr[0] - 0.5
    inside = int(np.searchsorted(start + np.cumsum(rr), seconds - 0.6))  # extrasystoles must fit in with their pause
    wanted = [PREMATURE] * heart.premature + [VENTRICULAR] * heart.ventricular
    for place, kind in zip(rng.permutation(np.arange(2, max(inside, 3)))[: len(wanted)], wanted, strict=False):
        if kinds[place - 1] == SINUS and kinds[place + 1] == SINUS:
            early = rng.uniform(0.25, 0.42) * rr[place]
            kinds[place] = kind
            rr[place] -= early
            # A ventricular beat does not reset the sinus node (full compensatory pause), an atrial one does.
            rr[place + 1] += early if kind == VENTRICULAR else 0.1 * early
    if heart.conduction:
        kinds[rng.integers(heart.conduction) :: heart.conduction] = DROPPED
    times = start + np.cumsum(rr)
    keep = times < seconds + 0.8
    return times[keep], kinds[keep]


def beat_shapes(heart: Heart) -> Array:
    """Waves of each kind of beat [4, 10, 5]."""
    rng = heart.rng
    shapes = np.stack([heart.waves] * 4)
    if heart.fibrillation or heart.flutter:
        shapes[:, [P1, P2], XYZ] = 0
    shapes[PREMATURE, [P1, P2], XYZ] *= rng.uniform(-0.6, 0.8, 3)  # from another place in the atria
    shapes[PREMATURE, [P1, P2], 0] += 0.02
    shapes[DROPPED, ONSET:, XYZ] = 0
    focus = rng.normal(0, 1, 3)
    focus *= rng.uniform(1.0, 1.9) / np.linalg.norm(focus)
    wide = shapes[VENTRICULAR]
    wide[:, XYZ] = 0
    wide[R] = [0.0, rng.uniform(0.022, 0.032), *focus]
    wide[S] = [0.055, 0.026, *(0.4 * focus + rng.normal(0, 0.35, 3))]
    wide[ST] = [0.13, 0.04, *(-0.1 * focus)]
    wide[T1] = [0.27, 0.055, *(-0.32 * focus)]
    return shapes


def atrial_track(heart: Heart, n: int, rate: int) -> Array:
    """Fibrillation or flutter waves [3, n]."""
    rng, t = heart.rng, np.arange(n) / rate
    if heart.flutter:
        phase = 2 * np.pi * (heart.atrial_hz * t + rng.random())
        saw = np.sin(phase) + np.sin(2 * phase) / 2 + np.sin(3 * phase) / 3
        return np.asarray(heart.flutter * np.outer([0.1, -0.7, -0.45], saw))
    slow = [np.sin(2 * np.pi * (f * t + p)) for f, p in zip(rng.uniform(0.2, 1.1, 4), rng.random(4), strict=True)]
    phase = 2 * np.pi * heart.atrial_hz * t + 1.6 * slow[0] + 0.9 * slow[1]
    wave = (np.sin(phase) + 0.4 * np.sin(2 * phase + 1.0)) * (1 + 0.45 * slow[2] + 0.3 * slow[3])
    return np.asarray(heart.fibrillation * np.outer([0.15, 0.45, -0.8], wave))


def heart_vector(heart: Heart, seconds: float, rate: int) -> Array:
    """The dipole through time [3, n]."""
    n, before, after = int(seconds * rate), int(0.5 * rate), int(0.8 * rate)
    times, kinds = beats(heart, seconds)
    waves = beat_shapes(heart)[kinds]  # [b, 10, 5]
    rr = np.diff(times, prepend=times[0] - 60 / heart.rate)
    # Repolarisation follows the square root of the RR interval, slowly: a single early beat shortens it only a little.
    waves[:, ST:, :2] *= (heart.qt * (60 / heart.rate) ** 0.5 * (rr * heart.rate / 60).clip(0.5, 2) ** 0.15)[
        :, None, None
    ]
    waves[:, [P1, P2], 0] *= (60 / heart.rate) ** 0.2
    if heart.conduction:  # Wenckebach: the PR interval grows from beat to beat until one is dropped
        since = (np.arange(len(kinds)) - int(np.argmax(kinds == DROPPED))) % heart.conduction
        waves[:, [P1, P2], 0] -= 0.035 * since[:, None]
    first = np.floor(times * rate).astype(int)
    tau = np.arange(-before, after) / rate + (first / rate - times)[:, None]  # [b, w]
    bells = np.exp(-0.5 * ((tau[:, None, :] - waves[:, :, :1]) / waves[:, :, 1:2]) ** 2)
    pieces = np.einsum("bkw,bkx->bxw", bells, waves[:, :, XYZ])
    margin = before + after + rate
    track = np.zeros((3, n + 2 * margin))
    for at, piece in zip(first + margin - before, pieces, strict=True):
        track[:, at : at + before + after] += piece
    vector = track[:, margin : margin + n]
    if heart.fibrillation or heart.flutter:
        vector += atrial_track(heart, n, rate)
    return vector
