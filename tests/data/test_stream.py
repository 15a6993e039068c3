"""The stream: the same sequence for any number of ranks and readers, each row once an epoch, resumed anywhere."""

import itertools
import pickle
import threading
import time
import tracemalloc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from ecgmatch_dist.data.store import ShardStore, _File
from ecgmatch_dist.data.stream import Batch, Stream, finite, prefetch
from ecgmatch_dist.errors import UserError
from tests.support.shard_factory import make_shards
from tests.support.web_server import Server

WORLDS = (1, 2, 3, 8)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root: Path = tmp_path_factory.mktemp("shards")
    for database, n in (("chapman", 60), ("g12ec", 41)):
        make_shards(root, database, n, length=32, seed=n)
    return root


@pytest.fixture(scope="module")
def store(place: Path) -> ShardStore:
    return ShardStore(place, ["chapman", "g12ec"])


def part(n: int, seed: int = 0) -> np.ndarray:
    """Rows of a part: any n of the 101, in any order."""
    return np.random.default_rng(seed).permutation(101)[:n]


class Rows:
    """A reader that gives the row's number as its signal."""

    def read(self, rows: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        return np.broadcast_to(rows[:, None, None], (len(rows), 12, 1)).astype(np.float16)


@dataclass(frozen=True)
class Case:
    n: int
    share: int
    seed: int
    start: int
    count: int
    readers: int
    ahead: int
    window: int | None


cases = given(
    case=st.builds(
        Case,
        n=st.integers(1, 101),
        share=st.integers(1, 3),
        seed=st.integers(0, 10**6),
        start=st.integers(0, 40),
        count=st.integers(1, 5),
        readers=st.integers(0, 4),
        ahead=st.integers(1, 5),
        window=st.sampled_from([None, 1, 2, 5, 100]),
    )
)
quick = settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])


