"""`ecgmatch synth`: four small synthetic databases in the layout and the formats of the Challenge 2021 release.

Class mix and co-occurrence follow the paper's table. `heart.py` and `abnormalities.py` make the signals: each label shows in
the signal, clearly or barely. Each database has its own patients, electrodes and noise. The same seed gives the same bytes
(with the same kind of processor and version of numpy).
"""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress

from ecgmatch_dist.data.preprocess import LEADS
from ecgmatch_dist.data.synthetic.abnormalities import (
    ABNORMALITIES,
    CONDUCTION,
    EXCLUDES,
    OTHER,
    REPOLARISATION,
    RHYTHM,
)
from ecgmatch_dist.data.synthetic.heart import DOWER, Array, healthy, heart_vector
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.files.atomic import write_text

RATE = 500
SINUS_RHYTHM = "426783006"
CLASSES = (CONDUCTION, RHYTHM, REPOLARISATION, OTHER)  # bit j of a class set means CLASSES[j]; 0 is Normal

# Leads I, II, V1..V6 from the electrodes RA, LA, LL, C1..C6: noise follows Einthoven's and Wilson's equations too.
ELECTRODES: Array = np.zeros((8, 9))
ELECTRODES[0, :2] = -1, 1
ELECTRODES[1, [0, 2]] = -1, 1
ELECTRODES[2:, :3] = -1 / 3
ELECTRODES[2:, 3:] = np.eye(6)


@dataclass(frozen=True)
class Database:
    """How the recordings of one hospital differ from those of another."""

    name: str
    folder: str
    key: str  # format of a recording's name
    first: int  # number of the first one
    old_header: bool  # `#Dx:` and `1000/mV`, otherwise `# Dx:` and `1000.0(0)/mV`
    mix: tuple[int, ...]  # recordings of each of the 16 class sets, per thousand
    abnormalities: dict[str, int]  # how often each abnormality is drawn for its class
    seconds: tuple[float, float] = (10.0, 10.0)
    mains: tuple[float, float] = (50.0, 0.01)  # Hz, mV
    wander: float = 0.08  # mV
    muscle: float = 0.012  # mV
    motion: float = 0.1  # share of recordings with a disturbed electrode
    loose: float = 0.0  # share of recordings with flat chest leads
    gain: float = 1.0
    placement: float = 0.0  # chest electrodes moved by this many positions towards V1
    spread: float = 0.2  # and at random by this standard deviation
    step: float = 1.0  # resolution of the converter in microvolts
    fast: float = 0.0  # beats per minute above the adult mean
    age: tuple[float, float] = (60.0, 16.0)


