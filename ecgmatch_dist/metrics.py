"""The paper's six metrics and per-class values, by scikit-learn's definitions, over all recordings of a part at once.

Shapes: n recordings, C classes; labels y [n, C] in {0, 1, UNKNOWN}, probabilities p [n, C], thresholds [C]. Where nobody has
looked for a class (UNKNOWN), the recording does not count for the class, nor the class for the recording.
A class is predicted where p >= threshold, like on the curve that the thresholds come from. (The official code applies >.)
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import average_precision_score, precision_recall_curve, roc_auc_score

from ecgmatch_dist.data.labels import UNKNOWN
from ecgmatch_dist.errors import UserError

Labels = NDArray[np.integer[Any]]
Floats = NDArray[np.floating[Any]]

BETA = 2  # of F-beta and G-beta
PER_CLASS = ("ap", "auc", "gbeta", "fbeta", "precision", "recall")


@dataclass(frozen=True)
class ClassMetrics:
    """Values of one class; None: undefined, because the class is absent."""

    ap: float | None
    auc: float | None
    gbeta: float | None
    fbeta: float | None
    precision: float | None
    recall: float | None
    prevalence: float
    threshold: float


@dataclass(frozen=True)
class Metrics:
    """Values of one part of a split, as in result.json."""

    ranking_loss: float
    hamming_loss: float
    coverage: float
    map: float
    macro_auc: float
    macro_gbeta: float
    macro_fbeta: float
    accuracy: float
    per_class: dict[str, ClassMetrics]
    absent: tuple[str, ...]
    """Classes without positives or without negatives."""

    def __post_init__(self) -> None:
        for name, value in self.scalars().items():
            if not math.isfinite(value):
                raise UserError(f"metrics: {name} is {value}, not a finite number")

    def get(self, name: str) -> float:
        """A value of the whole part by its name."""
        return float(getattr(self, name))

    def scalars(self) -> dict[str, float]:
        """All values of the whole part by name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, float)}


def absent(y: Labels) -> NDArray[np.bool_]:
    """[C], True for classes without positives or without negatives: average precision or AUC is undefined there."""
    missing: NDArray[np.bool_] = ~((y == 1).any(0) & (y == 0).any(0))
    return missing


def best_thresholds(y: Labels, p: Floats) -> NDArray[np.float64]:
    """Thresholds [C] that maximise F2 of each class; the lowest of equally good ones; 0.5 for an absent class."""
    check(y, p)
    thresholds = np.full(y.shape[1], 0.5)
    for c in np.flatnonzero(~absent(y)):
        precision, recall, candidates = precision_recall_curve(*looked_at(y, p, c))
        f = (1 + BETA**2) * precision * recall / np.maximum(BETA**2 * precision + recall, 1e-12)
        thresholds[c] = candidates[np.argmax(f[:-1])]  # the last point, recall 0, has no threshold
    return thresholds


def looked_at(y: Labels, p: Floats, c: int | np.integer[Any]) -> tuple[Labels, Floats]:
    """Labels and probabilities of class c, of the recordings in which somebody has looked for it."""
    rows = y[:, c] != UNKNOWN
    return y[rows, c], p[rows, c]


def ranking_loss(y: Labels, p: Floats) -> float:
    """Mean over recordings of the share of (positive, negative) class pairs in which the positive is not ranked higher.

    Ties count as wrong. A recording without positive or without negative classes counts 0.
    """
    pairs = (y == 1)[:, :, None] & (y == 0)[:, None, :]  # [n, C, C]
    wrong = (pairs & (p[:, :, None] <= p[:, None, :])).sum((1, 2))
    return float((wrong / np.maximum(pairs.sum((1, 2)), 1)).mean())


def coverage(y: Labels, p: Floats) -> float:
    """Mean over recordings of the rank of the lowest-ranked positive class (0 without positives).

    This is scikit-learn's coverage_error, also for one class: the best value is the mean number of positives, not that minus 1.
    """
    lowest = np.where(y == 1, p, np.inf).min(1, keepdims=True)
    return float(((p >= lowest) & (y != UNKNOWN)).sum(1).mean())


