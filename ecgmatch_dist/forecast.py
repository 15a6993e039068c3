"""What more labels would bring: the learning curve score(n) = L - C n^-a, fitted to scores at several numbers of labels.

For a given a the curve is linear in L and C. So a runs over a grid, L and C are drawn from their posterior at each, and draws
that no learning curve can be (falling, above 1) are left out. The intervals hold the noise of the scores and the doubt about
the curve; they do not hold that future recordings may differ from past ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]

POWERS = np.linspace(0.2, 1.6, 29)
DRAWS = 4000
NOISE, TRUST = 0.01, 4.0
"""The noise of a score that is expected before the scores are seen, and how many scores that expectation is worth."""
LEVEL = 0.9
FLAT = 0.01
"""A gain that is not worth the next labels."""
LEAST = 4
"""Scores that a curve needs."""
EARLY = 100
"""Labels; with fewer, a curve that does not rise says little: on real ECGs it rose afterwards."""


@dataclass(frozen=True)
class Range:
    """An estimate and its 90 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, eq=False)
class Forecast:
    """Draws of the curve: powers, limits and factors [draws]."""

    powers: Floats
    limits: Floats
    factors: Floats

    def curves(self, n: float) -> Floats:
        found: Floats = self.limits - self.factors * n**-self.powers
        return found

    def score(self, n: float) -> Range:
        """The expected score with n labels."""
        return _range(self.curves(n))

    def gain(self, n: float, more: float) -> Range:
        """What `more` labels bring beyond n."""
        return _range(self.curves(n + more) - self.curves(n))

    def limit(self) -> Range:
        """The score of endless labels of this kind, with this model."""
        return _range(self.limits)

    def flat(self, n: float, more: float) -> bool:
        """Whether `more` labels hardly bring anything, and there are enough of them to say so."""
        return n >= EARLY and self.small(n, more)

    def small(self, n: float, more: float) -> bool:
        """The gain is small, and even its upper end is."""
        gain = self.gain(n, more)
        return gain.value < FLAT / 2 and gain.high < 2 * FLAT


def forecast(sizes: Sequence[float], scores: Sequence[float], seed: int = 0) -> Forecast | None:
    """Fit the curve to the scores (in [0, 1], higher is better) at these numbers of labels; None: too few, or nothing fits."""
    n, y = np.asarray(sizes, np.float64), np.asarray(scores, np.float64)
    assert n.shape == y.shape
    if len(np.unique(n)) < LEAST:
        return None
    rng = np.random.default_rng(seed)
    found, weights = [], []
    per_power = DRAWS // len(POWERS) * 4
    for power in POWERS:
        scale = n.min() ** -power  # so that both columns are near 1
        columns = np.stack([np.ones(len(n)), -(n**-power) / scale], 1)
        precision = columns.T @ columns + np.diag([1e-6, 1e-6])
        centre = np.linalg.solve(precision, columns.T @ y)
        misfit = float(((y - columns @ centre) ** 2).sum()) + TRUST * NOISE**2
        freedom = TRUST + len(n) - 2
        spread = misfit / rng.chisquare(freedom, per_power)
        steps = np.linalg.solve(np.linalg.cholesky(precision).T, rng.standard_normal((2, per_power)))
        limits, factors = centre[:, None] + steps * np.sqrt(spread)
        good = (factors >= 0) & (limits <= 1)
        evidence = misfit ** (-freedom / 2) / np.sqrt(np.linalg.det(precision))
        found.append(np.stack([np.full(good.sum(), power), limits[good], factors[good] / scale]))
        weights.append(np.full(good.sum(), evidence))
    draws, chance = np.concatenate(found, 1), np.concatenate(weights)
    if not len(chance):
        return None
    chosen = rng.choice(len(chance), DRAWS, p=chance / chance.sum())
    return Forecast(*draws[:, chosen])


def sentence(fit: Forecast | None, n: int, more: int = 50) -> str:
    """The forecast in words."""
    if fit is None:
        return "Too early for a forecast."
    gain = fit.gain(n, more)
    if fit.flat(n, more):
        about = f"about {gain.value:+.3f} (at most {gain.high:+.3f})"
        return f"The curve is flat: {more} more labels would bring {about}. You may stop."
    if fit.small(n, more):
        return f"The curve does not rise yet. {n} labels are too few to say that it will not: go on."
    return f"{more} more labels: about {gain.value:+.2f} (90 % interval {gain.low:+.2f} to {gain.high:+.2f})."


def _range(draws: Floats) -> Range:
    low, middle, high = np.quantile(draws, [(1 - LEVEL) / 2, 0.5, (1 + LEVEL) / 2])
    return Range(float(middle), float(low), float(high))
