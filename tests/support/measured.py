"""Recordings whose measurements tell one class from another, and a store of them."""

import numpy as np
from numpy.typing import NDArray

from ecgmatch_dist.data.preprocess import Preprocess


def recordings(n: int, seed: int) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
    """Noise; of the first class, with a slow wave. The second class is a coin."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 2, (n, 2)).astype(np.uint8)
    wave = np.sin(2 * np.pi * 2 * np.arange(300) / 100)
    return (rng.standard_normal((n, 12, 300)) + 2 * y[:, :1, None] * wave).astype(np.float32), y


class Shards:
    """What `fit_trees` needs of a store."""

    preprocess = Preprocess(rate=100, length=300)

    def __init__(self, x: NDArray[np.float32]) -> None:
        self.x = x

    def read(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        return self.x[rows]