def ratio(numerator: Floats, denominator: Floats) -> Floats:
    """Division that gives 0 where the denominator is 0."""
    return np.divide(numerator, denominator, out=np.zeros(len(numerator)), where=denominator > 0)


def decisions(y: Labels, predicted: NDArray[np.bool_]) -> dict[str, Floats]:
    """Per-class values [C] that depend on the thresholds, from true and false positives and negatives."""
    tp = ((y == 1) & predicted).sum(0).astype(float)
    fp = ((y == 0) & predicted).sum(0).astype(float)
    fn = ((y == 1) & ~predicted).sum(0).astype(float)
    weighted = (1 + BETA**2) * tp
    return {
        "gbeta": ratio(tp, tp + fp + BETA * fn),
        "fbeta": ratio(weighted, weighted + BETA**2 * fn + fp),
        "precision": ratio(tp, tp + fp),
        "recall": ratio(tp, tp + fn),
    }


def macro_ap(y: Labels, p: Floats) -> float:
    """MAP alone: the mean of the average precision over the classes that have positives and negatives."""
    pairs = [looked_at(y, p, c) for c in range(y.shape[1])]
    values = [average_precision_score(*pair) for pair in pairs if 0 < pair[0].sum() < len(pair[0])]
    return float(np.mean(values)) if values else 0.0


def compute_metrics(y: Labels, p: Floats, thresholds: Floats, classes: Sequence[str]) -> Metrics:
    """All metrics of a part.

    Absent classes are listed in `absent`, have None for undefined values, and are left out of the class means (0 if every class
    is absent). Ranking loss, coverage, Hamming loss and accuracy (all classes of a recording right) use all classes that were
    looked for.
    """
    check(y, p)
    assert y.shape[1] == len(thresholds) == len(classes), (y.shape, len(thresholds), classes)
    predicted = p >= thresholds
    undefined = absent(y)
    values = {name: np.zeros(len(classes)) for name in PER_CLASS} | decisions(y, predicted)
    for c in np.flatnonzero(~undefined):
        values["ap"][c] = average_precision_score(*looked_at(y, p, c))
        values["auc"][c] = roc_auc_score(*looked_at(y, p, c))

    def mean(name: str) -> float:
        return float(values[name][~undefined].mean()) if not undefined.all() else 0.0

    def of_class(c: int) -> ClassMetrics:
        own = {name: None if undefined[c] else float(values[name][c]) for name in PER_CLASS}
        labels, _ = looked_at(y, p, c)
        prevalence = float(labels.mean()) if len(labels) else 0.0
        return ClassMetrics(**own, prevalence=prevalence, threshold=float(thresholds[c]))

    wrong = (predicted != (y == 1)) & (y != UNKNOWN)
    return Metrics(
        ranking_loss=ranking_loss(y, p),
        hamming_loss=float(wrong.sum() / (y != UNKNOWN).sum()),
        coverage=coverage(y, p),
        map=mean("ap"),
        macro_auc=mean("auc"),
        macro_gbeta=mean("gbeta"),
        macro_fbeta=mean("fbeta"),
        accuracy=float((~wrong.any(1)).mean()),
        per_class={name: of_class(c) for c, name in enumerate(classes)},
        absent=tuple(name for name, missing in zip(classes, undefined, strict=True) if missing),
    )


def check(y: Labels, p: Floats) -> None:
    assert y.shape == p.shape, (y.shape, p.shape)
    if len(y) == 0:
        raise UserError("no recordings to measure on: this part of the split is empty; make the split again")
    if (unknown := int((y == UNKNOWN).all(1).sum())) > 0:
        raise UserError(f"{unknown} of {len(y)} recordings to measure on have no label at all; make the split again")
    if not np.isfinite(p).all():
        bad = int((~np.isfinite(p)).any(1).sum())
        raise UserError(f"{bad} of {len(p)} predictions are not numbers: the training diverged; lower optim.lr")
