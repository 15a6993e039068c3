"""Exact K nearest rows by inner product, ties to the lower row: one result, whichever backend looks for candidates.

Legend: Q queries, n rows, D features, k neighbours wanted, m candidates. Rows are no longer than 1 (the bank's are
normalised) and finite.
"""

import importlib.metadata
import importlib.util
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ecgmatch_dist.errors import UserError

MARGIN = 8  # candidates beyond k, so that rounding of the fast scores seldom decides who is looked at
QUERIES, CHUNK, BLOCK = 512, 16384, 64  # tile of the torch backend: measured fastest on CPU, 32 MB of scores
ELEMENTS = 1 << 22  # of one fp64 temporary, 32 MB

log = logging.getLogger(__name__)


class Candidates(NamedTuple):
    """Best first: score descending, then row ascending. A bank with fewer than k rows is padded: score -inf, row n."""

    scores: Tensor  # fp64 [Q, k]
    rows: Tensor  # int64 [Q, k]


Backend = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]
"""(q [Q, D], z [n, D], m <= n) -> scores [Q, m], rows int64 [Q, m]: the m largest fp32 scores, in any order."""


def tree_sum(x: Tensor) -> Tensor:
    """[..., D] -> [...]: sum by halves, element-wise additions only: the bits depend on no shape, thread or device."""
    while (width := x.shape[-1]) > 1:
        half = width // 2
        pairs = x[..., :half] + x[..., half : 2 * half]
        x = torch.cat([pairs, x[..., 2 * half :]], -1) if width % 2 else pairs
    return x.squeeze(-1)


def normalise(z: Tensor) -> Tensor:
    """[n, D] -> rows of length 1 in fp32, the same bits on any number of ranks; a row of zeros stays."""
    wide = z.detach().double()
    return (wide / tree_sum(wide * wide).sqrt().clamp(min=1e-12)[:, None]).float()


