"""Which recordings are alike: a space of few dimensions in which unlike ones are far apart, and how crowded it is where.

Legend: N recordings, F features as they were measured, D dimensions of the space.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

Floats = NDArray[np.floating[Any]]
Points = NDArray[np.float32]

DIMENSIONS = 30
REFERENCES = 4000
"""Recordings at random that all are compared with: enough to know how crowded a place is, and quick for a million."""
NEIGHBOURS = 10
FAR = 3.0
"""Standard deviations; nothing is farther out along one feature."""


class Space:
    """`points` [N, D]; `density` [N], 1 where it is as crowded as at most places; `usual`: how far a recording usually is from
    those most like it."""

    def __init__(self, features: Floats, seed: int = 0) -> None:
        """`features` [N, F], in any unit: only their order counts."""
        self.points = main_directions(normal_ranks(features))
        rng = np.random.default_rng(seed)
        chosen = np.sort(rng.permutation(len(features))[:REFERENCES])
        nearest = self._nearest(chosen, min(NEIGHBOURS, max(len(chosen) - 1, 1)))
        away = nearest.mean(1)
        self.usual = float(np.median(away)) or 1.0
        crowded = 1 / np.maximum(away, 1e-3 * self.usual)
        self.density: Points = (crowded / np.median(crowded)).astype(np.float32)

    def distances(self, row: int) -> Points:
        """[N], from one recording to all."""
        found: Points = np.sqrt(((self.points - self.points[row]) ** 2).sum(1))
        return found

    def nearest(self, row: int, among: NDArray[np.int64], count: int) -> list[tuple[int, float]]:
        """The recordings among some that are most like one, with their distance in units of the usual one."""
        away = np.sqrt(((self.points[among] - self.points[row]) ** 2).sum(1)) / self.usual
        return [(int(among[i]), float(away[i])) for i in np.argsort(away, kind="stable")[:count]]

    def _nearest(self, chosen: NDArray[np.int64], k: int) -> Points:
        """Distances from each recording to its k nearest ones of the chosen [N, k], without itself."""
        references = self.points[chosen]
        sizes = (references**2).sum(1)
        out = np.ones((len(self.points), k), np.float32)
        for start in range(0, len(self.points), 1024):
            some = self.points[start : start + 1024]
            squares = (some**2).sum(1)[:, None] + sizes - 2 * some @ references.T
            own = chosen[None, :] == np.arange(start, start + len(some))[:, None]
            squares[own] = np.inf
            found = np.sort(np.partition(squares, k - 1, 1)[:, :k], 1)
            out[start : start + 1024] = np.sqrt(np.where(np.isfinite(found), np.maximum(found, 0), 1))
        return out


def normal_ranks(features: Floats) -> Points:
    """Each column by its order alone, as if it were normally distributed: no outlier, no unit decides. Constant columns: 0."""
    out = np.zeros(features.shape, np.float32)
    for c, column in enumerate(features.T):
        _, place, counts = np.unique(column, return_inverse=True, return_counts=True)
        if len(counts) > 1:
            middle = (np.cumsum(counts) - counts / 2) / len(column)  # equal values share a rank
            out[:, c] = np.clip(ndtri(middle), -FAR, FAR)[place]
    return out


def main_directions(x: Points) -> Points:
    """[N, F] -> [N, D], the directions in which recordings differ most."""
    centred = x - x.mean(0)
    _, directions = np.linalg.eigh(centred.T @ centred)
    found: Points = centred @ directions[:, ::-1][:, :DIMENSIONS]
    return np.ascontiguousarray(found)
