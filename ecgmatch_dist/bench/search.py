"""The bank's search, against Faiss with its defaults and matmul with topk; its exchange, against gathering the bank; and, with
features of a model, the looks that the search needs."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from ecgmatch_dist.bank.faiss_backends import faiss_threads
from ecgmatch_dist.bank.memory import MemoryBank, step_bytes
from ecgmatch_dist.bank.search import BACKENDS, MARGINS, available, exact_search, normalise, torch_candidates
from ecgmatch_dist.bench import Comparison, interleave, show
from ecgmatch_dist.distributed.collectives import all_gather
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.record.predictions import read_arrays

CPU = torch.device("cpu")
CLASSES = 5


def random_rows(n: int, dim: int, seed: int) -> Tensor:
    return normalise(torch.randn(n, dim, generator=torch.Generator().manual_seed(seed)))


@contextmanager
def faiss_defaults(threshold: int, block: int) -> Iterator[None]:
    """Faiss with its default settings."""
    variables = faiss_threads().cvar
    ours = variables.distance_compute_blas_threshold, variables.distance_compute_blas_database_bs
    variables.distance_compute_blas_threshold, variables.distance_compute_blas_database_bs = threshold, block
    yield
    variables.distance_compute_blas_threshold, variables.distance_compute_blas_database_bs = ours


def bench_search(
    rows: int, queries: int, dim: int, k: int, repeats: int, defaults: tuple[int, int]
) -> list[Comparison]:
    """One step's search in every exact backend. Ours includes the canonical scores and the check for lost ties."""
    q, z = random_rows(queries, dim, 1), random_rows(rows, dim, 2)
    flat = faiss_threads().IndexFlatIP(dim)
    flat.add(z.numpy())

    def faiss_default() -> None:
        with faiss_defaults(*defaults):
            flat.search(q.numpy(), k)

    ways: dict[str, Callable[[], object]] = {"IndexFlatIP": faiss_default, "topk": lambda: (q @ z.T).topk(k, 1)}
    ways |= {name: partial(exact_search, q, z, k, BACKENDS[name]) for name in available(CPU)}
    ms = {name: 1e3 * seconds for name, seconds in interleave(ways, repeats).items()}
    out = []
    for name in available(CPU):
        for other, label in (("IndexFlatIP", "faiss.IndexFlatIP, defaults"), ("topk", "torch matmul, topk")):
            what = f"search of {rows:,} rows by {name}"
            out.append(Comparison(what, label, ms[name], ms[other], "ms", ms[other] / ms[name]))
    return out


def read_features(path: Path) -> Tensor:
    """Rows of norm 1 from bank.npz or predictions/*.npz of a run."""
    (found,) = read_arrays(path, ("features",))
    if found.ndim != 2 or len(found) < 16:
        raise UserError(f"--features {path}: shape {found.shape}; needs at least 16 rows of features")
    return normalise(torch.from_numpy(found))


def grown(features: Tensor, rows: int, seed: int, nearest: int = 2, noise: float = 0.1) -> Tensor:
    """Features of a model, repeated to `rows` with small noise: each copy takes a random step along the differences to its
    two nearest rows, so that the gaps between neighbours shrink as 1 / n, as those of real features do. Noise in all D
    directions would lie: rows would stay far apart."""
    g = torch.Generator().manual_seed(seed)
    near = exact_search(features, features, nearest + 1, torch_candidates).rows[:, 1:]
    out = torch.empty(rows, features.shape[1])
    for part in torch.split(torch.arange(rows), 1 << 16):
        own = part % len(features)
        at, steps = features[own], noise * torch.randn(len(part), nearest, 1, generator=g)
        out[part] = normalise(at + (steps * (features[near[own]] - at[:, None])).sum(1))
    return out


def bench_looks(features: Tensor, rows: int, queries: int, k: int, repeats: int) -> list[Comparison]:
    """How many queries are left to the search in fp64 in a bank of features, and the search with and without its further looks;
    with `repeats` 0 by one backend, and without times."""
    q, z = grown(features, queries, seed=1), grown(features, rows, seed=2)
    out = []
    for name in available(CPU) if repeats else available(CPU)[-1:]:
        looks: list[int] = []
        found = exact_search(q, z, k, BACKENDS[name], looks=looks).rows
        after = [100 * count / queries for count in [*looks[1:], 0, 0, 0][: len(MARGINS)]]
        what = f"queries left to fp64, {rows:,} rows of features by {name}"
        note = ", ".join(f"{share:.1f} % after k + {m} candidates" for share, m in zip(after, MARGINS, strict=True))
        ratio = after[0] / max(after[-1], 100 / queries) if after[0] else 1.0
        out.append(Comparison(what, "without further looks", after[-1], after[0], "%", ratio, f"open: {note}"))
        if not repeats:
            continue
        once = partial(exact_search, q, z, k, BACKENDS[name], MARGINS[:1])
        assert torch.equal(found, once().rows)
        ways: dict[str, Callable[[], object]] = {
            "before": once,
            "after": partial(exact_search, q, z, k, BACKENDS[name]),
        }
        ms = {way: 1e3 * seconds for way, seconds in interleave(ways, repeats).items()}
        what = f"search of {rows:,} rows of features by {name}"
        ratio = ms["before"] / ms["after"]
        out.append(Comparison(what, "without further looks", ms["after"], ms["before"], "ms", ratio))
    return out


