"""Batches from shards: an endless stream in a keyed order, and finite passes for validation and test.

Position p of the stream is row Permutation(N, seed, p // N)(p % N) of the part; global batch g is positions
[g*G, (g+1)*G), and rank r takes its r-th slice. So the state of a stream is one number, and the batches do not depend on
the number of ranks or readers.
"""

import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from ecgmatch_dist.data.order import Ints, Permutation, WindowPermutation
from ecgmatch_dist.data.remote import RemoteFolder
from ecgmatch_dist.data.store import ShardStore, V
from ecgmatch_dist.errors import UserError

Signals = NDArray[np.float16]
T = TypeVar("T")


class Batch(NamedTuple):
    """This rank's slice of a global batch."""

    ids: Ints
    """[b] positions in the part's list of rows: the bank's rows."""
    x: Signals
    """[b, 12, T]"""


class FiniteBatch(NamedTuple):
    """This rank's slice of a batch of a finite pass, padded to full size."""

    ids: Ints
    """[b] positions in the part's list of rows, -1 where padding."""
    x: Signals
    """[b, 12, T], zeros where padding."""
    valid: NDArray[np.bool_]
    """[b] False where padding."""


class Reader(Protocol):
    """Reads recordings by row: a ShardStore, or a part that was loaded into memory."""

    def read(self, rows: Ints, out: Signals | None = None, pool: Executor | None = None) -> Signals: ...


Buffer = Callable[[int], Signals]
"""Memory for the signals of so many recordings."""


class LoadedPart:
    """A part of the split in memory, with the `read` of a store. For the labelled part, which is small."""

    def __init__(self, store: ShardStore, rows: Ints) -> None:
        self.x = store.read(rows)

    def read(self, rows: Ints, out: Signals | None = None, pool: Executor | None = None) -> Signals:
        return np.take(self.x, rows, axis=0, out=out, mode="clip")  # "raise" would copy through a buffer