# Class sets by bits (Conduction 1, Rhythm 2, ST/T 4, Other 8): counts from the public labels of three databases,
# Ningbo's fitted to the paper's table. Weights of abnormalities: from the same labels, in per cent of their class.
DATABASES = (
    Database(
        "g12ec", "training/georgia", "E{:05d}", 1, True,
        (177, 41, 127, 40, 177, 39, 102, 32, 43, 25, 30, 13, 74, 22, 45, 13),
        {"IAVB": 29, "RBBB": 21, "IRBBB": 15, "LBBB": 10, "NSIVCB": 8, "LAnFB": 12, "ILBBB": 4, "AVB": 3}
        | {"SB": 41, "STach": 30, "AF": 14, "SA": 11, "AFL": 4}
        | {"TAb": 27, "NSSTTA": 22, "LQT": 16, "STIAb": 10, "LIs": 10, "TInv": 9, "IIs": 5, "STE": 2}
        | {"PAC": 35, "LAD": 26, "QAb": 13, "VPB": 12, "LQRSV": 11, "RAD": 3},
        seconds=(5.0, 10.0), mains=(60.0, 0.02), wander=0.12, muscle=0.022, motion=0.25, gain=0.95, placement=0.2,
        spread=0.3, step=4.88, age=(61.0, 15.0),
    ),
    Database(
        "ptbxl", "training/ptb-xl", "HR{:05d}", 1, False,
        (330, 67, 77, 14, 93, 12, 33, 4, 135, 99, 34, 26, 37, 20, 13, 6),
        {"LAnFB": 40, "IRBBB": 19, "IAVB": 14, "NSIVCB": 14, "CRBBB": 10, "LBBB": 9, "ILBBB": 2, "WPW": 2}
        | {"AF": 36, "STach": 20, "SA": 19, "SB": 15, "PR": 8, "AFL": 2}
        | {"TAb": 44, "STD": 19, "STC": 14, "NSSTTA": 7, "TInv": 6, "IIs": 4, "LIs": 3, "LQT": 2, "STE": 1}
        | {"LAD": 45, "VEsB": 22, "QAb": 12, "PAC": 8, "RAD": 5, "LQRSV": 5, "SVPB": 3},
        wander=0.06, muscle=0.012, motion=0.12, gain=1.0, step=5.0, age=(61.0, 17.0),
    ),
    Database(
        "ningbo", "training/ningbo", "JS{:05d}", 10647, True,
        (135, 2, 478, 19, 20, 1, 160, 29, 3, 2, 35, 21, 4, 3, 53, 35),
        {"IAVB": 50, "CRBBB": 19, "IRBBB": 10, "LAnFB": 6, "NSIVCB": 6, "CLBBB": 6, "IIAVB": 3}
        | {"SB": 45, "STach": 27, "AFL": 16, "SA": 10, "PR": 2}
        | {"TAb": 37, "STC": 25, "TInv": 19, "STD": 10, "STIAb": 6, "LQT": 3}
        | {"PAC": 29, "LAD": 21, "PVC": 17, "LQRSV": 10, "QAb": 9, "RAD": 8, "PRWP": 6},
        wander=0.03, muscle=0.028, motion=0.08, loose=0.08, gain=0.85, placement=-0.3, spread=0.25, step=4.88, fast=3.0,
        age=(56.0, 20.0),
    ),
    Database(
        "chapman", "training/chapman_shaoxing", "JS{:05d}", 1, False,
        (141, 8, 415, 50, 33, 3, 172, 29, 12, 3, 53, 15, 7, 2, 44, 13),
        {"RBBB": 34, "IAVB": 19, "NSIVCB": 18, "LBBB": 15, "AVB": 13, "WPW": 1}
        | {"SB": 51, "AF": 23, "STach": 20, "AFL": 6}
        | {"TAb": 49, "NSSTTA": 30, "STD": 10, "STE": 5, "TInv": 4, "LQT": 2}
        | {"LAD": 23, "VPB": 18, "PAC": 16, "LQRSV": 15, "QAb": 14, "RAD": 14},
        wander=0.04, muscle=0.016, motion=0.08, loose=0.01, gain=1.1, placement=-0.1, step=4.88, age=(59.0, 17.0),
    ),
)  # fmt: skip


@dataclass(frozen=True)
class SyntheticRecording:
    """One synthetic recording as it is written to disk."""

    key: str
    signal: NDArray[np.int16]  # [12, n], microvolts
    codes: tuple[str, ...]
    age: str
    sex: str


def class_set(database: Database, index: int, seed: int) -> int:
    """Classes of recording `index`, as bits."""
    # Steps of the golden ratio fill [0, 1) evenly: any number of recordings has nearly the mix of the table.
    offset = np.random.default_rng([seed, DATABASES.index(database)]).random()
    u = (offset + index * 0.6180339887498949) % 1
    return int(np.searchsorted(np.cumsum(database.mix) / sum(database.mix), u, side="right"))


def draw_abnormalities(database: Database, classes: int, rng: np.random.Generator) -> list[str]:
    """Abnormalities that make up a set of classes (bits as in `CLASSES`), compatible with each other."""
    chosen: list[str] = []
    for bit, table in enumerate(CLASSES):
        if not classes >> bit & 1:
            continue
        for _ in range(2 if bit >= 2 and rng.random() < 0.2 else 1):
            excluded = set(chosen).union(*(EXCLUDES.get(name, ()) for name in chosen))
            if classes & 8:
                excluded.add("PR")  # a paced beat hides the abnormalities of Other
            else:
                excluded.add("LAnFB")  # it turns the axis, which is an abnormality of Other
            weights = {n: w for n, w in database.abnormalities.items() if n in table and n not in excluded}
            if "LAnFB" in chosen and table is OTHER and "LAD" in weights:
                weights = {"LAD": 1}
            total = sum(weights.values())
            chosen.append(str(rng.choice(list(weights), p=[w / total for w in weights.values()])))
    return chosen


