"""Exact K nearest rows by inner product, ties to the lower row. The result does not depend on the backend.

Legend: Q queries, n rows, D features, k neighbours, m candidates. Rows are finite, with a norm of at most 1 (the
bank normalises them).
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ecgmatch_dist.bank.faiss_backends import (
    ResidentIndex,
    faiss_cpu_candidates,
    faiss_gpu_candidates,
    has_faiss,
    has_gpu,
    load_faiss,
)
from ecgmatch_dist.errors import UserError

MARGINS: tuple[int, ...] = (8, 128, 2000)  # candidates beyond k of each look: seldom is a search in fp64 necessary
WIDEST = 2048  # candidates that Faiss's kernels can select
QUERIES, CHUNK, BLOCK = 512, 16384, 64  # tile of the torch backend, measured fastest on CPU: 32 MB of scores
CHUNK_CUDA = 131_072  # on a GPU each tile costs launches, not cache: 256 MB of scores
ELEMENTS = 1 << 22  # per fp64 temporary: 32 MB

log = logging.getLogger(__name__)


class Candidates(NamedTuple):
    """Best first: score descending, then row ascending. If n < k, padded with score -inf and row n."""

    scores: Tensor  # fp64 [Q, k]
    rows: Tensor  # int64 [Q, k]


Backend = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]
"""(q [Q, D], z [n, D], m <= n) -> scores [Q, m], rows int64 [Q, m]: the m largest fp32 scores, in any order."""


def tree_sum(x: Tensor) -> Tensor:
    """[..., D] -> [...]: pairwise sum by element-wise additions only, so the bits depend on no shape, thread or device."""
    while (width := x.shape[-1]) > 1:
        half = width // 2
        pairs = x[..., :half] + x[..., half : 2 * half]
        x = torch.cat([pairs, x[..., 2 * half :]], -1) if width % 2 else pairs
    return x.squeeze(-1)


def normalise(z: Tensor) -> Tensor:
    """[n, D] -> rows of norm 1 in fp32, the same bits on any number of ranks; zero rows stay zero."""
    wide = z.detach().double()
    return (wide / tree_sum(wide * wide).sqrt().clamp(min=1e-12)[:, None]).float()


def canonical_scores(q: Tensor, z: Tensor, rows: Tensor) -> Tensor:
    """q [Q, D], z [n, D], rows [Q, m] -> fp64 [Q, m]: inner products, summed in a fixed order. They decide the result."""
    step = max(1, ELEMENTS // max(1, rows.shape[1] * q.shape[1]))
    parts = [
        tree_sum(z[r].double() * a.double()[:, None])
        for a, r in zip(torch.split(q, step), torch.split(rows, step), strict=True)
    ]
    return torch.cat(parts)


def best_order(scores: Tensor, rows: Tensor, k: int) -> Tensor:
    """scores, rows [Q, m] -> int64 [Q, k]: positions of the k best, by score descending, then row ascending."""
    by_row = rows.argsort(1)
    by_score = scores.gather(1, by_row).argsort(dim=1, descending=True, stable=True)
    return by_row.gather(1, by_score[:, :k])


def _best(scores: Tensor, rows: Tensor, k: int) -> Candidates:
    order = best_order(scores, rows, k)
    return Candidates(scores.gather(1, order), rows.gather(1, order))


def reference_search(q: Tensor, z: Tensor, k: int) -> Candidates:
    """The definition: canonical scores of all rows, sorted. q [Q, D], z [n, D] with n >= k."""
    scores = tree_sum(q.double()[:, None] * z.double()[None])
    values, rows = scores.sort(dim=1, descending=True, stable=True)  # stable: ties stay in row order
    return Candidates(values[:, :k], rows[:, :k])


def chunk_rows(device: torch.device) -> int:
    """Rows per tile."""
    return CHUNK_CUDA if device.type == "cuda" else CHUNK


def torch_candidates(q: Tensor, z: Tensor, m: int) -> tuple[Tensor, Tensor]:
    """Block-max: for each chunk, compute all scores, choose the m blocks with the largest maxima, then their m best rows.

    This is exact: for a row outside these blocks, the m maxima are at least as good.
    """
    out = []
    for part in torch.split(q, QUERIES):
        size = chunk_rows(z.device)
        tiles = [_tile(part, z[first : first + size], first, m) for first in range(0, len(z), size)]
        scores, place = torch.cat([scores for scores, _ in tiles], 1).topk(m, 1, sorted=False)
        out.append((scores, torch.cat([rows for _, rows in tiles], 1).gather(1, place)))
    return torch.cat([scores for scores, _ in out]), torch.cat([rows for _, rows in out])


def _tile(q: Tensor, chunk: Tensor, first: int, m: int) -> tuple[Tensor, Tensor]:
    """The m best (or all) rows of a chunk for each query; it begins at row `first`."""
    scores = q @ chunk.T
    if surplus := -len(chunk) % BLOCK:
        scores = F.pad(scores, (0, surplus), value=-torch.inf)
    blocks = scores.view(len(q), -1, BLOCK)
    chosen = blocks.amax(2).topk(min(m, blocks.shape[1]), 1, sorted=False).indices
    inside = blocks.gather(1, chosen[:, :, None].expand(-1, -1, BLOCK)).flatten(1)
    scores, place = inside.topk(min(m, len(chunk)), 1, sorted=False)
    return scores, chosen.gather(1, place // BLOCK) * BLOCK + place % BLOCK + first


BACKENDS: dict[str, Backend] = {
    "torch": torch_candidates,
    "faiss-cpu": faiss_cpu_candidates,
    "faiss-gpu": faiss_gpu_candidates,
    "faiss-gpu-index": ResidentIndex.search_on_gpu,
}


def _rounding(q: Tensor) -> Tensor:
    """[Q, D] -> [Q]: upper bound of the error of an fp32 inner product with a row of norm at most 1."""
    # If the run allows it, inputs are rounded to 10 (TF32) or 7 (bf16) bits of mantissa.
    inputs = {"highest": 0.0, "high": 2.0**-10, "medium": 2.0**-7}[torch.get_float32_matmul_precision()]
    length: Tensor = torch.linalg.vector_norm(q.double(), dim=1)
    return 1.01 * (q.shape[1] * 2.0**-24 + 2 * inputs) * length


def exact_search(
    q: Tensor, z: Tensor, k: int, backend: Backend, margins: tuple[int, ...] = MARGINS, looks: list[int] | None = None
) -> Candidates:
    """q fp32 [Q, D], z fp32 [n, D] -> the k best rows of each query, bit for bit as `reference_search`.

    The backend's fp32 scores choose k + 8 candidates, and canonical scores decide among them. If the last candidate is within
    rounding of the k-th neighbour, a better row may have been missed. Such queries get a second look with k + 128 candidates,
    and a third with k + 2,000: in a large bank neighbours are close together. What is still open is searched in fp64. The host
    reads which queries are open: the only synchronisation of a step, and another one for each further look. `looks` receives
    the queries of each look.
    """
    n = len(z)
    looks = [] if looks is None else looks
    found = _pad(Candidates(q.new_empty(len(q), 0).double(), q.new_empty(len(q), 0).long()), k, n)
    if n == 0:
        return found
    left: Tensor | None = None  # the open queries; None: all
    with torch.autocast(q.device.type, enabled=False):
        for margin in margins:
            part = q if left is None else q[left]
            looks.append(len(part))
            m = min(n, k + margin, max(WIDEST, k + MARGINS[0]))
            best, is_open = _look(part, z, k, m, backend)
            if left is None:
                found = best
            else:
                found.scores[left], found.rows[left] = best
            if n <= m:
                return found
            still = is_open.nonzero().squeeze(1)
            left = still if left is None else left[still]
            if not len(left):
                return found
        assert left is not None
        looks.append(len(left))
        found.scores[left], found.rows[left] = careful_search(q[left], z, k, found.scores[left, -1])
    return found


def _look(q: Tensor, z: Tensor, k: int, m: int, backend: Backend) -> tuple[Candidates, Tensor]:
    """The k best of m candidates, and bool [Q]: whether a row that is no candidate may be better."""
    fast, rows = backend(q, z, m)
    best = _best(canonical_scores(q, z, rows), rows, min(k, m))
    return _pad(best, k, len(z)), fast.amin(1).double() + _rounding(q) >= best.scores[:, -1]


def _pad(found: Candidates, k: int, n: int) -> Candidates:
    missing = (0, k - found.rows.shape[1])
    return Candidates(F.pad(found.scores, missing, value=-torch.inf), F.pad(found.rows, missing, value=n))


def careful_search(q: Tensor, z: Tensor, k: int, at_least: Tensor | None = None) -> Candidates:
    """The result of `reference_search` in bounded memory: fp64 products discard most rows, the rest gets canonical scores.

    at_least [Q]: canonical scores that at least k rows reach.
    """
    wide = q.double()
    floor = wide.new_full((len(q),), -torch.inf) if at_least is None else at_least
    margin = 1.01 * q.shape[1] * 2.0**-52 * torch.linalg.vector_norm(wide, dim=1)
    found = _pad(Candidates(wide[:, :0], torch.zeros_like(wide[:, :0], dtype=torch.int64)), k, len(z))
    size = chunk_rows(z.device) // 4
    for first in range(0, len(z), size):
        chunk = z[first : first + size]
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
    """[n, D] -> bool [n]: rows with at least k equal rows before them. They are never neighbours.

    When features collapse, the whole bank is one tie. Scoring every copy for every query would take too long.
    """
    order = tree_sum(z.double()).argsort(stable=True)
    place = torch.arange(len(z), device=z.device)
    new = F.pad((z[order[1:]] != z[order[:-1]]).any(1), (1, 0), value=True)
    start = torch.where(new, place, 0).cummax(0).values
    return torch.zeros_like(new).scatter(0, order, place - start >= k)


class ExactSearch:
    """An exact backend with the interface that the bank uses. If most queries needed another look, later searches begin with
    it: the results are the same."""

    def __init__(self, name: str) -> None:
        self.name, self.backend, self.margins = name, BACKENDS[name], MARGINS

    def search(self, q: Tensor, z: Tensor, k: int) -> Candidates:
        looks: list[int] = []
        found = exact_search(q, z, k, self.backend, self.margins, looks)
        if len(self.margins) > 1 and 2 * sum(looks[1:2]) > len(q):
            self.margins = self.margins[1:]
        return found

    def changed(self, z: Tensor, rows: Tensor) -> None:
        """Nothing to do: exact backends read the bank directly."""


def available(device: torch.device) -> list[str]:
    """Exact backends for a bank on this device, those of Faiss last."""
    if not has_faiss():
        return ["torch"]
    if device.type == "cuda":
        return ["torch", "faiss-gpu", "faiss-gpu-index"] if has_gpu() else ["torch"]
    return ["torch", "faiss-cpu"]


def require_backend(name: str, device: torch.device) -> None:
    """Refuse a backend that cannot be used on this device."""
    if name.startswith("faiss-gpu") and (device.type != "cuda" or not has_gpu()):
        reason = "the bank is not on a GPU" if device.type != "cuda" else "this build of Faiss sees no GPU"
        raise UserError(f"bank.backend = {name!r}: {reason}; install faiss-gpu in place of faiss-cpu, or choose auto")
    if name == "faiss-cpu" and device.type == "cuda":
        raise UserError("bank.backend = 'faiss-cpu': the bank is on a GPU; choose faiss-gpu, torch or auto")
    if name.startswith("faiss"):
        load_faiss()


@dataclass(frozen=True)
class Choice:
    """The chosen backend, and the measurements."""

    name: str
    milliseconds: dict[str, float]
    wrong: tuple[str, ...]
    note: str = ""

    def __str__(self) -> str:
        times = ", ".join(f"{name} {ms:.1f} ms" for name, ms in self.milliseconds.items())
        wrong = f"; NOT USED, results differ from the reference: {', '.join(self.wrong)}" if self.wrong else ""
        inside = "; ".join(part for part in (self.note, times) if part) + wrong
        return f"{self.name} ({inside})" if inside else self.name


def choose_backend(
    queries: int, rows: int, dim: int, k: int, device: torch.device, only: str = "", repetitions: int = 3
) -> Choice:
    """Time the exact backends on random data of the real shapes (at most 262,144 rows) and check their results.

    `only`: those whose names begin like this; where there is none of them, torch searches. Ranks may choose differently: the
    results do not depend on the choice.
    """
    rows = min(rows, 1 << 18)
    generator = torch.Generator().manual_seed(0)  # its own: must not change the run's random numbers
    q = normalise(torch.randn(queries, dim, generator=generator)).to(device)
    z = normalise(torch.randn(rows, dim, generator=generator)).to(device)
    names = [name for name in available(device) if name.startswith(only)]
    milliseconds: dict[str, float] = {}
    wrong: list[str] = []
    if not names:
        why = "this build of Faiss sees no GPU" if has_faiss() else "Faiss is not installed"
        remedy = f"pip install 'ecgmatch-dist[{'gpu' if device.type == 'cuda' else 'cpu'}]'"
        log.warning("%s: torch searches the bank; the results are the same (%s)", why, remedy)
        return Choice("torch", {}, (), why)
    if names == ["torch"] or rows == 0:
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
    if not milliseconds and only:
        return Choice("torch", {}, tuple(wrong))
    assert milliseconds, f"no backend agrees with the reference: {wrong}"
    chosen = min(milliseconds, key=milliseconds.__getitem__)
    if chosen != "faiss-gpu-index":
        ResidentIndex.on_gpu.clear()  # frees its copy of the rows
    return Choice(chosen, milliseconds, tuple(wrong))


def _seconds(q: Tensor, z: Tensor, k: int, backend: Backend) -> float:
    start = time.perf_counter()
    exact_search(q, z, k, backend).rows[:, -1].sum().item()  # `item` waits for the device
    return time.perf_counter() - start
