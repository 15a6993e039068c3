"""A run folder with an untrained model, and recordings to predict."""

import re
from pathlib import Path

import numpy as np
import wfdb
from numpy.typing import NDArray

from ecgmatch_dist.config import Model
from ecgmatch_dist.data.preprocess import LEADS, PRESETS
from ecgmatch_dist.network.model import build_model
from ecgmatch_dist.record.weights import ModelNotes, save_weights

CLASSES = ("CD", "Rhythm", "STT", "Other", "Normal")
THRESHOLDS = (0.0, 1.0, 0.5, 0.5, 0.0)
"""CD and Normal are always predicted, Rhythm never."""


def write_model(folder: Path, cases: int = 20, crop: int = 0) -> Path:
    """A run folder with an untrained model, and `cases` known cases of each part."""
    (folder / "predictions").mkdir(parents=True)
    settings = Model(width=16, heads=2)
    notes = ModelNotes(CLASSES, "ecgmatch5", THRESHOLDS, PRESETS["cpu"], settings, step=50, crop=crop)
    save_weights(folder / "best.safetensors", build_model(5, settings, seed=0), notes)
    rng = np.random.default_rng(0)
    for part in ("labelled", "validation"):
        np.savez(
            folder / "predictions" / f"{part}.npz",
            ids=np.array([f"chapman/{part}{i}" for i in range(cases)]),
            labels=np.eye(5, dtype=np.uint8)[np.arange(cases) % 5],
            probabilities=rng.uniform(0.1, 0.9, (cases, 5)).astype(np.float32),
            features=(10 + rng.standard_normal((cases, 16))).astype(np.float32),  # nearly parallel, as real ones are
        )
    return folder


def ecg(seconds: float = 10, rate: float = 500, seed: int = 1) -> NDArray[np.float64]:
    """A signal [12, n] in mV whose limb leads obey Einthoven and Goldberger."""
    rng = np.random.default_rng(seed)
    x = np.cumsum(rng.standard_normal((12, round(seconds * rate))), axis=1) / 50
    first, second = x[0], x[1]
    x[2:6] = second - first, -(first + second) / 2, first - second / 2, second - first / 2
    return x


def write_record(folder: Path, name: str, signal: NDArray[np.float64], rate: float = 500) -> Path:
    """A WFDB record. Its header may have any name; the names inside it may not."""
    folder.mkdir(parents=True, exist_ok=True)
    inside = re.sub(r"\W", "_", name)
    kinds = {"fmt": ["16"] * 12, "adc_gain": [1000] * 12, "baseline": [0] * 12, "write_dir": str(folder)}
    wfdb.wrsamp(inside, rate, ["mV"] * 12, list(LEADS), signal.T, **kinds)
    return (folder / f"{inside}.hea").rename(folder / f"{name}.hea")
