"""Backends against the reference, real calls of Faiss, and the IVF index with its recall check."""

import logging
import math
from collections.abc import Iterator

import faiss
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ecgmatch_dist.bank import search
from ecgmatch_dist.bank.faiss_backends import ResidentIndex, faiss_threads
from ecgmatch_dist.bank.ivf import IVFSearch
from ecgmatch_dist.bank.search import (
    BACKENDS,
    Candidates,
    ExactSearch,
    best_order,
    canonical_scores,
    careful_search,
    exact_search,
    normalise,
    reference_search,
    torch_candidates,
    tree_sum,
)
from ecgmatch_dist.bench.search import bench_search

CPU = torch.device("cpu")
EXACT = ["torch", "faiss-cpu"]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def points(kind: str, n: int, d: int, seed: int = 0) -> Tensor:
    """[n, d] rows of norm 1 (or 0): random, clustered, with few or many copies, nearly equal, all zero."""
    g = torch.Generator().manual_seed(seed)
    z = normalise(torch.randn(n, d, generator=g))
    match kind:
        case "clustered":
            centres = torch.randn(5, d, generator=g)
            z = normalise(centres[torch.randint(5, (n,), generator=g)] + 0.05 * z)
        case "pairs":
            z = z[torch.randint(max(1, n // 2), (n,), generator=g)]
        case "copies":  # far more than k + 8 equal rows
            z = z[torch.randint(3, (n,), generator=g) % n]
        case "near":  # differences below the rounding of an fp32 product
            z = normalise(z[:1] + 1e-7 * z)
        case "zero":
            z = torch.zeros(n, d)
    return z


def same(a: Candidates, b: Candidates) -> bool:
    return torch.equal(a.rows, b.rows) and torch.equal(a.scores, b.scores)


@pytest.mark.parametrize("backend", EXACT)
@pytest.mark.parametrize("kind", ["random", "clustered", "pairs", "copies", "near", "zero"])
def test_backends_equal_the_reference(backend: str, kind: str) -> None:
    z = points(kind, 2000, 24)
    q = torch.cat([points("random", 20, 24, seed=1), z[:20]])  # other points, and rows of the bank
    assert same(exact_search(q, z, 5, BACKENDS[backend]), reference_search(q, z, 5))


@pytest.mark.parametrize("backend", EXACT)
def test_more_rows_and_queries_than_one_tile(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "CHUNK", 256)
    monkeypatch.setattr(search, "QUERIES", 16)
    monkeypatch.setattr(search, "ELEMENTS", 1000)
    for kind in ("random", "copies"):
        z, q = points(kind, 1000, 8), points("random", 50, 8, seed=1)
        assert same(exact_search(q, z, 5, BACKENDS[backend]), reference_search(q, z, 5))
        assert same(careful_search(q, z, 5), reference_search(q, z, 5))


def test_a_query_alone_loses_nothing_between_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a batch, the query with the most close rows decides how many rows all others get."""
    monkeypatch.setattr(search, "CHUNK", 256)
    z = points("random", 1000, 8)
    for q in points("random", 20, 8, seed=1).split(1):
        assert same(careful_search(q, z, 5), reference_search(q, z, 5))


def test_temporary_tensors_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    z, sizes = points("random", 50, 8), list[int]()
    monkeypatch.setattr(search, "ELEMENTS", 1000)
    monkeypatch.setattr(search, "tree_sum", lambda x: sizes.append(x.numel()) or tree_sum(x))
    canonical_scores(z, z, torch.zeros(50, 7, dtype=torch.int64))
    assert max(sizes) <= 1000
    assert sum(sizes) == 50 * 7 * 8


def test_rows_with_enough_equal_rows_before_them_are_surplus() -> None:
    z = points("copies", 60, 8)
    expected = [sum(torch.equal(z[i], z[j]) for j in range(i)) >= 4 for i in range(60)]
    assert search._surplus_copies(z, 4).tolist() == expected
    assert 40 <= sum(expected) < 60


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 90),
    queries=st.integers(1, 6),
    d=st.integers(1, 9),
    k=st.integers(1, 12),
    kind=st.sampled_from(["random", "clustered", "pairs", "copies", "near", "zero"]),
    seed=st.integers(0, 99),
)
def test_small_banks(n: int, queries: int, d: int, k: int, kind: str, seed: int) -> None:
    z, q = points(kind, n, d, seed), points("random", queries, d, seed + 1)
    truth = reference_search(q, z, min(k, n))
    for name in EXACT:
        found = exact_search(q, z, k, BACKENDS[name])
        assert found.rows.shape == (queries, k)
        assert same(Candidates(*(x[:, : min(k, n)] for x in found)), truth)
        assert (found.rows[:, n:] == n).all()  # padding
        assert (found.scores[:, n:] == -math.inf).all()


def test_an_empty_bank_gives_padding() -> None:
    found = exact_search(points("random", 3, 4), torch.zeros(0, 4), 2, torch_candidates)
    assert found.rows.tolist() == [[0, 0]] * 3
    assert (found.scores == -math.inf).all()


def test_the_reference_is_right() -> None:
    """Against exactly rounded sums (math.fsum), with one tie."""
    z, q = points("random", 30, 11), points("random", 4, 11, seed=1)
    z[17] = z[3]
    found = reference_search(q, z, 30)
    for i in range(len(q)):
        exact = [math.fsum(a * b for a, b in zip(q[i].tolist(), row, strict=True)) for row in z.tolist()]
        assert found.rows[i].tolist() == sorted(range(30), key=lambda r: (-exact[r], r))
        assert found.scores[i].tolist() == pytest.approx(sorted(exact, reverse=True), abs=1e-15)


def test_a_lost_tie_is_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend keeps the highest rows of a tie: only a later look finds the lowest, of many copies the last."""

    def high_rows(q: Tensor, z: Tensor, m: int) -> tuple[Tensor, Tensor]:
        scores, rows = (q @ z.flip(0).T).sort(dim=1, descending=True, stable=True)
        return scores[:, :m], len(z) - 1 - rows[:, :m]

    few, some, z = (points("copies", n, 8) for n in (300, 900, 9000))
    q = z[:10]
    for bank, wanted in ((few, [10, 10]), (some, [10, 10, 10]), (z, [10, 10, 10, 10])):
        looks: list[int] = []
        assert same(exact_search(bank[:10], bank, 5, high_rows, looks=looks), reference_search(bank[:10], bank, 5))
        assert looks == wanted
    monkeypatch.setattr(
        search,
        "careful_search",
        lambda q, z, k, kth: Candidates(kth[:, None].expand(-1, k), q.new_full((len(q), k), -7).long()),
    )
    assert (exact_search(q, z, 5, high_rows).rows == -7).all()


@pytest.mark.parametrize(("k", "wanted"), [(5, [13, 133, 2005]), (100, [108, 228, 2048]), (2045, [2053] * 3)])
def test_no_look_takes_more_candidates_than_faiss_can_select(k: int, wanted: list[int]) -> None:
    """Except for k + 8."""
    asked: list[int] = []

    def counted(q: Tensor, z: Tensor, m: int) -> tuple[Tensor, Tensor]:
        asked.append(m)
        return torch_candidates(q, z, m)

    assert exact_search(torch.ones(1, 2), torch.zeros(3000, 2), k, counted).rows[0].tolist() == list(range(k))
    assert asked == wanted


def test_a_crowded_bank_is_searched_with_more_candidates_at_once() -> None:
    z = normalise(points("random", 1, 16) + 1e-4 * points("random", 3000, 16, seed=1))
    searcher, truth = ExactSearch("torch"), reference_search(z[:20], z, 5)
    assert same(searcher.search(z[:20], z, 5), truth)
    assert searcher.margins == (128, 2000)
    assert same(searcher.search(z[:20], z, 5), truth)
    loose = ExactSearch("torch")
    loose.search(points("random", 20, 64, seed=1), points("random", 3000, 64), 5)
    assert loose.margins == (8, 128, 2000)


def test_few_queries_are_searched_twice() -> None:
    looks: list[int] = []
    exact_search(points("random", 100, 64, seed=1), points("random", 20000, 64), 5, torch_candidates, looks=looks)
    assert looks[0] == 100
    assert sum(looks[1:]) <= 5


def test_bits_do_not_depend_on_the_batch() -> None:
    z, q = points("random", 500, 33), points("random", 40, 33, seed=1)
    rows = torch.randint(500, (40, 7), generator=torch.Generator().manual_seed(2))
    whole = canonical_scores(q, z, rows)
    assert torch.equal(whole, torch.cat([canonical_scores(q[i : i + 1], z, rows[i : i + 1]) for i in range(40)]))
    raw = torch.randn(40, 33, generator=torch.Generator().manual_seed(3))
    assert torch.equal(normalise(raw), torch.cat([normalise(raw[i : i + 1]) for i in range(40)]))
    assert torch.allclose(tree_sum(raw.double()), raw.double().sum(1), atol=1e-13)
    assert torch.allclose(normalise(raw), torch.nn.functional.normalize(raw), atol=1e-6)


@pytest.mark.parametrize(("precision", "dropped"), [("high", 0x1FFF), ("medium", 0xFFFF)])
def test_the_error_bound_includes_reduced_matmul_precision(
    precision: str, dropped: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backend as coarse as TF32 or bf16 loses neighbours, unless the error bound accounts for it."""

    def coarse(q: Tensor, z: Tensor, m: int) -> tuple[Tensor, Tensor]:
        q, z = ((x.view(torch.int32) & ~dropped).view(torch.float32) for x in (q, z))  # 10 or 7 bits of mantissa
        return (q @ z.T).topk(m, 1)

    noise = points("random", 3050, 16, seed=1)
    z, q = normalise(points("random", 1, 16) + 0.05 * noise).split([3000, 50])
    truth = reference_search(q, z, 5)
    assert not same(exact_search(q, z, 5, coarse), truth)
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: precision)
    assert same(exact_search(q, z, 5, coarse), truth)


@pytest.mark.parametrize("autocast", [False, True])
def test_autocast_of_the_caller_does_not_matter(autocast: bool) -> None:
    z, q = points("random", 3000, 16), points("random", 20, 16, seed=1)
    seen: list[torch.dtype] = []

    def spy(q: Tensor, z: Tensor, m: int) -> tuple[Tensor, Tensor]:
        seen.append((q[:1] @ z[:1].T).dtype)
        return torch_candidates(q, z, m)

    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        assert same(exact_search(q, z, 5, spy), reference_search(q, z, 5))
    assert seen == [torch.float32]


def test_no_host_synchronisation_before_the_check() -> None:
    """On `meta`, any read by the host raises. Only the check for lost ties does that."""
    q, z = torch.empty(600, 32, device="meta"), torch.empty(40000, 32, device="meta")
    scores, rows = torch_candidates(normalise(q), z, 13)
    canonical = canonical_scores(q, z, rows)
    assert best_order(canonical, rows, 5).shape == (600, 5)
    assert scores.shape == rows.shape == canonical.shape == (600, 13)
    with pytest.raises((RuntimeError, NotImplementedError)):
        exact_search(q, z, 5, torch_candidates)


def test_faiss_does_the_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int]] = []
    knn = faiss.knn

    def counted(q: object, z: object, m: int, **options: object) -> object:
        calls.append((len(z), m))  # type: ignore[arg-type]
        return knn(q, z, m, **options)

    monkeypatch.setattr(faiss, "knn", counted)
    z = points("random", 700, 16)
    ExactSearch("torch").search(z[:5], z, 5)
    assert calls == []
    ExactSearch("faiss-cpu").search(z[:5], z, 5)
    assert calls == [(700, 13)]


def test_faiss_reads_the_bank_in_place() -> None:
    z, q = points("random", 700, 16), points("random", 1, 16, seed=1)
    backend = ExactSearch("faiss-cpu")
    backend.search(q, z, 5)
    z[123] = q[0]
    assert backend.search(q, z, 5).rows[0, 0] == 123


def test_faiss_takes_no_more_threads_than_torch() -> None:
    faiss.omp_set_num_threads(torch.get_num_threads() + 1)
    ExactSearch("faiss-cpu").search(points("random", 5, 4), points("random", 50, 4), 3)
    assert faiss.omp_get_max_threads() == torch.get_num_threads()
    assert faiss.cvar.distance_compute_blas_threshold == 1


@pytest.mark.parametrize("kind", ["random", "pairs", "copies", "near"])
def test_a_resident_index_follows_the_bank(kind: str) -> None:
    """The index that a GPU uses, on a CPU: filled from the bank at each search, the same bits as the reference."""
    index = ResidentIndex(faiss.IndexFlatIP)
    z, q = points(kind, 900, 16), points("random", 30, 16, seed=1)
    for step in range(3):
        assert same(exact_search(q, z, 5, index), reference_search(q, z, 5))
        first = index.index
        z[step * 100 : step * 100 + 30] = q
    assert same(exact_search(q, z[:700], 5, index), reference_search(q, z[:700], 5))  # fewer rows
    assert index.index is first


def test_chunks_are_larger_on_a_gpu() -> None:
    assert search.chunk_rows(CPU) == 16_384
    assert search.chunk_rows(torch.device("cuda")) >= 131_072


def test_ivf_follows_changed_rows() -> None:
    z = points("clustered", 4000, 16)
    index = IVFSearch(probes=32)
    found = index.search(z[:64], z, 5)
    assert index.name == "faiss-ivf"
    assert index.recall >= 0.95
    assert torch.equal(found.scores, canonical_scores(z[:64], z, found.rows))
    assert (found.scores.diff(dim=1) <= 0).all()
    rows = torch.tensor([7, 3999, 7, 4000, 12])  # one twice, one is the spare row
    z[rows[rows < 4000]] = points("random", 4, 16, seed=5)
    index.changed(z, rows)
    assert index.search(z[[7, 12, 3999]], z, 5).rows[:, 0].tolist() == [7, 12, 3999]


def test_a_frozen_ivf_finds_the_rows_that_were_written_after_it_was_built(caplog: pytest.LogCaptureFixture) -> None:
    """As on a GPU, whose indices cannot change rows."""
    z = points("clustered", 4000, 16)
    index = IVFSearch(probes=32, check_every=1, frozen=True)
    index.search(z[:64], z, 5)
    first = index.index
    rows = torch.tensor([7, 3999, 7, 4000, -1, 12])  # one twice, two outside
    old = z[7].clone()
    z[[7, 12, 3999]] = points("random", 3, 16, seed=5)
    index.changed(z, rows)
    found = index.search(torch.cat([z[[7, 12, 3999]], old[None]]), z, 5)
    assert found.rows[:3, 0].tolist() == [7, 12, 3999]
    assert 7 not in found.rows[3]  # it is no longer where the index has it
    assert torch.equal(found.scores, canonical_scores(torch.cat([z[[7, 12, 3999]], old[None]]), z, found.rows))
    assert all(len(set(row)) == 5 for row in found.rows.tolist())
    assert index.index is first
    index.changed(z, torch.arange(1000))
    index.search(z[:64], z, 5)
    assert index.index is not first  # too many rows outside
    assert index.recall >= 0.95
    assert index.name == "faiss-ivf"


def test_ivf_falls_back_to_exact(caplog: pytest.LogCaptureFixture) -> None:
    z = points("random", 3000, 32)
    index = IVFSearch(probes=1)
    with caplog.at_level(logging.WARNING):
        index.search(z[:64], z, 5)
    assert index.name == "torch"
    assert "recall" in caplog.text
    assert same(index.search(z[:64], z, 5), reference_search(z[:64], z, 5))
    index.changed(z, torch.arange(3))


def test_ivf_is_built_anew_when_lists_are_uneven() -> None:
    z = points("random", 2000, 8)
    index = IVFSearch(probes=1000, check_every=2)
    index.search(z[:4], z, 3)
    first = index.index
    z[:] = points("clustered", 2000, 8, seed=3)
    z[:1900] = normalise(z[:1] + 0.001 * points("random", 1900, 8))
    index.changed(z, torch.arange(2000))
    assert index.imbalance() > 8
    index.search(z[:4], z, 3)
    assert index.index is first  # the balance is checked only every second time
    index.search(z[:4], z, 3)
    assert index.name == "faiss-ivf"
    assert index.index is not first
    assert index.imbalance() < 8


def test_ivf_on_tiny_banks() -> None:
    z = points("random", 6, 4)
    assert same(IVFSearch().search(z, z, 5), reference_search(z, z, 5))
    assert IVFSearch().search(z, z[:3], 5).rows[:, 3:].eq(3).all()


def test_benchmark_compares_with_faiss_as_installed() -> None:
    ours = faiss_threads().cvar.distance_compute_blas_threshold
    rows = bench_search(600, 8, 8, 3, 1, defaults=(20, 1024))
    assert {row.what for row in rows} == {f"search of 600 rows by {name}" for name in EXACT}
    assert all(row.ratio == pytest.approx(row.other_value / row.ours_value) for row in rows)
    assert faiss.cvar.distance_compute_blas_threshold == ours == 1