def exchange_rank(rank: int, folder: str, rows: int, queries: int, dim: int, k: int, repeats: int) -> None:
    """One of two ranks with one thread each; rank 0 writes its times to a file."""
    torch.set_num_threads(1)
    limit = timedelta(minutes=5)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2, timeout=limit)
    bank = MemoryBank(rows, dim, CLASSES, k, queries, shard_group=2, overlap=False)
    bank.z[:-1] = random_rows(bank.length, dim, rank)
    b = queries // 2
    z, p = random_rows(b, dim, 10 + rank), torch.rand(b, CLASSES)
    exchange, search = [], []
    for step in range(repeats + 1):
        dist.barrier()
        bank.exchange(torch.arange(b) + rank * b, z, p, z, step).result()
        exchange.append(bank.times()["time/exchange"])
        search.append(bank.times()["time/search"])
    whole = interleave({"gather": lambda: all_gather(bank.z, name="whole bank")}, repeats)["gather"]
    if rank == 0:
        seconds = median(exchange[1:]), median(search[1:]), whole
        Path(f"{folder}/milliseconds").write_text(" ".join(str(1e3 * value) for value in seconds))
    dist.barrier()
    dist.destroy_process_group()


def bench_exchange(rows: int, queries: int, dim: int, k: int, repeats: int) -> list[Comparison]:
    """The collectives of a step on two ranks, against gathering the other rank's half of the bank."""
    with tempfile.TemporaryDirectory(prefix="ecgmatch-bench-") as folder:
        spawn(exchange_rank, (folder, rows, queries, dim, k, repeats), nprocs=2)  # type: ignore[no-untyped-call]
        exchange, search, whole = map(float, Path(f"{folder}/milliseconds").read_text().split())
    what = f"exchange of {rows:,} rows, 2 processes"
    moved = sum(step_bytes(queries, dim, CLASSES, k, 2, 2).values()) / 2**20
    half = rows * dim * 4 / 2 / 2**20
    note = f"each rank receives {moved:.2f} MiB per step instead of {half:.1f} MiB; its search takes {search:.1f} ms"
    return [Comparison(what, "gathering the bank", exchange, whole, "ms", whole / exchange, note)]


def main(
    rows: tuple[int, ...] = (66_000, 1_000_000),
    queries: int = 448,
    dim: int = 128,
    neighbours: int = 5,
    repeats: int = 5,
    features: Path | None = None,
    json: Path | None = None,
) -> None:
    """Exact search in a bank and its exchange between two processes, on this machine's CPU.

    Args:
        rows: Sizes of the bank.
        queries: Global unlabelled batch, even.
        dim: Features per row.
        neighbours: Neighbours K.
        repeats: Turns per measurement; the median counts. With --features, 0 counts the looks without timing them.
        features: bank.npz or predictions/*.npz of a run: only the looks of the search are measured, in a bank of these
            features, repeated with small noise. (Random rows are farther apart, and hardly need a second look.)
        json: Write the numbers to this file.
    """
    if repeats < (features is None) or queries < 2 or queries % 2 or min(rows) < queries:
        raise UserError(
            f"--repeats {repeats} --queries {queries} --rows {rows}: at least 1; even; at least the queries"
        )
    if features is not None:
        known = read_features(features)
        turns = f", medians of {repeats}" if repeats else ""
        title = f"{queries} queries, {len(known):,} features of {features}, repeated; K = {neighbours}{turns}"
        show(title, [row for n in rows for row in bench_looks(known, n, queries, neighbours, repeats)], json)
        return
    import faiss

    defaults = faiss.cvar.distance_compute_blas_threshold, faiss.cvar.distance_compute_blas_database_bs
    out: list[Comparison] = []
    for n in rows:
        out += bench_search(n, queries, dim, neighbours, repeats, defaults)
        out += bench_exchange(n, queries, dim, neighbours, repeats)
    show(
        f"{queries} queries, D = {dim}, K = {neighbours}, {torch.get_num_threads()} threads, medians of {repeats}",
        out,
        json,
    )
