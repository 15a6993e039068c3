"""The bank on W ranks in shard groups of L against one simple process; traffic, blocks, background thread."""

import math
import threading
import time
from typing import Any, NamedTuple

import faiss
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import FakeTensorMode

from ecgmatch_dist.bank.memory import MemoryBank, Neighbours, resolve_shard_group, step_bytes
from ecgmatch_dist.bank.search import normalise, reference_search
from ecgmatch_dist.distributed.collectives import traffic
from ecgmatch_dist.distributed.session import use_device
from ecgmatch_dist.errors import UserError
from tests.support.ranks import run_processes, run_threads

D, C, K = 8, 3, 5
PLACEMENTS = [(w, n) for w in (1, 2, 4, 8) for n in range(1, w + 1) if w % n == 0]


class Data(NamedTuple):
    """Input of a short run: initial rows [N, ...], and global batches (ids, teacher's z and p, queries)."""

    z: Tensor
    p: Tensor
    batches: list[tuple[Tensor, Tensor, Tensor, Tensor]]


def make(rows: int, batch: int, steps: int = 3, tied: bool = False, seed: int = 0) -> Data:
    g = torch.Generator().manual_seed(seed)

    def features(n: int) -> Tensor:
        z = torch.randn(n, D, generator=g)
        return z[torch.randint(4, (n,), generator=g) % n] if tied else z

    batches = []
    for _ in range(steps):
        ids = torch.randint(rows, (batch,), generator=g)  # with repetitions
        z, p = features(batch), torch.rand(batch, C, generator=g)
        batches.append((ids, z, p, features(batch) + (0 if tied else 0.1 * z)))
    return Data(features(rows), torch.rand(rows, C, generator=g), batches)


def one_process(data: Data, k: int = K, memory: float = 0.0) -> list[Neighbours]:
    """The definition: write the rows one by one, then search all of them."""
    z, p, out = normalise(data.z), data.p.clone(), []
    for ids, z_new, p_new, queries in data.batches:
        before = p.clone()
        for i, row in enumerate(ids.tolist()):
            z[row], p[row] = normalise(z_new[i : i + 1])[0], torch.lerp(p_new[i], before[row], memory)
        scores, rows = reference_search(normalise(queries), z, k)
        out.append(Neighbours(rows, scores, p[rows]))
    return out


def build(data: Data, shard_group: int, **options: Any) -> MemoryBank:
    options = {"backend": "torch", "overlap": False, "k": K} | options
    return MemoryBank(len(data.z), D, C, batch=len(data.batches[0][0]), shard_group=shard_group, **options)


def fill(bank: MemoryBank, rank: int, world: int, data: Data) -> None:
    """Different numbers of rows per rank, none on the last ranks, and one padding row on each."""
    mine = torch.arange(rank, len(data.z), world) if rank < 3 or world < 4 else torch.arange(0)
    rest = (
        torch.cat([torch.arange(r, len(data.z), world) for r in range(3, world)])
        if world >= 4 and rank == 0
        else mine[:0]
    )
    mine = torch.cat([mine, rest])
    ids = torch.cat([mine, torch.tensor([-1])])
    bank.fill(ids, data.z[ids], data.p[ids])


def run(rank: int, world: int, data: Data, shard_group: int, options: dict[str, Any]) -> list[Neighbours]:
    bank = build(data, shard_group, **options)
    fill(bank, rank, world, data)
    b = len(data.batches[0][0]) // world
    share = slice(rank * b, (rank + 1) * b)
    return [bank.exchange(*(t[share] for t in batch), step=i).result() for i, batch in enumerate(data.batches)]


def assert_equal(ranks: list[list[Neighbours]], truth: list[Neighbours]) -> None:
    for step, expected in enumerate(truth):
        for field, tensor in zip(Neighbours._fields, expected, strict=True):
            got = torch.cat([getattr(out[step], field) for out in ranks])
            assert torch.equal(got, tensor), (step, field)


@pytest.mark.parametrize("rows", [37, 1001, 17])
@pytest.mark.parametrize(("world", "shard_group"), PLACEMENTS)
def test_every_placement_equals_one_process(world: int, shard_group: int, rows: int) -> None:
    data = make(rows, 16)
    assert_equal(run_threads(world, run, data, shard_group, {}), one_process(data))