class Stream:
    """The endless sequence of a part's recordings; `stream[g]` is this rank's slice of global batch g.

    Also a map-style dataset: `DataLoader(stream, batch_size=None, sampler=range(start, stop))`.
    """

    def __init__(
        self,
        store: Reader,
        rows: Ints,
        batch: int,
        seed: int,
        rank: int,
        world: int,
        window: int | None = None,
        buffer: Buffer | None = None,
    ) -> None:
        """`rows` [N]: the part in the order of the split; `batch`: global; `window`: shards mixed at a time; `buffer`: memory
        for so many recordings."""
        if len(rows) == 0:
            raise UserError("the part of the split has no recordings; make the split again")
        if batch % world:
            raise UserError(
                f"a global batch of {batch} cannot be shared by {world} ranks: make it a multiple of {world}"
            )
        assert 0 <= rank < world, (rank, world)
        self.store, self.rows, self.seed, self.window = store, np.asarray(rows, np.int64), seed, window
        self.buffer = buffer
        self.batch, self.share = batch, slice(rank * batch // world, (rank + 1) * batch // world)
        if window is not None:
            if not isinstance(store, ShardStore) or window < 1:
                raise UserError(
                    f"window = {window}: give a number of shards, at least 1, and only for a store of shards"
                )
            shards = store.shards_of_rows(self.rows)
            self.by_shard = np.argsort(shards, kind="stable")
            self.shards, self.sizes = np.unique(shards, return_counts=True)
        check_cache(store, self.rows, window)

    def _window_order(self, epoch: int) -> WindowPermutation:
        assert self.window is not None
        return WindowPermutation(self.sizes, self.window, self.seed, epoch)

    def _order(self, epoch: int, places: Ints) -> Ints:
        """Places [k] in an epoch -> positions [k] in the part's list of rows."""
        if self.window is None:
            return Permutation(len(self.rows), self.seed, epoch)(places)
        return self.by_shard[self._window_order(epoch)(places)]

    def ids(self, g: int) -> Ints:
        """The ids of this rank's slice of global batch g, [b], without reading the signals."""
        positions = np.arange(g * self.batch, (g + 1) * self.batch, dtype=np.int64)[self.share]
        epochs, places = np.divmod(positions, len(self.rows))
        ids = np.empty_like(positions)
        for epoch in np.unique(epochs):  # a batch may span several epochs
            here = epochs == epoch
            ids[here] = self._order(int(epoch), places[here])
        return ids

    def __getitem__(self, g: int) -> Batch:
        return self._read(g)

    def _read(self, g: int, pool: Executor | None = None) -> Batch:
        ids = self.ids(g)
        return Batch(ids, self.store.read(self.rows[ids], self.buffer(len(ids)) if self.buffer else None, pool))

    def iterate(self, start: int, stop: int | None, readers: int = 2, ahead: int = 4) -> Iterator[Batch]:
        """Batches start, start + 1, ... before `stop` (None: endless), in order; threads read up to `ahead` in advance. If they
        are more than two, they share the reading of each."""
        numbers: Iterable[int] = itertools.count(start) if stop is None else range(start, stop)
        if self.window is not None and readers:
            numbers = self._fetch_windows(numbers)
        # Threads of `prefetch` wait for a batch; those that read its pieces are others, or all could wait for each other.
        with ThreadPoolExecutor(max(1, readers), thread_name_prefix="piece") as pool:
            share = pool if readers > 2 else None  # two are for local files, where the batches ahead keep both busy
            yield from prefetch(partial(self._read, pool=share), numbers, readers, ahead)

    def _fetch_windows(self, numbers: Iterable[int]) -> Iterator[int]:
        """Yield the numbers; when they enter a window of shards, start to fetch the shards of the next window."""
        assert isinstance(self.store, ShardStore)
        entered = None
        pool = ThreadPoolExecutor(1, thread_name_prefix="fetch")
        try:
            for g in numbers:
                epoch, place = divmod((g + 1) * self.batch - 1, len(self.rows))
                window = self._window_order(epoch).window_of(place)
                if (epoch, window) != entered:
                    entered = epoch, window
                    following = self._window_order(epoch).shards_of(window + 1)
                    if not len(following):
                        following = self._window_order(epoch + 1).shards_of(0)
                    for shard in self.shards[following].tolist():
                        pool.submit(self.store.fetch, shard)  # an error is raised again when the shard is read
                yield g
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def check_cache(store: Reader, rows: Ints, window: int | None) -> None:
    """Refuse a cache that is too small for the shards in use: they would be fetched again and again in every epoch."""
    if not isinstance(store, ShardStore) or not isinstance(store.source, RemoteFolder):
        return
    sizes = sorted((store.shards[i].bytes for i in np.unique(store.shards_of_rows(rows))), reverse=True)
    # Between two windows both are in use, and the next one is being fetched.
    need = sum(sizes if window is None else sizes[: 3 * window])
    if need > store.source.cache_bytes:
        raise UserError(
            f"{store.source.url}: the stream uses {need:,} bytes of shards at a time, but the cache holds "
            f"{store.source.cache_bytes:,}: give a larger cache or a smaller window"
        )


def prefetch(read: Callable[[int], T], numbers: Iterable[int], readers: int, ahead: int) -> Generator[T, None, None]:
    """read(n) for each n, in order; `readers` threads keep at most `ahead` results waiting."""
    assert readers >= 0, readers
    assert ahead >= 1, ahead
    if readers == 0:
        yield from map(read, numbers)
        return
    source = iter(numbers)
    with ThreadPoolExecutor(readers, thread_name_prefix="reader") as pool:
        waiting: deque[Future[T]] = deque(pool.submit(read, n) for n in itertools.islice(source, ahead))
        try:
            while waiting:
                result = waiting.popleft().result()
                waiting.extend(pool.submit(read, n) for n in itertools.islice(source, 1))
                yield result
        finally:
            for future in waiting:
                future.cancel()


def finite(
    store: ShardStore, rows: Ints, batch: int, rank: int, world: int, readers: int = 2, ahead: int = 2
) -> Iterator[FiniteBatch]:
    """One pass over `rows` [N] in their order, in global batches of `batch` (rounded up to a multiple of `world`).

    All ranks get the same number of batches of the same size, as collectives need; the end is filled with padding.
    """
    share = -(-batch // world)
    rows = np.asarray(rows, np.int64)

    def read(g: int) -> FiniteBatch:
        positions = np.arange(share, dtype=np.int64) + (g * world + rank) * share
        valid = positions < len(rows)
        x = np.zeros((share, V, store.length), np.float16)
        store.read(rows[positions[valid]], out=x[: valid.sum()])
        return FiniteBatch(np.where(valid, positions, -1), x, valid)

    return prefetch(read, range(-(-len(rows) // (share * world))), readers, ahead)
