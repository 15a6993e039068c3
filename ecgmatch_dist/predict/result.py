"""What a prediction is, and the row of a table that it becomes."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

SAME = 0.999
"""Similarity from which on two recordings are the same one, or copies. In a run with 81 known cases a recording that was
read again had 0.99999, two different ones at most 0.9."""
SEEN = (
    "This recording, or a copy of it, is among those that the model has learnt from or was chosen with: "
    "the answer says nothing about how good the model is."
)


@dataclass(frozen=True)
class Case:
    """A recording with known labels, and how much the new one is like it."""

    id: str
    """database/key"""
    similarity: float
    """Cosine of the whitened features: 1 the same, 0 as unlike as two recordings at random."""
    classes: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Prediction:
    """The model's answer for one recording. Dictionaries are by the classes' short names."""

    record: str
    """Name of the recording."""
    path: str
    """Its file; empty: it came as an array."""
    probabilities: dict[str, float]
    """The network's own output, the number that `evaluate` and the metrics use."""
    calibrated: dict[str, float]
    """Probabilities to be read as frequencies: of the validation recordings with 0.8, about 80 % had the class."""
    thresholds: dict[str, float]
    """Of `probabilities`, chosen to maximise F2 on validation: a missed class counts more than a false alarm."""
    predicted: tuple[str, ...]
    """Classes whose probability reaches the threshold."""
    likely: tuple[str, ...]
    """Classes whose calibrated probability is at least 0.5: more likely there than not."""
    flags: tuple[str, ...]
    """What is odd about the signal (`predict/flags.py` says it in words)."""
    nearest: tuple[Case, ...]
    """The most similar known cases; the first is the most similar one."""
    features: NDArray[np.float32] = field(repr=False)
    """z [D], before the classifier."""

    error: str = field(default="", init=False)

    @property
    def seen(self) -> bool:
        """Whether it is one of the known cases itself."""
        return bool(self.nearest) and self.nearest[0].similarity >= SAME

    def to_json(self) -> dict[str, Any]:
        """A row of the table."""
        classes = {
            name: {
                "probability": round(p, 6),
                "calibrated": round(self.calibrated[name], 6),
                "threshold": round(self.thresholds[name], 6),
                "predicted": name in self.predicted,
                "likely": name in self.likely,
            }
            for name, p in self.probabilities.items()
        }
        cases = [{"id": c.id, "similarity": round(c.similarity, 4), "classes": list(c.classes)} for c in self.nearest]
        about = {"path": self.path, "record": self.record, "error": "", "flags": list(self.flags)}
        decided = {"predicted": list(self.predicted), "likely": list(self.likely)}
        return {**about, **decided, "classes": classes, "nearest": cases}


@dataclass(frozen=True)
class Failure:
    """A file that cannot be predicted, and why."""

    path: str
    error: str

    def to_json(self) -> dict[str, Any]:
        """A row of the table."""
        return {"path": self.path, "record": "", "error": self.error, "flags": [], "predicted": [], "likely": []} | {
            "classes": {},
            "nearest": [],
        }