@pytest.mark.parametrize("memory", [0.25, 1.0])
@pytest.mark.parametrize(("world", "shard_group"), [(1, 1), (4, 2), (4, 4)])
def test_the_bank_remembers_a_share_of_each_prediction(world: int, shard_group: int, memory: float) -> None:
    data = make(37, 16)
    got = run_threads(world, run, data, shard_group, {"memory": memory})
    assert_equal(got, one_process(data, memory=memory))
    assert all(torch.equal(data.p[out.rows], out.p) for out in one_process(data, memory=memory)) == (memory == 1)


@pytest.mark.parametrize(("world", "shard_group"), PLACEMENTS)
def test_ties_go_to_the_lower_row_across_blocks(world: int, shard_group: int) -> None:
    data = make(200, 16, tied=True)
    assert_equal(run_threads(world, run, data, shard_group, {}), one_process(data))


@pytest.mark.parametrize("shard_group", [1, 2, 4, 8])
def test_fewer_rows_than_ranks(shard_group: int) -> None:
    """Blocks of one row, and ranks without any."""
    data = make(5, 0)
    data.batches[:] = []
    queries = torch.randn(8, D, generator=torch.Generator().manual_seed(3))

    def body(rank: int, world: int) -> Neighbours:
        bank = MemoryBank(5, D, C, 3, batch=5, shard_group=shard_group, backend="torch", overlap=False)
        ids = torch.tensor([rank if rank < 5 else -1])
        bank.fill(ids, data.z[ids], data.p[ids])
        return bank.exchange(ids, data.z[ids], data.p[ids], queries[rank : rank + 1], 0).result()

    scores, rows = reference_search(normalise(queries), normalise(data.z), 3)
    assert_equal([[out] for out in run_threads(8, body)], [Neighbours(rows, scores, data.p[rows])])


@pytest.mark.parametrize("shard_group", [1, 8, 64])
def test_many_ranks(shard_group: int) -> None:
    data = make(300, 128, steps=1)
    assert_equal(run_threads(64, run, data, shard_group, {}), one_process(data))


