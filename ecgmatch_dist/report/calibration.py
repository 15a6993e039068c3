"""Calibration of probabilities (expected calibration error, Brier score) and the benefit of acting on them (decision curve)."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Reliability:
    """Mean probability, observed frequency and number of recordings of each non-empty bin; bins have equal width."""

    confidence: Floats
    frequency: Floats
    count: NDArray[np.int64]

    @property
    def ece(self) -> float:
        """Expected calibration error: the mean gap, weighted by recordings."""
        return float(np.average(np.abs(self.confidence - self.frequency), weights=self.count))


def reliability(truth: NDArray[np.integer[Any]], probability: NDArray[np.floating[Any]], bins: int = 15) -> Reliability:
    """`truth` and `probability` [n] of one class, in bins [i/b, (i+1)/b); 1 belongs to the last."""
    where = np.minimum((probability * bins).astype(int), bins - 1)
    count = np.bincount(where, minlength=bins)
    used = count > 0
    confidence = np.bincount(where, probability, bins)[used] / count[used]
    frequency = np.bincount(where, truth, bins)[used] / count[used]
    return Reliability(confidence, frequency, count[used])


def brier(truth: NDArray[np.integer[Any]], probability: NDArray[np.floating[Any]]) -> float:
    """Mean squared error of the probability."""
    return float(np.mean((probability.astype(np.float64) - truth) ** 2))


def net_benefit(truth: NDArray[np.integer[Any]], probability: NDArray[np.floating[Any]], p_t: Floats) -> Floats:
    """Vickers and Elkin's decision curve, TP/n - FP/n x p_t / (1 - p_t), at the threshold probabilities `p_t` [t]."""
    n = len(truth)
    order = np.argsort(probability)
    acted = n - np.searchsorted(probability[order], p_t.astype(probability.dtype), side="left")
    hits = np.concatenate([[0], np.cumsum(truth[order][::-1])])[acted]
    return np.asarray(hits / n - (acted - hits) / n * p_t / (1 - p_t), np.float64)


def treat_all(prevalence: float, p_t: Floats) -> Floats:
    """The decision curve of acting on everyone."""
    return prevalence - (1 - prevalence) * p_t / (1 - p_t)
