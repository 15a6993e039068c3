"""The paper's six metrics and per-class values, by scikit-learn's definitions, computed once on everything.

n recordings, C classes; labels y [n, C] in {0, 1}, probabilities p [n, C], thresholds [C]. A class is predicted where
p >= threshold, as on the curve that the thresholds are chosen from (the official code chooses by >= and applies >).
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import average_precision_score, precision_recall_curve, roc_auc_score

from ecgmatch_dist.errors import UserError

Labels = NDArray[np.integer[Any]]
Floats = NDArray[np.floating[Any]]

BETA = 2  # of F-beta and G-beta
PER_CLASS = ("ap", "auc", "gbeta", "fbeta", "precision", "recall")


def absent(y: Labels) -> NDArray[np.bool_]:
    """[C] True for classes without positives or without negatives: average precision or AUC mean nothing there."""
    missing: NDArray[np.bool_] = (y == y[0]).all(0)
    return missing


def best_thresholds(y: Labels, p: Floats) -> NDArray[np.float64]:
    """[C] thresholds that maximise F2 of each class; of equal ones the lowest; 0.5 for an absent class."""
    check(y, p)
    thresholds = np.full(y.shape[1], 0.5)
    for c in np.flatnonzero(~absent(y)):
        precision, recall, candidates = precision_recall_curve(y[:, c], p[:, c])
        f = (1 + BETA**2) * precision * recall / np.maximum(BETA**2 * precision + recall, 1e-12)
        thresholds[c] = candidates[np.argmax(f[:-1])]  # the last point, recall 0, has no threshold
    return thresholds


def ranking_loss(y: Labels, p: Floats) -> float:
    """Mean over recordings of the share of (positive, negative) class pairs in which the positive is not above.

    Ties count as wrong; a recording without a positive or without a negative class counts 0.
    """
    positive = y.astype(bool)
    pairs = positive[:, :, None] & ~positive[:, None, :]  # [n, C, C]
    wrong = (pairs & (p[:, :, None] <= p[:, None, :])).sum((1, 2))
    return float((wrong / np.maximum(pairs.sum((1, 2)), 1)).mean())


def coverage(y: Labels, p: Floats) -> float:
    """Mean over recordings of how many classes one must take from the top to have all positives (0 without any).

    scikit-learn's coverage_error, also for one class; at best the mean number of positives, not that minus 1.
    """
    lowest = np.where(y.astype(bool), p, np.inf).min(1, keepdims=True)
    return float((p >= lowest).sum(1).mean())


def ratio(numerator: Floats, denominator: Floats) -> Floats:
    """0 where the denominator is 0."""
    return np.divide(numerator, denominator, out=np.zeros(len(numerator)), where=denominator > 0)


def decisions(y: Labels, predicted: NDArray[np.bool_]) -> dict[str, Floats]:
    """Per-class values [C] that depend on thresholds, from the counts of true and false decisions."""
    truth = y.astype(bool)
    tp = (truth & predicted).sum(0).astype(float)
    fp = (~truth & predicted).sum(0).astype(float)
    fn = (truth & ~predicted).sum(0).astype(float)
    weighted = (1 + BETA**2) * tp
    return {
        "gbeta": ratio(tp, tp + fp + BETA * fn),
        "fbeta": ratio(weighted, weighted + BETA**2 * fn + fp),
        "precision": ratio(tp, tp + fp),
        "recall": ratio(tp, tp + fn),
    }


def compute_metrics(y: Labels, p: Floats, thresholds: Floats, classes: list[str]) -> dict[str, Any]:
    """All metrics of a part, as `result.json` holds them.

    Absent classes are listed in "absent", have None for what is undefined, and are left out of the class means (which
    are 0 if every class is absent). Ranking loss, coverage, Hamming loss and accuracy (all classes of a recording
    right) are over all classes.
    """
    check(y, p)
    assert y.shape[1] == len(thresholds) == len(classes), (y.shape, len(thresholds), classes)
    predicted = p >= thresholds
    undefined = absent(y)
    values = {name: np.zeros(len(classes)) for name in PER_CLASS} | decisions(y, predicted)
    for c in np.flatnonzero(~undefined):
        values["ap"][c] = average_precision_score(y[:, c], p[:, c])
        values["auc"][c] = roc_auc_score(y[:, c], p[:, c])

    def mean(name: str) -> float:
        return float(values[name][~undefined].mean()) if not undefined.all() else 0.0

    per_class = {}
    for i, name in enumerate(classes):
        per_class[name] = {key: None if undefined[i] else float(values[key][i]) for key in PER_CLASS}
        per_class[name] |= {"prevalence": float(y[:, i].mean()), "threshold": float(thresholds[i])}
    wrong = predicted != y.astype(bool)
    return {
        "ranking_loss": ranking_loss(y, p),
        "hamming_loss": float(wrong.mean()),
        "coverage": coverage(y, p),
        "map": mean("ap"),
        "macro_auc": mean("auc"),
        "macro_gbeta": mean("gbeta"),
        "macro_fbeta": mean("fbeta"),
        "accuracy": float((~wrong.any(1)).mean()),
        "per_class": per_class,
        "absent": [name for name, missing in zip(classes, undefined, strict=True) if missing],
    }


def check(y: Labels, p: Floats) -> None:
    assert y.shape == p.shape, (y.shape, p.shape)
    if len(y) == 0:
        raise UserError("no recordings to measure on: this part of the split is empty; make the split again")
    if not np.isfinite(p).all():
        bad = int((~np.isfinite(p)).any(1).sum())
        raise UserError(f"{bad} of {len(p)} predictions are not numbers: the training diverged; lower optim.lr")