@pytest.mark.parametrize("shard_group", [1, 2])
def test_faiss_searches_the_bank(shard_group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    knn = faiss.knn
    monkeypatch.setattr(faiss, "knn", lambda q, z, *a, **o: calls.append(len(z)) or knn(q, z, *a, **o))
    data = make(300, 16)

    def body(rank: int, world: int) -> list[Neighbours]:
        bank = build(data, shard_group, backend="faiss-cpu")
        assert bank.backend_name == "faiss-cpu"
        assert "faiss-cpu" in bank.describe()
        return run(rank, world, data, shard_group, {"backend": "faiss-cpu"})

    assert_equal(run_threads(2, body), one_process(data))
    assert calls == [300 // shard_group] * 2 * len(data.batches)


def test_auto_reports_its_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    data = make(500, 16)
    bank = build(data, 1, backend="auto")
    assert bank.backend_name in ("torch", "faiss-cpu")
    assert f"search by {bank.backend_name} (torch " in bank.describe()
    assert "faiss-cpu" in bank.describe()
    calls: list[int] = []
    knn = faiss.knn
    monkeypatch.setattr(faiss, "knn", lambda *a, **o: calls.append(1) or knn(*a, **o))
    bank.exchange(*data.batches[0], step=0).result()
    assert bool(calls) == (bank.backend_name == "faiss-cpu")


def test_faiss_is_the_default_and_products_are_not_coarse() -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        bank = MemoryBank(300, D, C, K, batch=16, overlap=False)
        assert torch.get_float32_matmul_precision() == "highest"
    finally:
        torch.set_float32_matmul_precision(before)
    assert bank.backend_name == "faiss-cpu"
    assert "search by faiss-cpu (faiss-cpu " in bank.describe()


def test_ivf_index_follows_the_bank() -> None:
    """All lists are probed here, so the approximate index must be exact."""
    data = make(600, 16)

    def body(rank: int, world: int) -> list[Neighbours]:
        bank = build(data, 2, backend="faiss-ivf")
        assert bank.backend_name == "faiss-ivf"
        return run(rank, world, data, 2, {"backend": "faiss-ivf"})

    assert_equal(run_threads(2, body), one_process(data))


@pytest.mark.parametrize(("world", "shard_group"), PLACEMENTS)
def test_traffic_is_as_documented_and_independent_of_the_rows(world: int, shard_group: int) -> None:
    def body(rank: int, world: int, rows: int) -> dict[str, int]:
        bank = MemoryBank(rows, D, C, K, batch=16, shard_group=shard_group, backend="torch", overlap=False)
        z = torch.eye(D).repeat(2, 1)[rank * (16 // world) : (rank + 1) * (16 // world)]
        ids = torch.arange(rank * len(z), (rank + 1) * len(z))
        bank.load({name: torch.randn_like(t) if t.is_floating_point() else t for name, t in bank.state().items()})
        traffic.reset()
        bank.exchange(ids, z, z[:, :C], z, 0).result()
        return traffic.received()

    small, large = (run_threads(world, body, rows) for rows in (1000, 20000))
    expected = {name: count for name, count in step_bytes(16, D, C, K, world, shard_group).items() if count}
    assert small == large == [expected] * world


def test_formulas() -> None:
    """By hand, for 8 ranks with 2 rows each in groups of 4: row 8 + 32 + 12 bytes, query 32, candidate 16 + 12."""
    assert step_bytes(16, D, C, K, 8, 4) == {
        "bank/rows": 1 * 2 * 52,
        "bank/exchange": 3 * (2 * 2 * 52 + 2 * 32),
        "bank/candidates": 3 * 2 * 5 * 28,
    }
    assert not any(step_bytes(16, D, C, K, 1, 1).values())
    replicated, sharded = step_bytes(16, D, C, K, 8, 1), step_bytes(16, D, C, K, 8, 8)
    assert (replicated["bank/exchange"], replicated["bank/candidates"], sharded["bank/rows"]) == (0, 0, 0)


@pytest.mark.parametrize("shard_group", [1, 8, 1024])
def test_traffic_of_1024_ranks(shard_group: int) -> None:
    """A fake process group runs one rank of a large cluster: it checks shapes and bytes, not values."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=9, world_size=1024, store=FakeStore())
    try:
        bank = MemoryBank(20000, D, C, K, batch=2048, shard_group=shard_group, backend="torch", overlap=False)
        bank.z.copy_(torch.randn(bank.z.shape, generator=torch.Generator().manual_seed(0)))
        traffic.reset()
        out = bank.exchange(torch.tensor([0, 1]), torch.ones(2, D), torch.ones(2, C), torch.ones(2, D), 0).result()
        assert out.p.shape == (2, K, C)
        expected = step_bytes(2048, D, C, K, 1024, shard_group)
        assert traffic.received() == {name: count for name, count in expected.items() if count}
    finally:
        dist.destroy_process_group()


def two_ways(rank: int, world: int) -> dict[bool, tuple[list[Neighbours], set[str], float]]:
    """With and without overlap, while the caller runs its own collectives during the exchange."""
    results = {}
    data = make(301, 16, steps=4)
    for overlap in (False, True):
        bank = build(data, 2, overlap=overlap)
        fill(bank, rank, world, data)
        search, names, out = bank.searcher.search, set(), []

        def spy(*args: Any, search: Any = search, names: set[str] = names) -> Any:
            names.add(threading.current_thread().name)
            return search(*args)

        bank.searcher.search = spy  # type: ignore[method-assign]
        for step, batch in enumerate(data.batches):
            pending = bank.exchange(*(t[rank * 8 : (rank + 1) * 8].clone() for t in batch), step=step)
            mine = torch.full((1000,), float(rank))
            dist.all_reduce(mine)
            assert (mine == 1).all()
            out.append(pending.result())
        assert set(bank.times()) == {"time/exchange", "time/search"}
        assert all(seconds > 0 for seconds in bank.times().values())
        results[overlap] = out, names, bank.age(4)
    return results


def test_overlap_does_not_change_the_result() -> None:
    truth = one_process(make(301, 16, steps=4))
    ranks = run_processes(2, two_ways)
    for overlap, thread in ((False, "MainThread"), (True, "bank")):
        assert_equal([result[overlap][0] for result in ranks], truth)
        assert all(result[overlap][1] == {thread} for result in ranks)
    assert len({result[overlap][2] for result in ranks for overlap in result}) == 1


def test_an_error_in_the_thread_surfaces_in_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    data = make(50, 16)
    bank = build(data, 1, overlap=True)

    def broken(*_: object) -> None:
        raise RuntimeError("lost connection")

    monkeypatch.setattr(bank.searcher, "search", broken)
    pending = bank.exchange(*data.batches[0], step=7)
    with pytest.raises(RuntimeError, match="lost connection") as caught:
        pending.result()
    assert "rank 0: exchange of the memory bank at step 7" in caught.value.__notes__
    monkeypatch.undo()
    bank.exchange(*data.batches[0], step=8).result()  # the thread still works


def test_the_thread_ends_with_the_bank() -> None:
    before = set(threading.enumerate())
    bank = build(make(50, 16), 1, overlap=True)
    bank.exchange(*make(50, 16).batches[0], step=0).result()
    (thread,) = set(threading.enumerate()) - before
    del bank
    thread.join(5)
    assert not thread.is_alive()


def test_inputs_may_change_after_the_call() -> None:
    data = make(50, 16, steps=1)
    bank = build(data, 1, overlap=True)
    bank.fill(torch.arange(50), data.z, data.p)
    batch = [t.clone() for t in data.batches[0]]
    pending = bank.exchange(*batch, step=0)  # type: ignore[arg-type,misc]
    for tensor in batch:
        tensor.zero_()
    assert_equal([[pending.result()]], one_process(data))


def test_no_gradient_is_kept_and_any_float_is_taken() -> None:
    data = make(50, 16, steps=1)
    ids, z, p, queries = data.batches[0]
    bank = build(data, 1)
    bank.fill(torch.arange(50), data.z, data.p)
    out = bank.exchange(
        ids, z.double().requires_grad_(), p.double().requires_grad_(), queries.requires_grad_(), 0
    ).result()
    assert not any(t.requires_grad for t in (*out, bank.z, bank.p))
    assert out.p.dtype == torch.float32
    assert_equal([[out]], one_process(data))


def test_blocks_are_contiguous_and_cover_the_rows() -> None:
    def body(rank: int, world: int, rows: int, shard_group: int) -> tuple[int, int, bool]:
        bank = MemoryBank(rows, D, C, 1, batch=1, shard_group=shard_group, backend="torch", overlap=False)
        return bank.start, bank.stop, bank.is_first_replica

    for rows in (1, 7, 8, 9, 100):
        blocks = run_threads(8, body, rows, 4)
        assert blocks[:4] == [(start, stop, True) for start, stop, _ in blocks[4:]]
        chunks = [len(part) for part in torch.arange(rows).chunk(4)]  # as DTensor shards
        assert [stop - start for start, stop, _ in blocks[:4]] == chunks + [0] * (4 - len(chunks))
        assert [start for start, _, _ in blocks[1:4]] == [stop for _, stop, _ in blocks[:3]]


def test_a_block_survives() -> None:
    """On the same ranks; other numbers of ranks: test_checkpoint.py."""
    data = make(37, 16)

    def body(rank: int, world: int) -> tuple[dict[str, Tensor], float, float]:
        bank, b = build(data, 4), 16 // world
        fill(bank, rank, world, data)
        for step, batch in enumerate(data.batches):
            bank.exchange(*(t[rank * b : (rank + 1) * b] for t in batch), step=step + 1).result()
        again = build(data, 4)
        again.load({name: t.clone() for name, t in bank.state().items()})
        assert all(torch.equal(t, again.state()[name]) for name, t in bank.state().items())
        return bank.state(), bank.age(10), again.age(10)

    blocks = run_threads(8, body)
    written = torch.cat([state["written"] for state, _, _ in blocks[:4]])
    last = {row: 1 + step for step, batch in enumerate(data.batches) for row in batch[0].tolist()}
    assert written.tolist() == [last.get(row, 0) for row in range(37)]
    assert {age for _, *ages in blocks for age in ages} == {(10 * 37 - int(written.sum())) / 37}


def test_late_steps_are_exact() -> None:
    """Beyond what fp32 can count."""
    data = make(50, 16)
    bank = build(data, 1)
    bank.fill(torch.arange(50), data.z, data.p, step=2**24 + 1)
    assert bank.age(2**24 + 2) == 1


def test_size_and_times() -> None:
    """52 bytes per row; the times are parts of the step, and nothing took any before."""
    data = make(20_164, 16, steps=1)
    bank = build(data, 1)
    told = "bank: 20164 rows, 1 x 1 blocks, 1.0 MiB per rank; search by torch (as set), in the step"
    assert bank.describe() == told
    assert bank.times() == {"time/exchange": 0, "time/search": 0}
    begin = time.perf_counter()
    pending = bank.exchange(*data.batches[0], step=0)
    pending.result()
    assert 0 < sum(bank.times().values()) < time.perf_counter() - begin
    assert pending.gathered is None  # its memory is free again


def test_a_saved_bank_of_another_shape_is_refused() -> None:
    bank = build(make(37, 16), 1)
    with pytest.raises(UserError, match=r"z has shape \[37, 9\]"):
        bank.load({"z": torch.zeros(37, 9), "p": torch.zeros(37, C), "written": torch.zeros(37)})


def test_impossible_settings_are_refused() -> None:
    def body(rank: int, world: int) -> None:
        with pytest.raises(UserError, match=r"^bank\.shard_group = 3: must divide the 4 ranks: one of \[1, 2, 4\]"):
            MemoryBank(50, D, C, K, batch=16, shard_group=3)
        with pytest.raises(UserError, match=r"bank\.shard_group = 8"):
            MemoryBank(50, D, C, K, batch=16, shard_group=8)

    run_threads(4, body)
    with pytest.raises(UserError, match=r"method\.neighbours = 5: at most the 4 "):
        MemoryBank(4, D, C, K, batch=4)
    with pytest.raises(UserError, match=r"optim\.unlabelled_batch = 51: at most the 50 "):
        MemoryBank(50, D, C, K, batch=51)
    with pytest.raises(UserError, match=r"bank\.backend = 'faiss-gpu'"):
        MemoryBank(50, D, C, K, batch=16, backend="faiss-gpu")


def test_shard_group_settings() -> None:
    assert resolve_shard_group("auto", 8, 8) == 8  # one node: all ranks
    assert resolve_shard_group("auto", 1024, 8) == 8  # several nodes: within each
    assert resolve_shard_group("world", 1024, 8) == 1024
    assert resolve_shard_group("node", 16, 4) == 4
    assert resolve_shard_group(1, 16, 4) == 1


def test_no_host_synchronisation_in_write_and_merge() -> None:
    """A step on `meta`, where reading a number raises, without the check of the search (see test_search)."""
    bank = build(make(301, 16), 1, device="meta")

    def unchecked(q: Tensor, z: Tensor, k: int) -> Any:
        from ecgmatch_dist.bank.search import Candidates, torch_candidates

        scores, rows = torch_candidates(q, z, k)
        return Candidates(scores.double(), rows)

    bank.searcher.search = unchecked  # type: ignore[method-assign]
    ids, z, p = torch.empty(16, dtype=torch.int64), torch.empty(16, D), torch.empty(16, C)
    out = bank.exchange(*(t.to("meta") for t in (ids, z, p, z)), step=1).result()
    assert out.p.shape == (16, K, C)
    assert not math.isnan(bank.times()["time/search"])


def test_the_background_thread_learns_the_number_of_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch refuses a thread on "cuda" without a number. Fake tensors need no GPU."""
    with pytest.raises(ValueError, match="specified index"):
        use_device(torch.device("cuda"))
    given: list[torch.device] = []
    monkeypatch.setattr("ecgmatch_dist.bank.memory.Worker", given.append)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: object())
    with FakeTensorMode():
        MemoryBank(9, D, C, K, batch=2, backend="torch", device="cuda")
    assert given == [torch.device("cuda", 0)]
