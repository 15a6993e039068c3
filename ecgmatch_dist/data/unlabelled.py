"""The unlabelled stream of a run, as `data.reader` asks for it."""

import numpy as np

from ecgmatch_dist.config import Data
from ecgmatch_dist.data.archive import Archive
from ecgmatch_dist.data.order import Ints
from ecgmatch_dist.data.store import ShardStore
from ecgmatch_dist.data.stream import Buffer, Stream
from ecgmatch_dist.data.web_stream import WebShard, WebStream


def open_stream(
    data: Data,
    store: ShardStore,
    rows: Ints,
    archive: Archive,
    batch: int,
    seed: int,
    rank: int,
    world: int,
    buffer: Buffer | None = None,
) -> Stream | WebStream:
    """The rows [N] of the store, and the recordings of the archive, in global batches of `batch`. `buffer`: memory that the
    readers' threads fill."""
    if data.reader == "own":
        return Stream(store, rows, batch, seed, rank, world, data.window or None, buffer)
    tars = shards_of_part(store, rows) + archive.shards(len(rows))
    return WebStream(tars, store.length, batch, seed, rank, world, data.workers, data.buffer, buffer)


def shards_of_part(store: ShardStore, rows: Ints) -> list[WebShard]:
    """The tars of a store, with the ids of those recordings that are in the part `rows` [N]."""
    ids: list[dict[str, int]] = [{} for _ in store.shards]
    places = np.argsort(rows, kind="stable")  # rows of a store are in the order of its tars
    names = store.ids(rows[places])
    for name, place, shard in zip(names, places.tolist(), store.shards_of_rows(rows[places]).tolist(), strict=True):
        ids[shard][name.partition("/")[2]] = place
    return [WebShard(store.source.where(shard), found) for shard, found in zip(store.shards, ids, strict=True)]
