"""Can a probability be believed (expected calibration error, Brier score), and is acting on it worth it (decision curve)?"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Reliability:
    """Equal-width bins of one class: mean probability, observed frequency and recordings of each bin that is not empty."""

    confidence: Floats
    frequency: Floats
    count: NDArray[np.int64]

    @property
    def ece(self) -> float:
        """Expected calibration error: the mean gap, weighted by recordings."""
        return float(np.average(np.abs(self.confidence - self.frequency), weights=self.count))


def reliability(truth: NDArray[np.uint8], probability: NDArray[np.float32], bins: int = 15) -> Reliability:
    """`truth` and `probability` [n] of one class, in bins [i/b, (i+1)/b); 1 belongs to the last."""
    where = np.minimum((probability * bins).astype(int), bins - 1)
    count = np.bincount(where, minlength=bins)
    used = count > 0
    confidence = np.bincount(where, probability, bins)[used] / count[used]
    frequency = np.bincount(where, truth, bins)[used] / count[used]
    return Reliability(confidence, frequency, count[used])


def brier(truth: NDArray[np.uint8], probability: NDArray[np.float32]) -> float:
    """Mean squared error of the probability."""
    return float(np.mean((probability.astype(np.float64) - truth) ** 2))


def net_benefit(truth: NDArray[np.uint8], probability: NDArray[np.float32], odds_at: Floats) -> Floats:
    """Vickers and Elkin's decision curve [t]: TP/n - FP/n x p_t / (1 - p_t), acting on everyone with probability >= p_t."""
    n = len(truth)
    order = np.argsort(probability)
    acted = n - np.searchsorted(probability[order], odds_at.astype(probability.dtype), side="left")
    hits = np.concatenate([[0], np.cumsum(truth[order][::-1])])[acted]
    return np.asarray(hits / n - (acted - hits) / n * odds_at / (1 - odds_at), np.float64)


def treat_all(prevalence: float, odds_at: Floats) -> Floats:
    """The decision curve of acting on everyone."""
    return prevalence - (1 - prevalence) * odds_at / (1 - odds_at)