def lead_vectors(database: Database, rng: np.random.Generator) -> Array:
    """Leads I, II, V1..V6 of one patient with this database's placement of electrodes [8, 3]."""
    place = np.arange(6) - database.placement + rng.normal(0, database.spread) + rng.normal(0, 0.12, 6)
    chest = np.stack([np.interp(place, np.arange(6), DOWER[2:, axis]) for axis in range(3)], axis=1)
    chest *= rng.lognormal(0, 0.08, (6, 1))
    return np.asarray(np.concatenate([DOWER[:2], chest]) * database.gain * rng.lognormal(0, 0.15))


def electrode_noise(database: Database, n: int, rng: np.random.Generator) -> Array:
    """Baseline wander, mains hum, muscle and motion at the nine electrodes [9, n]."""
    t = np.arange(n) / RATE
    hz = np.concatenate([rng.uniform(0.18, 0.35, 1), rng.uniform(0.04, 0.7, 4)])
    waves = np.sin(2 * np.pi * (hz[:, None] * t + rng.random((5, 1))))
    noise = rng.normal(0, database.wander * rng.lognormal(-0.3, 0.6) / 2, (9, 5)) @ waves
    hum_hz, hum = database.mains
    noise += rng.normal(0, hum * rng.lognormal(-0.5, 0.7), (9, 1)) * np.sin(2 * np.pi * (hum_hz * t + rng.random()))
    tension = 1 + 1.5 * np.exp(-0.5 * ((t - rng.uniform(0, n / RATE)) / 0.6) ** 2) * (rng.random() < 0.3)
    strength = database.muscle * rng.lognormal(-0.2, 0.5) * rng.lognormal(0, 0.3, (9, 1))
    noise += strength * tension * rng.standard_normal((9, n), dtype=np.float32)
    if rng.random() < database.motion:
        for _ in range(rng.integers(1, 4)):
            bump = np.exp(-0.5 * ((t - rng.uniform(0, n / RATE)) / rng.uniform(0.04, 0.35)) ** 2)
            noise[rng.integers(9)] += rng.normal(0, 0.5) * bump
    return np.asarray(noise)


def twelve_leads(eight: Array, step: float) -> NDArray[np.int16]:
    """Leads I, II, V1..V6 in mV [8, n] -> the twelve in whole microvolts [12, n]; the limb leads stay consistent."""
    converted = np.round(np.round(eight * (1000 / step)) * step)
    one, two = converted[:2]
    limbs = np.stack([one, two, two - one, -(one + two) / 2, one - two / 2, two - one / 2])
    return np.round(np.concatenate([limbs, converted[2:]])).clip(-32767, 32767).astype(np.int16)


def make_recording(database: Database, index: int, seed: int) -> SyntheticRecording:
    """Recording `index` of a database. It depends only on the arguments."""
    rng = np.random.default_rng([seed, DATABASES.index(database), index])
    classes = class_set(database, index, seed)
    names = draw_abnormalities(database, classes, rng)
    heart = healthy(rng, database.fast)
    for name in names:
        ABNORMALITIES[name][1](heart, float(rng.beta(1.1, 1.6)))
    codes = [ABNORMALITIES[name][0] for name in names]
    if not classes & 2 and (not classes or rng.random() < 0.6):
        codes.append(SINUS_RHYTHM)
    shortest, longest = database.seconds
    seconds = longest if rng.random() < 0.9 else round(rng.uniform(shortest, longest), 1)
    vector = heart_vector(heart, seconds, RATE)
    eight = lead_vectors(database, rng) @ vector + ELECTRODES @ electrode_noise(database, vector.shape[1], rng)
    if rng.random() < database.loose:
        eight[2 + rng.integers(6) :] = 0
    age = "NaN" if rng.random() < 0.01 else str(int(np.clip(rng.normal(*database.age), 18, 89)))
    sex = "Male" if rng.random() < 0.54 else "Female"
    key = database.key.format(database.first + index)
    return SyntheticRecording(key, twelve_leads(eight, database.step), tuple(codes), age, sex)


