"""Which recording to ask about next.

First a spread: recordings far from all that were answered, where many others are (k-means++ with density; by the distance,
not its square, which went for the oddest ones). When there is a model, the expected gain: how uncertain it is, rare classes
first, times the root of how many recordings are alike. Near-duplicates of answered recordings, and other recordings of the same
patient, wait until nothing else is left.
"""

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from ecgmatch_dist.data.labels import UNKNOWN
from ecgmatch_dist.label.space import Points, Space

FIRST = 20
"""Answers before the model chooses."""
DUPLICATE, ALIKE = 0.1, 1.3
"""In units of the usual distance to the most similar recordings: nearer is a duplicate; nearer counts less."""


class Chooser:
    """Rows are 0..N-1 of the space. `groups` [N]: recordings with the same number are of one patient."""

    def __init__(self, space: Space, groups: NDArray[np.int64], seed: int = 0) -> None:
        self.space, self.groups, self.seed = space, groups, seed
        self.near: Points = np.full(len(groups), np.inf, np.float32)
        """[N] distance to the nearest recording that was answered or is being looked at."""
        self.taken = np.zeros(len(groups), bool)
        self._seen = np.zeros(int(groups.max(initial=-1)) + 1, bool)
        self.gain: Points | None = None

    def take(self, row: int) -> None:
        """The recording is answered, or is being looked at."""
        if not self.taken[row]:
            self.taken[row] = True
            self._seen[self.groups[row]] = True
            np.minimum(self.near, self.space.distances(row), out=self.near)

    def learn(self, probabilities: Points, labels: NDArray[np.uint8]) -> None:
        """Follow a model: its probabilities of all recordings [N, C], and the labels [n, C] that it knows."""
        self.gain = expected_gain(probabilities, labels) * np.sqrt(self.space.density)

    def next(self, without: Collection[int] = (), random: bool = False) -> tuple[int, str] | None:
        """The row to ask about and why; None: all are answered. `without`: rows that are not to be chosen."""
        free = ~self.taken
        free[list(without)] = False
        if not free.any():
            return None
        rng = np.random.default_rng([self.seed, int(self.taken.sum()), len(without)])
        if random:
            return int(rng.choice(np.flatnonzero(free))), "random"
        fresh = free & (self.near > DUPLICATE * self.space.usual) & ~self._seen[self.groups]
        free = fresh if fresh.any() else free
        if self.gain is not None and self.taken.sum() >= FIRST:
            value = self.gain * np.minimum(1, self.near / (ALIKE * self.space.usual))
            return int(np.where(free, value, -1).argmax()), "uncertain"
        weight = np.where(free, self.space.density, 0).astype(np.float64)
        if self.taken.any():
            weight *= np.minimum(self.near, np.quantile(self.near[free], 0.95)).astype(np.float64) + 1e-9
        return int(rng.choice(len(weight), p=weight / weight.sum())), "spread"


def expected_gain(probabilities: Points, labels: NDArray[np.uint8]) -> Points:
    """[N]: the uncertainty of each class, 1 at a half, weighted by how few examples of its rarer side are known."""
    uncertain = 4 * probabilities * (1 - probabilities)
    rarer = np.minimum((labels == 1).sum(0), ((labels != UNKNOWN) & (labels == 0)).sum(0))
    weights = 1 / np.sqrt(1 + rarer)
    return np.asarray(uncertain @ (weights / weights.sum()), np.float32)
