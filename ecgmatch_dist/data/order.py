"""The order of an epoch: a keyed permutation of 0..n-1 that can be computed at any position and is never stored.

It is a Feistel network over Z_a x Z_b with a*b slightly above n. A value outside 0..n-1 goes through the network again
until it is inside (cycle walking), which keeps the map a bijection for any n (Black and Rogaway, "Ciphers with arbitrary finite
domains", 2002).
"""

import hashlib
import math

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
ROUNDS = 8  # theory needs four for random round functions; eight leave no visible pattern at small n


class Permutation:
    """The bijection of 0..n-1 of (seed, epoch, part): O(1) memory, the same cost at any position."""

    def __init__(self, n: int, seed: int, epoch: int, part: int = 0) -> None:
        assert n >= 1, n
        self.n = n
        self.a = math.isqrt(n - 1) + 1
        self.b = -(-n // self.a)
        digest = hashlib.shake_256(f"ecgmatch/{n}/{seed}/{epoch}/{part}".encode()).digest(8 * ROUNDS)
        self.keys = np.frombuffer(digest, "<u8")

    def __call__(self, positions: Ints) -> Ints:
        """Positions [k] of the epoch -> rows [k]."""
        positions = np.asarray(positions, np.int64)
        assert positions.size == 0 or (positions.min() >= 0 and positions.max() < self.n), "position outside the epoch"
        values = self._rounds(positions.astype(np.uint64).reshape(-1))
        while (outside := np.flatnonzero(values >= self.n)).size:
            values[outside] = self._rounds(values[outside])
        return values.astype(np.int64).reshape(positions.shape)

    def _rounds(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """One pass through the network: [k] in 0..a*b-1 -> [k] in 0..a*b-1, a bijection."""
        a, b = np.uint64(self.a), np.uint64(self.b)
        left, right = values // b, values % b
        for i in range(0, ROUNDS, 2):
            left = (left + mix(right ^ self.keys[i]) % a) % a
            right = (right + mix(left ^ self.keys[i + 1]) % b) % b
        return np.asarray(left * b + right, np.uint64)


def mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64: every bit of x [k] changes every bit of the result with probability near 1/2."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class WindowPermutation:
    """An epoch in windows of `window` shards: the shards in a keyed order, and all rows of a window shuffled together.

    For remote shards, which are fetched whole: only the shards of one window are needed at a time.
    """

    def __init__(self, sizes: Ints, window: int, seed: int, epoch: int) -> None:
        """`sizes` [s]: rows in each shard; rows are numbered shard by shard."""
        assert window >= 1, window
        self.seed, self.epoch = seed, epoch
        self.shards = Permutation(len(sizes), seed, epoch)(np.arange(len(sizes)))  # shards in this epoch's order
        self.first = (np.cumsum(sizes) - sizes)[self.shards]  # first row of each of them
        self.ends = np.cumsum(sizes[self.shards])
        last = np.minimum(np.arange(window, len(sizes) + window, window), len(sizes)) - 1
        self.window_ends = self.ends[last]
        self.window = window

    def __call__(self, positions: Ints) -> Ints:
        """Positions [k] of the epoch -> rows [k]."""
        rows = np.empty(len(positions), np.int64)
        windows = np.searchsorted(self.window_ends, positions, side="right")
        for w in np.unique(windows):
            start = self.window_ends[w - 1] if w else 0
            here = windows == w
            inside = Permutation(int(self.window_ends[w] - start), self.seed, self.epoch, part=int(w) + 1)
            place = start + inside(positions[here] - start)
            shard = np.searchsorted(self.ends, place, side="right")
            rows[here] = self.first[shard] + place - (self.ends[shard - 1] * (shard > 0))
        return rows

    def window_of(self, position: int) -> int:
        return int(np.searchsorted(self.window_ends, position, side="right"))

    def shards_of(self, window: int) -> Ints:
        """Shards of a window, in the order of the epoch; empty beyond the last window."""
        return self.shards[window * self.window : (window + 1) * self.window]