def write_recording(recording: SyntheticRecording, folder: Path, old_header: bool) -> None:
    """Write `<key>.hea` and `<key>.mat`: a version 4 MATLAB matrix `val`, which WFDB reads as 16-bit samples after 24 bytes."""
    leads, n = recording.signal.shape
    key = recording.key
    matrix = np.array([30, leads, n, 0, 4], "<i4").tobytes() + b"val\0"
    (folder / f"{key}.mat").write_bytes(matrix + recording.signal.T.astype("<i2").tobytes())
    form, gain, mark = ("16+24", "1000/mV", "#") if old_header else ("16x1+24", "1000.0(0)/mV", "# ")
    sums = recording.signal.sum(axis=1, dtype=np.int64).astype(np.int16)  # the checksum is 16 bits wide
    lines = [f"{key} {leads} {RATE} {n}"]
    for lead, start, total in zip(LEADS, recording.signal[:, 0], sums, strict=True):
        lines.append(f"{key}.mat {form} {gain} 16 0 {start} {total} 0 {lead}")
    lines += [f"{mark}Age: {recording.age}", f"{mark}Sex: {recording.sex}", f"{mark}Dx: {','.join(recording.codes)}"]
    lines += [f"{mark}{what}: Unknown" for what in ("Rx", "Hx", "Sx")]
    (folder / f"{key}.hea").write_text("\n".join(lines) + "\n")


def write_database(database: Database, folder: Path, recordings: int, seed: int, progress: Progress) -> None:
    """Write one database under `folder`, complete or not at all, in groups g1, g2, ... of a thousand as in the release."""
    final = folder / database.folder
    if final.exists():
        return
    partial = final.with_name(f".{final.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    for index in progress.track(range(recordings), description=f"{database.name:8}"):
        group = partial / f"g{index // 1000 + 1}"
        if index % 1000 == 0:
            group.mkdir(parents=True)
        recording = make_recording(database, index, seed)
        write_recording(recording, group, database.old_header)
        with (group / "RECORDS").open("a") as records:
            records.write(f"{recording.key}\n")
    partial.rename(final)


def make_databases(
    folder: Path, recordings: int = 700, seed: int = 1, databases: Sequence[str] = (), quiet: bool = False
) -> None:
    """Write the databases (default: all four) under `folder`, `recordings` each. Finished ones are kept."""
    known = {database.name: database for database in DATABASES}
    unknown = sorted(set(databases) - set(known))
    if unknown:
        raise UserError(f"no synthetic database `{unknown[0]}`: known are {', '.join(known)}")
    if recordings < 1:
        raise UserError(f"--recordings {recordings}: give at least 1")
    settings_file = folder / "synthetic.json"
    settings = json.dumps({"format": 1, "recordings": recordings, "seed": seed}) + "\n"
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file: give a folder")
    if (
        folder.exists()
        and any(not path.name.startswith(".") for path in folder.iterdir())  # what a kill or a full disk left is hidden
        and (not settings_file.is_file() or settings_file.read_text() != settings)
    ):
        raise UserError(f"{folder} already holds something else: give an empty or new folder")
    console = Console(stderr=True)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(settings_file, settings)
        with Progress(console=console, transient=True, disable=quiet or not console.is_terminal) as progress:
            for name in databases or known:
                write_database(known[name], folder, recordings, seed, progress)
    except OSError as error:
        raise UserError(f"{error.filename or folder}: {error.strerror}; the same command continues") from None


def main(
    folder: Annotated[Path, tyro.conf.Positional],
    recordings: int = 700,
    seed: int = 1,
    databases: tuple[str, ...] = (),
) -> None:
    """Make four small synthetic databases (g12ec, ptbxl, ningbo, chapman) for `ecgmatch shards build`.

    Args:
        folder: a new or empty folder; the same command continues after an interruption.
        recordings: how many per database.
        seed: the same seed gives the same bytes.
        databases: make only these.
    """
    make_databases(folder, recordings, seed, databases)
    for database in DATABASES:
        if not databases or database.name in databases:
            print(f"{database.name:8} {recordings} recordings in {folder / database.folder}")
