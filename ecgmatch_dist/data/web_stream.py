"""Unlabelled batches through webdataset's own pipeline: tar after tar, split over ranks and workers, through a shuffle buffer.

`data.reader = "webdataset"`. It reads any webdataset tars, also from a URL without a cache. It is not exact across world sizes:
each rank reads its own tars of an epoch, so with other ranks the batches are others. With the same ranks and workers, the state
is one number all the same: which recording comes when follows from the number of recordings in each tar. A stream that begins
at batch g opens only the tars that still hold something to see.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import webdataset

from ecgmatch_dist.data.order import Permutation
from ecgmatch_dist.data.store import V
from ecgmatch_dist.data.stream import Batch, Buffer, FiniteBatch, prefetch
from ecgmatch_dist.data.web_shards import Sample, array, read_tar
from ecgmatch_dist.errors import UserError


@dataclass(frozen=True)
class WebShard:
    """A tar, and the ids of those of its recordings that belong to the unlabelled part."""

    url: str
    ids: dict[str, int]
    """Key -> id, in the order of the tar."""


class WebStream:
    """The endless sequence of the unlabelled recordings in tars; the counterpart of `Stream`."""

    def __init__(
        self,
        shards: Sequence[WebShard],
        length: int,
        batch: int,
        seed: int,
        rank: int,
        world: int,
        workers: int = 1,
        buffer: int = 1000,
        memory: Buffer | None = None,
    ) -> None:
        """`length` of the signals; `batch`: global; `workers` pipelines per rank, each with its own `buffer`; `memory` for the
        signals of so many recordings, which the pipelines' threads fill."""
        if batch % world:
            raise UserError(
                f"a global batch of {batch} cannot be shared by {world} ranks: make it a multiple of {world}"
            )
        self.shards = [shard for shard in shards if shard.ids]
        if len(self.shards) < world * workers:
            raise UserError(
                f"{len(self.shards)} tars with unlabelled recordings for {world} ranks with {workers} workers: each needs one "
                "of its own; give fewer data.workers or ranks, or choose data.reader = own"
            )
        self.length, self.batch, self.seed, self.rank, self.world = length, batch, seed, rank, world
        self.workers, self.buffer, self.share, self.memory = workers, buffer, batch // world, memory

    def __getitem__(self, g: int) -> Batch:
        """Batch g alone. Slow: for error messages."""
        return next(self.iterate(g, g + 1, readers=0))

    def iterate(self, start: int, stop: int | None, readers: int = 1, ahead: int = 4) -> Iterator[Batch]:
        """This rank's slices of batches start, start + 1, ... before `stop`. Batch g comes from worker g modulo workers; each
        worker is a thread that reads ahead (`readers` 0: none)."""
        numbers = itertools.count(start) if stop is None else range(start, stop)
        pipelines = [self._batches(worker, len(range(worker, start, self.workers))) for worker in range(self.workers)]
        threads = [
            prefetch(following(batches), itertools.count(), min(readers, 1), max(1, ahead // self.workers))
            for batches in pipelines
        ]
        try:
            for g in numbers:
                yield next(threads[g % self.workers])
        finally:
            for thread in threads:
                thread.close()

    def once(self, batch: int, limit: int | None = None) -> Iterator[FiniteBatch]:
        """One pass over all recordings, or over those with ids below `limit`: each rank reads its own tars. The rank with the
        most recordings decides how many batches all have; the others add padding, so that none waits for another."""
        share = -(-batch // self.world)
        wanted = [
            WebShard(shard.url, {key: i for key, i in shard.ids.items() if limit is None or i < limit})
            for shard in self.shards
        ]
        tars = [[shard for shard in wanted[rank :: self.world] if shard.ids] for rank in range(self.world)]
        most = max(sum(len(shard.ids) for shard in of_rank) for of_rank in tars)
        samples = (sample for shard in tars[self.rank] for sample in read_shard(shard))
        for _ in range(-(-most // share)):
            ids, x = np.full(share, -1, np.int64), np.zeros((share, V, self.length), np.float16)
            for place, (number, sample) in enumerate(itertools.islice(samples, share)):
                ids[place], x[place] = number, array(sample, self.length)
            yield FiniteBatch(ids, x, ids >= 0)

    def _batches(self, worker: int, first: int) -> Iterator[Batch]:
        """The batches of one worker from its number `first` on."""
        samples = self._samples(worker, first * self.share)
        while True:
            taken = list(itertools.islice(samples, self.share))
            ids = np.array([number for number, _ in taken], np.int64)
            x = self.memory(len(taken)) if self.memory else None
            yield Batch(ids, np.stack([array(sample, self.length) for _, sample in taken], out=x))

    def _samples(self, worker: int, skip: int) -> Iterator[tuple[int, Sample]]:
        """The endless sequence of one worker without its first `skip` recordings: epoch after epoch, its share of the tars in a
        new order each time."""
        for epoch in itertools.count():
            order = Permutation(len(self.shards), self.seed, epoch)(np.arange(len(self.shards)))
            # First split by rank, then by worker, as webdataset's split_by_node and split_by_worker do.
            mine = [self.shards[i] for i in order[self.rank :: self.world][worker :: self.workers]]
            count = sum(len(shard.ids) for shard in mine)
            if skip < count:
                yield from self._mixed(mine, f"{self.seed}/{epoch}/{self.rank}/{worker}", skip)
            skip = max(0, skip - count)

    def _mixed(self, shards: list[WebShard], seed: str, skip: int) -> Iterator[tuple[int, Sample]]:
        """The recordings of some tars through the shuffle buffer, without the first `skip` that come out of it.

        The buffer's choices depend on how many recordings it was given, not on what they hold. So tars of which everything has
        been seen are not opened: placeholders take their place.
        """
        mix = webdataset.shuffle(self.buffer, seed=seed)
        sizes = [len(shard.ids) for shard in shards]
        needed = set(range(len(shards)))
        if skip:
            of_shard = np.repeat(np.arange(len(shards)), sizes)
            needed = set(of_shard[list(mix(iter(range(sum(sizes)))))[skip:]].tolist())
        nothing: tuple[int, Sample] = (-1, {})
        source = (
            sample
            for number, shard in enumerate(shards)
            for sample in (read_shard(shard) if number in needed else itertools.repeat(nothing, sizes[number]))
        )
        return itertools.islice(mix(source), skip, None)


def read_shard(shard: WebShard) -> Iterator[tuple[int, Sample]]:
    """The recordings of a tar that belong to the unlabelled part, with their ids."""
    found = 0
    for sample in read_tar(shard.url):
        if (number := shard.ids.get(sample["__key__"])) is not None:
            found += 1
            yield number, sample
    if found != len(shard.ids):
        raise UserError(
            f"{shard.url}: {found} of the {len(shard.ids)} recordings that were listed: it was changed; begin another run"
        )


def following(batches: Iterator[Batch]) -> Callable[[int], Batch]:
    """The next batch, whatever its number: for `prefetch`, which calls from one thread."""
    return lambda _: next(batches)