def canonical_scores(q: Tensor, z: Tensor, rows: Tensor) -> Tensor:
    """q [Q, D], z [n, D], rows [Q, m] -> fp64 [Q, m]: the inner products that decide, summed in a fixed order."""
    step = max(1, ELEMENTS // max(1, rows.shape[1] * q.shape[1]))
    parts = [
        tree_sum(z[r].double() * a.double()[:, None])
        for a, r in zip(torch.split(q, step), torch.split(rows, step), strict=True)
    ]
    return torch.cat(parts)


def best_order(scores: Tensor, rows: Tensor, k: int) -> Tensor:
    """scores, rows [Q, m] -> int64 [Q, k]: positions of the k best by (score descending, row ascending)."""
    by_row = rows.argsort(1)
    by_score = scores.gather(1, by_row).argsort(dim=1, descending=True, stable=True)
    return by_row.gather(1, by_score[:, :k])


def _best(scores: Tensor, rows: Tensor, k: int) -> Candidates:
    order = best_order(scores, rows, k)
    return Candidates(scores.gather(1, order), rows.gather(1, order))


def reference_search(q: Tensor, z: Tensor, k: int) -> Candidates:
    """The definition: every row's canonical score, sorted. q [Q, D], z [n, D] with n >= k."""
    scores = tree_sum(q.double()[:, None] * z.double()[None])
    values, rows = scores.sort(dim=1, descending=True, stable=True)  # stable: equal scores stay in the order of rows
    return Candidates(values[:, :k], rows[:, :k])


def torch_candidates(q: Tensor, z: Tensor, m: int) -> tuple[Tensor, Tensor]:
    """Block-max: scores of a chunk, the maximum of each block of rows, the m best blocks, the m best rows in them.

    Nothing is lost: a row outside the m blocks with the largest maxima has m rows that are at least as good.
    """
    out = []
    for part in torch.split(q, QUERIES):
        tiles = [_tile(part, z, first, m) for first in range(0, len(z), CHUNK)]
        scores, place = torch.cat([scores for scores, _ in tiles], 1).topk(m, 1, sorted=False)
        out.append((scores, torch.cat([rows for _, rows in tiles], 1).gather(1, place)))
    return torch.cat([scores for scores, _ in out]), torch.cat([rows for _, rows in out])


def _tile(q: Tensor, z: Tensor, first: int, m: int) -> tuple[Tensor, Tensor]:
    """The m best (or all) rows of z[first : first + CHUNK] for each query."""
    chunk = z[first : first + CHUNK]
    scores = q @ chunk.T
    if surplus := -len(chunk) % BLOCK:
        scores = F.pad(scores, (0, surplus), value=-torch.inf)
    blocks = scores.view(len(q), -1, BLOCK)
    chosen = blocks.amax(2).topk(min(m, blocks.shape[1]), 1, sorted=False).indices
    inside = blocks.gather(1, chosen[:, :, None].expand(-1, -1, BLOCK)).flatten(1)
    scores, place = inside.topk(min(m, len(chunk)), 1, sorted=False)
    return scores, chosen.gather(1, place // BLOCK) * BLOCK + place % BLOCK + first


@cache
def _faiss() -> Any:
    """Faiss, imported after torch and set to multiply matrices also for small batches of queries (2-4 times faster)."""
    check_faiss()
    if importlib.util.find_spec("faiss") is None:
        raise UserError("Faiss is not installed: pip install faiss-cpu (or faiss-gpu), or set bank.backend to torch")
    import faiss

    faiss.cvar.distance_compute_blas_threshold = 1
    faiss.cvar.distance_compute_blas_database_bs = 4096
    return faiss


def faiss_threads() -> Any:
    """Faiss with as many threads as torch has in this rank: its OpenMP is its own, and would take every core."""
    faiss = _faiss()
    faiss.omp_set_num_threads(torch.get_num_threads())
    return faiss


def faiss_cpu_candidates(q: Tensor, z: Tensor, m: int) -> tuple[Tensor, Tensor]:
    """`faiss.knn` on the bank's own memory: no index to keep in step with the rows."""
    faiss = faiss_threads()
    scores, rows = faiss.knn(q.numpy(), z.numpy(), m, metric=faiss.METRIC_INNER_PRODUCT)
    return torch.from_numpy(scores), torch.from_numpy(rows)


@cache
def _gpu_resources(device: int) -> Any:
    """Faiss would reserve 1.5 GB of every GPU."""
    resources = _faiss().StandardGpuResources()
    resources.setTempMemory(256 << 20)
    return resources


def faiss_gpu_candidates(q: Tensor, z: Tensor, m: int) -> tuple[Tensor, Tensor]:
    """`faiss.knn_gpu` on the bank's own memory, on torch's current stream."""
    faiss = _faiss()
    importlib.import_module("faiss.contrib.torch_utils")  # teaches Faiss torch's tensors and streams
    with torch.cuda.device(z.device):  # with another current device Faiss is silently wrong
        resources = _gpu_resources(torch.cuda.current_device())
        scores, rows = faiss.knn_gpu(resources, q.contiguous(), z, m, metric=faiss.METRIC_INNER_PRODUCT)
    return scores, rows


BACKENDS: dict[str, Backend] = {
    "torch": torch_candidates,
    "faiss-cpu": faiss_cpu_candidates,
    "faiss-gpu": faiss_gpu_candidates,
}


def _rounding(q: Tensor) -> Tensor:
    """[Q, D] -> [Q]: the most by which an fp32 inner product with a row no longer than 1 can be wrong."""
    # Inputs may be cut to 10 (TF32) or 7 (bf16) bits of mantissa where the run allows it.
    inputs = {"highest": 0.0, "high": 2.0**-10, "medium": 2.0**-7}[torch.get_float32_matmul_precision()]
    length: Tensor = torch.linalg.vector_norm(q.double(), dim=1)
    return 1.01 * (q.shape[1] * 2.0**-24 + 2 * inputs) * length


def exact_search(q: Tensor, z: Tensor, k: int, backend: Backend) -> Candidates:
    """q fp32 [Q, D], z fp32 [n, D] -> the k best rows of each query, to the bit the reference's.

    The backend's fp32 scores choose k + 8 candidates, canonical scores decide. A query whose last candidate comes
    within rounding of its k-th neighbour may have lost a tie: it is searched again in fp64. Whether there are such
    queries is read by the host: the one synchronisation of a step.
    """
    n = len(z)
    m = min(n, k + MARGIN)
    if m == 0:
        return _pad(Candidates(q.new_empty(len(q), 0).double(), q.new_empty(len(q), 0).long()), k, n)
    with torch.autocast(q.device.type, enabled=False):
        fast, rows = backend(q, z, m)
        found = _best(canonical_scores(q, z, rows), rows, min(k, n))
        if m == n:
            return _pad(found, k, n)
        kth = found.scores[:, -1]
        again = (fast.amin(1).double() + _rounding(q) >= kth).nonzero().squeeze(1)
        if len(again):
            careful = careful_search(q[again], z, k, kth[again])
            found.scores[again], found.rows[again] = careful
    return found


def _pad(found: Candidates, k: int, n: int) -> Candidates:
    missing = (0, k - found.rows.shape[1])
    return Candidates(F.pad(found.scores, missing, value=-torch.inf), F.pad(found.rows, missing, value=n))


def careful_search(q: Tensor, z: Tensor, k: int, at_least: Tensor | None = None) -> Candidates:
    """The reference's result in bounded memory: fp64 products discard rows that surely are too far, the rest is scored.

    at_least [Q]: canonical scores that k rows are known to reach.
    """
    wide = q.double()
    floor = wide.new_full((len(q),), -torch.inf) if at_least is None else at_least
    margin = 1.01 * q.shape[1] * 2.0**-52 * torch.linalg.vector_norm(wide, dim=1)
    found = _pad(Candidates(wide[:, :0], torch.zeros_like(wide[:, :0], dtype=torch.int64)), k, len(z))
    for first in range(0, len(z), CHUNK // 4):
        chunk = z[first : first + CHUNK // 4]
        scores = (wide @ chunk.double().T).masked_fill(_surplus_copies(chunk, k), -torch.inf)
        close = int((scores >= (floor - margin)[:, None]).sum(1).max())
        rows = scores.topk(close, 1).indices + first
        merged = Candidates(
            torch.cat([found.scores, canonical_scores(q, z, rows)], 1), torch.cat([found.rows, rows], 1)
        )
        found = _best(*merged, k)
        floor = torch.maximum(floor, found.scores[:, -1])
    return found


def _surplus_copies(z: Tensor, k: int) -> Tensor:
    """[n, D] -> bool [n]: rows with k equal rows before them, which can be nobody's neighbours.

    When features collapse the whole bank is one tie; scoring every copy for every query would stop the training.
    """
    order = tree_sum(z.double()).argsort(stable=True)
    place = torch.arange(len(z), device=z.device)
    new = F.pad((z[order[1:]] != z[order[:-1]]).any(1), (1, 0), value=True)
    start = torch.where(new, place, 0).cummax(0).values
    return torch.zeros_like(new).scatter(0, order, place - start >= k)


class ExactSearch:
    """A backend as the bank uses it."""

    def __init__(self, name: str) -> None:
        self.name, self.backend = name, BACKENDS[name]

    def search(self, q: Tensor, z: Tensor, k: int) -> Candidates:
        return exact_search(q, z, k, self.backend)

    def changed(self, z: Tensor, rows: Tensor) -> None:
        """Nothing to do: exact backends read the bank where it lies."""


def check_faiss() -> None:
    """Refuse two builds of Faiss: they overwrite each other's files, and what remains crashes or computes nonsense."""
    builds = [build for build in importlib.metadata.distributions() if (build.name or "").lower().startswith("faiss")]
    owners = sorted({build.name for build in builds if any(path.parts[0] == "faiss" for path in build.files or ())})
    if len(owners) > 1:
        keep = next((name for name in owners if "gpu" in name), owners[0])
        raise UserError(
            f"{len(owners)} builds of Faiss are installed ({', '.join(owners)}): they overwrite each other; "
            f"pip uninstall --yes {' '.join(owners)} && pip install {keep}"
        )


def available(device: torch.device) -> list[str]:
    """Exact backends for a bank on this device."""
    if importlib.util.find_spec("faiss") is None:
        return ["torch"]
    if device.type == "cuda":
        return ["torch", "faiss-gpu"] if _faiss().get_num_gpus() > 0 else ["torch"]
    return ["torch", "faiss-cpu"]


def require_backend(name: str, device: torch.device) -> None:
    """A backend that was asked for by name must be able to work here."""
    if name == "faiss-gpu" and (device.type != "cuda" or _faiss().get_num_gpus() == 0):
        reason = "the bank is not on a GPU" if device.type != "cuda" else "this build of Faiss sees no GPU"
        raise UserError(
            f"bank.backend = 'faiss-gpu': {reason}; install faiss-gpu in place of faiss-cpu, or choose auto"
        )
    if name == "faiss-cpu" and device.type == "cuda":
        raise UserError("bank.backend = 'faiss-cpu': the bank is on a GPU; choose faiss-gpu, torch or auto")
    if name.startswith("faiss"):
        _faiss()


@dataclass(frozen=True)
class Choice:
    """The fastest backend, and why."""

    name: str
    milliseconds: dict[str, float]
    wrong: tuple[str, ...]

    def __str__(self) -> str:
        times = ", ".join(f"{name} {ms:.1f} ms" for name, ms in self.milliseconds.items())
        wrong = f"; NOT USED, results differ from the reference: {', '.join(self.wrong)}" if self.wrong else ""
        return f"{self.name} ({times}{wrong})"


def choose_backend(queries: int, rows: int, dim: int, k: int, device: torch.device, repetitions: int = 3) -> Choice:
    """Time the exact backends on random data of the real shapes and check each against the careful search.

    Every rank may choose for itself: the results do not depend on the choice. 262,144 rows are enough to tell.
    """
    rows = min(rows, 1 << 18)
    generator = torch.Generator().manual_seed(0)  # its own: the run's random numbers must not depend on this
    q = normalise(torch.randn(queries, dim, generator=generator)).to(device)
    z = normalise(torch.randn(rows, dim, generator=generator)).to(device)
    names, milliseconds, wrong = available(device), {}, []
    if len(names) == 1 or rows == 0:
        return Choice("torch", {}, ())
    truth = careful_search(q[:8], z, min(k, rows))
    for name in names:
        found = exact_search(q, z, min(k, rows), BACKENDS[name])
        if not all(torch.equal(a[:8], b) for a, b in zip(found, truth, strict=True)):
            wrong.append(name)
            log.warning("search backend %s differs from the reference and is not used; reinstall it", name)
            continue
        times = [_seconds(q, z, min(k, rows), BACKENDS[name]) for _ in range(repetitions)]
        milliseconds[name] = 1e3 * sorted(times)[repetitions // 2]
    assert milliseconds, f"no backend agrees with the reference: {wrong}"
    return Choice(min(milliseconds, key=milliseconds.__getitem__), milliseconds, tuple(wrong))


def _seconds(q: Tensor, z: Tensor, k: int, backend: Backend) -> float:
    start = time.perf_counter()
    exact_search(q, z, k, backend).rows[:, -1].sum().item()  # reading a number waits for the device
    return time.perf_counter() - start