@cases
@quick
def test_ranks_and_readers_change_nothing(store: ShardStore, case: Case) -> None:
    rows, batch = part(case.n), 24 * case.share  # 24: shared by 1, 2, 3 and 8 ranks
    alone = Stream(store, rows, batch, case.seed, 0, 1, case.window)
    stop = case.start + case.count
    expected = [alone[g] for g in range(case.start, stop)]
    for world in WORLDS:
        ranks = [Stream(store, rows, batch, case.seed, rank, world, case.window) for rank in range(world)]
        slices = [list(s.iterate(case.start, stop, case.readers, case.ahead)) for s in ranks]
        for g, whole in enumerate(expected):
            assert all(len(part[g].ids) == batch // world for part in slices)
            assert np.array_equal(np.concatenate([part[g].ids for part in slices]), whole.ids)
            assert np.array_equal(np.concatenate([part[g].x for part in slices]), whole.x)


@cases
@quick
def test_each_row_once_per_epoch(store: ShardStore, case: Case) -> None:
    n, batch = case.n, 24 * case.share
    stream = Stream(store, part(n), batch, case.seed, 0, 1, case.window)
    epochs = case.start % 3 + case.count
    ids = np.concatenate([stream.ids(g) for g in range(-(-epochs * n // batch))])
    for epoch in range(epochs):
        assert np.array_equal(np.sort(ids[epoch * n : (epoch + 1) * n]), np.arange(n))


@cases
@quick
def test_resuming_equals_never_having_stopped(store: ShardStore, case: Case) -> None:
    def sequence(first: int, last: int, readers: int) -> list[Batch]:
        stream = Stream(store, part(case.n), 8 * case.share, case.seed, 1, 2, case.window)
        return list(stream.iterate(first, last, readers, case.ahead))

    stop = case.start + case.count
    whole = sequence(0, stop, 0)
    resumed = sequence(0, case.start, 1) + sequence(case.start, stop, case.readers)
    assert len(whole) == len(resumed) == stop
    for one, other in zip(whole, resumed, strict=True):
        assert np.array_equal(one.ids, other.ids)
        assert np.array_equal(one.x, other.x)


def test_ids_are_places_in_the_part_and_x_are_their_signals(store: ShardStore) -> None:
    rows = part(50, seed=3)
    batch = Stream(store, rows, 30, 5, 0, 1)[4]
    assert batch.ids.dtype == np.int64
    assert batch.ids.max() < 50
    assert np.array_equal(batch.x, store.read(rows[batch.ids]))


def test_epochs_and_seeds_differ() -> None:
    one = Stream(Rows(), np.arange(1000), 1000, 1, 0, 1)
    other = Stream(Rows(), np.arange(1000), 1000, 2, 0, 1)
    for a, b in itertools.combinations([one.ids(0), one.ids(1), other.ids(0)], 2):
        assert (a == b).sum() < 12


def test_windows_keep_to_few_shards(store: ShardStore) -> None:
    rows = part(101)
    stream = Stream(store, rows, 7, 3, 0, 1, window=2)
    assert max(len(np.unique(store.shards_of_rows(rows[stream.ids(g)]))) for g in range(14)) <= 4
    free = Stream(store, rows, 7, 3, 0, 1)
    assert max(len(np.unique(store.shards_of_rows(rows[free.ids(g)]))) for g in range(14)) > 4


def test_mistakes_are_refused(store: ShardStore) -> None:
    with pytest.raises(UserError, match="multiple of 3"):
        Stream(store, part(10), 64, 0, 0, 3)
    with pytest.raises(UserError, match="no recordings"):
        Stream(store, part(0), 64, 0, 0, 1)
    with pytest.raises(UserError, match="window = 0"):
        Stream(store, part(10), 64, 0, 0, 1, window=0)
    with pytest.raises(UserError, match="window = 3"):
        Stream(Rows(), part(10), 64, 0, 0, 1, window=3)


class Numbers(torch.utils.data.Sampler[int]):
    """Batches 3, 4, 5, 6."""

    def __iter__(self) -> Any:
        return iter(range(3, 7))


def test_dataloader_workers_of_a_fork_server(store: ShardStore) -> None:
    stream = Stream(store, part(90), 12, 9, 1, 3, window=2)
    stream[0]  # files that the parent has opened stay with the parent
    loader = DataLoader(stream, batch_size=None, sampler=Numbers(), num_workers=2, multiprocessing_context="forkserver")
    batches = list(loader)
    assert len(batches) == 4
    for g, batch in enumerate(batches, 3):
        assert np.array_equal(batch.ids.numpy(), stream[g].ids)
        assert np.array_equal(batch.x.numpy(), stream[g].x)


def test_a_stream_can_be_pickled(store: ShardStore) -> None:
    stream = Stream(store, part(90), 12, 9, 1, 3)
    assert np.array_equal(pickle.loads(pickle.dumps(stream))[7].x, stream[7].x)


def test_readers_stay_within_what_they_may_hold() -> None:
    taken, made, most = 0, 0, 0
    lock = threading.Lock()

    def read(n: int) -> int:
        nonlocal made, most
        with lock:
            made += 1
            most = max(most, made - taken)
        return n

    for n in prefetch(read, range(50), readers=3, ahead=4):
        with lock:
            taken += 1
        assert n == taken - 1
    assert most <= 5


def test_memory_is_bounded_by_the_batches_ahead(tmp_path: Path) -> None:
    make_shards(tmp_path, "chapman", 200, length=2048)
    store = ShardStore(tmp_path, ["chapman"])
    batch_bytes = 20 * 12 * 2048 * 2
    stream = Stream(store, np.arange(200), 20, 0, 0, 1)
    tracemalloc.start()
    for batch in stream.iterate(0, 40, readers=2, ahead=3):
        assert batch.x.nbytes == batch_bytes
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 5.5 * batch_bytes  # three ahead, one in hand, one being replaced; the whole part would be 10


@pytest.mark.parametrize("error", [UserError("shard 5"), SystemExit("the thread ends")], ids=["fails", "dies"])
def test_a_failing_reader_is_heard_and_a_stopped_one_ends(error: BaseException) -> None:
    def read(n: int) -> int:
        if n == 5:
            raise error
        return n

    with pytest.raises(type(error), match=str(error)):
        list(prefetch(read, range(10), readers=2, ahead=3))
    before = threading.active_count()
    endless = prefetch(lambda n: n, itertools.count(), readers=2, ahead=3)
    assert [next(endless) for _ in range(4)] == [0, 1, 2, 3]
    endless.close()
    assert threading.active_count() == before


def test_closing_does_not_wait_for_what_nobody_wants() -> None:
    made = []

    def read(n: int) -> None:
        made.append(n)
        time.sleep(0.005)

    slow = prefetch(read, range(100), readers=1, ahead=50)
    next(slow)
    slow.close()
    assert len(made) < 10


@pytest.mark.parametrize(("batch", "readers", "threads"), [(32, 4, 4), (56, 8, 7)])
def test_several_threads_read_one_batch(
    batch: int, readers: int, threads: int, store: ShardStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Storage on a network answers slowly, but many at once. 56 recordings are a rank's share of the paper's batch on eight
    GPUs: seven pieces of eight, so eight answers one after the other instead of 56."""
    expected = Stream(store, part(101), batch, 3, 0, 1)[0].x
    at_once, usual = threading.Barrier(threads, timeout=20), _File.read_into
    first = threading.local()

    def read_into(self: _File, place: Any, offset: int) -> None:
        if not hasattr(first, "seen"):
            first.seen = True
            at_once.wait()  # raises, unless so many threads come
        usual(self, place, offset)

    monkeypatch.setattr(_File, "read_into", read_into)
    batches = list(Stream(store, part(101), batch, 3, 0, 1).iterate(0, 1, readers=readers, ahead=1))
    assert np.array_equal(batches[0].x, expected)


def test_an_error_of_a_piece_is_heard(store: ShardStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_into(self: _File, place: Any, offset: int) -> None:
        raise UserError(f"{self.name}: gone")

    monkeypatch.setattr(_File, "read_into", read_into)
    before = threading.active_count()
    with pytest.raises(UserError, match="gone"):
        next(Stream(store, part(101), 32, 3, 0, 1).iterate(0, None, readers=4, ahead=2))
    assert threading.active_count() == before


@given(n=st.integers(0, 101), batch=st.integers(1, 40), readers=st.integers(0, 2))
@quick
def test_a_finite_pass_shows_everything_once(store: ShardStore, n: int, batch: int, readers: int) -> None:
    rows = part(n, seed=1)
    for world in WORLDS:
        ranks = [list(finite(store, rows, batch, rank, world, readers)) for rank in range(world)]
        assert len({len(batches) for batches in ranks}) == 1
        assert {b.x.shape for batches in ranks for b in batches} <= {(-(-batch // world), 12, 32)}
        ids = np.concatenate([np.zeros(0, int)] + [b.ids[b.valid] for step in zip(*ranks, strict=True) for b in step])
        assert np.array_equal(ids, np.arange(n))
        for b in itertools.chain.from_iterable(ranks):
            assert np.array_equal(b.x[b.valid], store.read(rows[b.ids[b.valid]]))
            assert (b.ids[~b.valid] == -1).all()
            assert not b.x[~b.valid].any()


def test_more_ranks_than_rows(store: ShardStore) -> None:
    batches = [list(finite(store, part(2), 8, rank, 8)) for rank in range(8)]
    assert [b[0].valid.tolist() for b in batches] == [[True], [True]] + [[False]] * 6


def test_remote_shards_in_windows_through_a_small_cache(place: Path, store: ShardStore, tmp_path: Path) -> None:
    with Server(place) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        size = max(shard.bytes for shard in store.shards)
        far = ShardStore(server.url, ["chapman", "g12ec"], cache=tmp_path, cache_bytes=6 * size)
        rows = part(101)
        with pytest.raises(UserError, match="larger cache or a smaller window"):
            Stream(far, rows, 4, 3, 0, 1)
        with pytest.raises(UserError, match="larger cache or a smaller window"):
            Stream(far, rows, 4, 3, 0, 1, window=3)
        near = Stream(store, rows, 4, 3, 0, 1, window=2)
        for g, batch in enumerate(Stream(far, rows, 4, 3, 0, 1, window=2).iterate(0, 25, readers=1, ahead=1)):
            assert np.array_equal(batch.ids, near.ids(g))
            assert np.array_equal(batch.x, near[g].x)
        fetched = [name for name in server.asked if name.endswith(".tar")]
        server.shutdown()
    assert len(set(fetched)) == len(store.shards)
    assert len(fetched) <= len(store.shards) + 2  # once each, and the first window of the next epoch


def test_the_next_window_is_fetched_when_one_is_entered(store: ShardStore, monkeypatch: Any) -> None:
    fetched: list[int] = []
    monkeypatch.setattr(store, "fetch", fetched.append)
    rows = np.arange(101)
    stream = Stream(store, rows, 1, 3, 0, 1, window=4)
    batches = stream.iterate(0, 101, readers=1, ahead=1)
    next(batches)
    first = set(store.shards_of_rows(rows[[int(stream.ids(g)[0]) for g in range(20)]]).tolist())
    assert len(first) == 4
    list(batches)
    assert not first & set(fetched[:4])
    assert sorted(fetched[:11]) == sorted(set(range(15)) - first)  # each other shard of this epoch, once
    assert len(fetched) == 15  # and the first window of the next epoch
