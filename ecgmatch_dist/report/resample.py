"""Bootstrap over test recordings: how much a metric varies with the choice of recordings.

A resample is a vector of counts, one per recording. Scores are sorted into bins once per class; then one sparse product gives
the ranking metrics of all resamples.
"""

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csc_array

from ecgmatch_dist.data.labels import UNKNOWN

Floats = NDArray[np.float64]
Labels = NDArray[np.uint8]
Scores = NDArray[np.float32]
BINS = 512
"""Distinct scores per class; with more, neighbouring scores share a bin (`resample` corrects the shift)."""


def counts(n: int, replicates: int, seed: int) -> Scores:
    """How often each recording is drawn [n, 1 + R]: once in column 0, at random in the R resamples.

    Equal arguments give equal draws, so that runs of one split can be compared in pairs."""
    rng = np.random.default_rng([n, seed])
    out = np.ones((n, 1 + replicates), np.float32)
    for r in range(1, 1 + replicates):
        out[:, r] = np.bincount(rng.integers(n, size=n), minlength=n)
    return out


def per_recording(labels: Labels, probabilities: Scores, thresholds: Floats) -> dict[str, Floats]:
    """Ranking loss, hamming loss and coverage of each recording [n], by scikit-learn's definitions (its loop is slow)."""
    truth, lacks, seen = labels == 1, labels == 0, labels != UNKNOWN
    wrong, coverage = np.zeros((2, len(labels)))
    for c in range(labels.shape[1]):
        not_lower = probabilities >= probabilities[:, [c]]
        wrong += np.where(truth[:, c], (not_lower & lacks).sum(axis=1), 0)
        coverage = np.maximum(coverage, np.where(truth[:, c], (not_lower & seen).sum(axis=1), 0))
    pairs = truth.sum(axis=1) * lacks.sum(axis=1)
    hamming = (((probabilities >= thresholds) != truth) & seen).sum(axis=1) / np.maximum(seen.sum(axis=1), 1)
    return {"ranking_loss": wrong / np.maximum(pairs, 1), "hamming_loss": hamming, "coverage": coverage}


def resample(labels: Labels, probabilities: Scores, thresholds: Floats, weights: Scores) -> dict[str, Floats]:
    """The six metrics under the `weights` [n, 1 + R] of `counts`: first those of the whole test part, which are
    `compute_metrics`' (nan where no class has positives and negatives), then those of the resamples."""
    found = weighted_metrics(labels, probabilities, thresholds, weights, BINS)
    if len(labels) <= BINS:
        return found
    exact = weighted_metrics(labels, probabilities, thresholds, weights[:, :1], len(labels))
    return {
        name: values + (exact[name] - values[0]) for name, values in found.items()
    }  # by so much the bins shift them


def weighted_metrics(
    labels: Labels, probabilities: Scores, thresholds: Floats, weights: Scores, bins: int
) -> dict[str, Floats]:
    """The six metrics under each column of `weights`."""
    n, classes = labels.shape
    rows = per_recording(labels, probabilities, thresholds)
    truth, lacks, guess = labels == 1, labels == 0, probabilities >= thresholds
    seen = truth | lacks
    decided = (truth & guess, lacks & guess, truth & ~guess, lacks, seen)
    per_row = np.concatenate([np.stack(list(rows.values()), axis=1), *decided], axis=1)
    sums = (per_row.astype(np.float32).T @ weights).astype(np.float64)
    out = {name: sums[i] / n for i, name in enumerate(rows)}
    tp, fp, fn, negatives, labels_given = sums[3:].reshape(5, classes, -1)
    out["hamming_loss"] = (fp + fn).sum(0) / labels_given.sum(0)
    usable = (tp + fn > 0) & (negatives > 0)
    by_class = [
        ranking(truth[seen[:, c], c], probabilities[seen[:, c], c], weights[seen[:, c]], bins) for c in range(classes)
    ]
    with np.errstate(invalid="ignore", divide="ignore"):
        out["macro_gbeta"] = macro(tp / (tp + fp + 2 * fn), usable)
    out["map"] = macro(np.stack([ap for ap, _ in by_class]), usable)
    out["macro_auc"] = macro(np.stack([auc for _, auc in by_class]), usable)
    return out


def ranking(truth: NDArray[np.bool_], score: Scores, weights: Scores, most: int) -> tuple[Floats, Floats]:
    """Average precision and area under the ROC curve of one class [R], over at most so many bins; nan where undefined."""
    if not len(score):  # nobody has looked for this class
        return np.full(weights.shape[1], np.nan), np.full(weights.shape[1], np.nan)
    values, where = np.unique(-score, return_inverse=True)  # 0 is the highest score
    if len(values) > most:
        first = np.searchsorted(np.sort(-score), values)  # recordings above each score, so that bins are equally full
        where = (first * most // len(score))[where]
    bins = min(len(values), most)
    # One entry in each column, so that the arrays of the sparse matrix need no sorting.
    cells = csc_array(
        (np.ones(len(score), np.float32), truth * bins + where, np.arange(len(score) + 1)), (2 * bins, len(score))
    )
    negative, positive = (cells @ weights).reshape(2, bins, -1).astype(np.float64)
    tp, fp = positive.cumsum(axis=0), negative.cumsum(axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        precision = np.where(positive > 0, tp / (tp + fp), 0)
        ap = (positive * precision).sum(axis=0) / tp[-1]
        auc = 1 - (positive * (fp - negative / 2)).sum(axis=0) / (tp[-1] * fp[-1])
    return ap, auc


def macro(values: Floats, usable: NDArray[np.bool_]) -> Floats:
    """Mean over the usable classes of [C, R], per resample; nan where no class is usable."""
    n = usable.sum(axis=0)
    with np.errstate(invalid="ignore"):
        return np.where(n > 0, np.where(usable, values, 0).sum(axis=0) / n, np.nan)


def interval(replicates: Floats, level: float = 0.95) -> tuple[float, float]:
    """The central `level` of the replicates."""
    low, high = np.nanquantile(replicates, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
