"""Bootstrap over test recordings: how far a metric would move, had other recordings of the same kind been tested.

A resample is a vector of counts. Scores are sorted into bins once, so that a resample costs one sparse product for all ranking
metrics.
"""

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

Floats = NDArray[np.float64]
Labels = NDArray[np.uint8]
Scores = NDArray[np.float32]
BINS = 512
"""Distinct scores a class keeps; with more, neighbours share a bin (the shift that this makes is taken out again)."""


def counts(n: int, replicates: int, seed: int) -> Scores:
    """How often each of n recordings is drawn: once in column 0, then in R resamples [n, 1 + R].

    Equal arguments draw alike: pairs stay pairs."""
    rng = np.random.default_rng([n, seed])
    out = np.ones((n, 1 + replicates), np.float32)
    for r in range(1, 1 + replicates):
        out[:, r] = np.bincount(rng.integers(n, size=n), minlength=n)
    return out


def per_recording(labels: Labels, probabilities: Scores, thresholds: Floats) -> dict[str, Floats]:
    """Ranking loss, hamming loss and coverage of each recording [n], by scikit-learn's definitions (its loop is slow)."""
    truth = labels == 1
    wrong, coverage = np.zeros((2, len(labels)))
    for c in range(labels.shape[1]):
        not_lower = probabilities >= probabilities[:, [c]]
        wrong += np.where(truth[:, c], (not_lower & ~truth).sum(axis=1), 0)
        coverage = np.maximum(coverage, np.where(truth[:, c], not_lower.sum(axis=1), 0))
    pairs = truth.sum(axis=1) * (~truth).sum(axis=1)
    hamming = ((probabilities >= thresholds) != truth).mean(axis=1)
    return {"ranking_loss": wrong / np.maximum(pairs, 1), "hamming_loss": hamming, "coverage": coverage}


def resample(
    labels: Labels, probabilities: Scores, thresholds: Floats, weights: Scores, exact: dict[str, float]
) -> dict[str, Floats]:
    """The six metrics [R] under `weights` [n, 1 + R] of `counts`; `exact`: their values on the test part."""
    n, classes = labels.shape
    rows = per_recording(labels, probabilities, thresholds)
    truth, guess = labels == 1, probabilities >= thresholds
    table = np.concatenate(
        [np.stack(list(rows.values()), axis=1), truth & guess, ~truth & guess, truth & ~guess], axis=1
    )
    sums = (table.astype(np.float32).T @ weights).astype(np.float64)
    out = {name: sums[i] / n for i, name in enumerate(rows)}
    tp, fp, fn = sums[3:].reshape(3, classes, -1)
    usable = (tp + fn > 0) & (tp + fn < n)
    by_class = [ranking(truth[:, c], probabilities[:, c], weights) for c in range(classes)]
    with np.errstate(invalid="ignore", divide="ignore"):
        out["macro_gbeta"] = macro(tp / (tp + fp + 2 * fn), usable)
    out["map"] = macro(np.stack([ap for ap, _ in by_class]), usable)
    out["macro_auc"] = macro(np.stack([auc for _, auc in by_class]), usable)
    # Column 0, the test part itself, tells by how much the bins are off.
    return {name: values[1:] + (exact[name] - values[0]) for name, values in out.items()}


def ranking(truth: NDArray[np.bool_], score: Scores, weights: Scores) -> tuple[Floats, Floats]:
    """Average precision and area under the ROC curve of one class [R], from its bins; nan where undefined."""
    values, where = np.unique(-score, return_inverse=True)  # 0 is the highest score
    if len(values) > BINS:
        first = np.searchsorted(np.sort(-score), values)  # recordings above each score: bins hold equally many
        where = (first * BINS // len(score))[where]
    bins = min(len(values), BINS)
    cells = csr_array(
        (np.ones(len(score), np.float32), (truth * bins + where, np.arange(len(score)))), (2 * bins, len(score))
    )
    negative, positive = (cells @ weights).reshape(2, bins, -1).astype(np.float64)
    tp, fp = positive.cumsum(axis=0), negative.cumsum(axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        precision = np.where(positive > 0, tp / (tp + fp), 0)
        ap = (positive * precision).sum(axis=0) / tp[-1]
        auc = 1 - (positive * (fp - negative / 2)).sum(axis=0) / (tp[-1] * fp[-1])
    return ap, auc


def macro(values: Floats, usable: NDArray[np.bool_]) -> Floats:
    """Mean over the usable classes of [C, R], each resample for itself; nan where there is none."""
    n = usable.sum(axis=0)
    with np.errstate(invalid="ignore"):
        return np.where(n > 0, np.where(usable, values, 0).sum(axis=0) / n, np.nan)


def interval(replicates: Floats, level: float = 0.95) -> tuple[float, float]:
    """The central `level` of the replicates."""
    low, high = np.nanquantile(replicates, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
