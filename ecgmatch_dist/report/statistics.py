"""Comparing k methods on N databases after Demšar (2006): Friedman, Bonferroni-Dunn, Nemenyi, Wilcoxon with Holm.

For k = 8 and N = 4 the critical value of F_F at 0.05 is F(7, 21) = 2.4876. The ECGMatch paper prints 3.2590, which is F(4, 12).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

Array = NDArray[np.float64]
ALPHA = 0.05


@dataclass(frozen=True)
class Friedman:
    """Result of Friedman's test: do k methods differ over N databases?"""

    ranks: Array
    """Mean rank of each method [k]; 1 is the best."""
    n: int
    """N, the number of databases."""
    f: float
    """F_F by Demšar's formula, without tie correction."""
    f_tied: float
    """F_F from the tie-corrected chi-square (what scipy's `friedmanchisquare` starts from)."""
    critical: float
    """Critical value of F(k - 1, (k - 1)(N - 1)) at 0.05."""
    p: float
    """Probability of `f` or more if all methods are equal."""

    @property
    def k(self) -> int:
        return len(self.ranks)

    @property
    def rejected(self) -> bool:
        return self.f > self.critical


def rank(values: Array, greater_is_better: bool) -> Array:
    """Ranks in each row of [N, k]: 1 is the best, ties share the mean of their ranks."""
    ranks: Array = stats.rankdata(-values if greater_is_better else values, axis=1)
    return ranks


def friedman(values: Array, greater_is_better: bool) -> Friedman:
    """Friedman's test with Iman and Davenport's F_F on `values` [N, k], one row per database."""
    n, k = values.shape
    if n < 2 or k < 2:
        raise ValueError(f"{n} databases and {k} methods: a comparison needs at least two of each")
    ranks = rank(values, greater_is_better)
    mean = ranks.mean(axis=0)
    chi2 = 12 * n / (k * (k + 1)) * (np.sum(mean**2) - k * (k + 1) ** 2 / 4)
    ties = sum(float(np.sum(count**3 - count)) for count in (np.unique(row, return_counts=True)[1] for row in ranks))
    correction = 1 - ties / (n * k * (k**2 - 1))
    degrees = (k - 1, (k - 1) * (n - 1))
    f = iman_davenport(chi2, n, k)
    return Friedman(
        ranks=mean,
        n=n,
        f=f,
        f_tied=iman_davenport(chi2 / correction, n, k)
        if correction > 0
        else 0.0,  # 0: all methods tie on every database
        critical=float(stats.f.ppf(1 - ALPHA, *degrees)),
        p=float(stats.f.sf(f, *degrees)),
    )


def iman_davenport(chi2: float, n: int, k: int) -> float:
    """F_F of Friedman's chi-square; infinite when all databases rank the methods alike."""
    rest = n * (k - 1) - chi2
    return float((n - 1) * chi2 / rest) if rest > 1e-9 else float("inf")


def bonferroni_dunn(k: int, n: int, alpha: float = ALPHA) -> float:
    """Critical difference of mean ranks between a control and each of the k - 1 other methods."""
    return float(stats.norm.ppf(1 - alpha / (2 * (k - 1))) * rank_error(k, n))


def nemenyi(k: int, n: int, alpha: float = ALPHA) -> float:
    """Critical difference of mean ranks between any two of k methods."""
    return float(stats.studentized_range.ppf(1 - alpha, k, np.inf) / np.sqrt(2) * rank_error(k, n))


def nemenyi_p(ranks: Array, n: int) -> Array:
    """p-values [k, k] of all pairs of mean ranks [k]."""
    k = len(ranks)
    p = np.ones((k, k))
    first, second = np.triu_indices(k, 1)
    q = np.abs(ranks[first] - ranks[second]) / rank_error(k, n) * np.sqrt(2)
    values, where = np.unique(q.round(12), return_inverse=True)  # the distribution is slow, and many pairs have equal q
    p[first, second] = p[second, first] = stats.studentized_range.sf(values, k, np.inf)[where]
    return p


def rank_error(k: int, n: int) -> float:
    """Standard error of a difference of two mean ranks."""
    return float(np.sqrt(k * (k + 1) / (6 * n)))


def wilcoxon(control: Array, other: Array) -> float:
    """Two-sided p of the signed-rank test on pairs; 1 when no pair differs."""
    difference = control - other
    if not np.any(difference):
        return 1.0
    return float(stats.wilcoxon(difference).pvalue)


def holm(p: Sequence[float]) -> list[float]:
    """Holm's step-down adjustment of p-values, in the order given."""
    adjusted, worst = [0.0] * len(p), 0.0
    for position, index in enumerate(np.argsort(np.asarray(p, float), kind="stable")):
        worst = max(worst, min(1.0, (len(p) - position) * p[index]))
        adjusted[index] = worst
    return adjusted
