"""The two memory banks (features and predictions of every unlabelled ECG), sharded over the ranks: write, then search.

Legend: N rows, D features, C classes, K neighbours, W ranks, b rows of the global batch per rank. A shard group of L
consecutive ranks holds one copy of the banks: a block of ceil(N/L) rows per rank. There are R = W/L copies. A replica group is
the R ranks that hold the same block. Bytes received per rank and step (`step_bytes`), independent of N:

    rows        (R-1) b (8 + 4D + 4C)                  all-gather over the replica group: teacher rows of the batch
    exchange    (L-1) [R b (8 + 4D + 4C) + 4 b D]      all-gather over the shard group: those rows, and the queries
    candidates  (L-1) b K (16 + 4C)                    all-to-all in the shard group: each block's K best rows per query
"""

import time
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ecgmatch_dist.bank.ivf import IVFSearch
from ecgmatch_dist.bank.search import Candidates, ExactSearch, best_order, choose_backend, normalise, require_backend
from ecgmatch_dist.bank.worker import Worker
from ecgmatch_dist.distributed.collectives import (
    Group,
    PendingCollective,
    all_gather,
    all_gather_async,
    all_sum_nograd,
    all_to_all,
    rank,
    world,
)
from ecgmatch_dist.errors import UserError, require

BackendName = Literal["faiss", "auto", "torch", "faiss-cpu", "faiss-gpu", "faiss-gpu-index", "faiss-ivf"]


class Neighbours(NamedTuple):
    """The K nearest rows of the bank for each query, best first; ties go to the lower row."""

    rows: Tensor  # int64 [b, K]
    scores: Tensor  # fp64 [b, K], inner products
    p: Tensor  # fp32 [b, K, C], their predictions


def resolve_shard_group(setting: int | Literal["auto", "world", "node"], ranks: int, ranks_per_node: int) -> int:
    """bank.shard_group -> L. auto and node: the ranks of one node."""
    if setting == "world":
        return ranks
    if setting in ("auto", "node"):
        return ranks_per_node
    return int(setting)


def step_bytes(batch: int, dim: int, classes: int, k: int, ranks: int, shard_group: int) -> dict[str, int]:
    """Bytes received per rank and step, by collective; `batch` is global."""
    share, copies, others = batch // ranks, ranks // shard_group, shard_group - 1
    row = 8 + 4 * dim + 4 * classes
    return {
        "bank/rows": (copies - 1) * share * row,
        "bank/exchange": others * (copies * share * row + 4 * share * dim),
        "bank/candidates": others * share * k * (16 + 4 * classes),
    }


@dataclass(frozen=True)
class Gathered:
    """A running all-gather over the shard group: of each rank the rows of its replica group [R, b, width], and its queries."""

    parts: PendingCollective  # int32 [L, R b width + b D]
    shape: torch.Size
    dim: int

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        self.parts.out.record_stream(stream)

    def wait(self) -> tuple[Tensor, Tensor]:
        """-> rows of all ranks [W b, width] in global batch order, queries of the shard group [L b, D]."""
        parts, count = self.parts.wait(), self.shape.numel()
        groups = parts[:, :count].reshape(len(parts), *self.shape)
        everyone = groups.transpose(0, 1).reshape(-1, self.shape[-1])  # rank = copy * L + place in the group
        return everyone, parts[:, count:].contiguous().view(torch.float32).view(-1, self.dim)


class PendingNeighbours:
    """A running exchange. `result` waits for the search, raises its error, if any, and exchanges the candidates. It is a
    collective: all ranks call it, at the same place in the order of their collectives."""

    def __init__(self, bank: "MemoryBank", gathered: "Gathered", found: "Future[Candidates]", seconds: float) -> None:
        self.bank, self.found, self.seconds = bank, found, seconds
        # The memory of a gather belongs to the caller's stream, which must not reuse it before it has waited for the search.
        self.gathered: Gathered | None = gathered
        self.neighbours: Neighbours | None = None

    def result(self) -> Neighbours:
        if self.neighbours is None:
            self.neighbours = self.bank._finish(self.found.result(), self.seconds)
            self.gathered = None
        return self.neighbours


class MemoryBank:
    """Plain tensors outside the model (DDP would overwrite buffers with those of rank 0). All ranks make the same calls.

    All collectives are issued by the caller's thread, in the order of its calls: the gathers in `exchange`, the all-to-all in
    `result`. NCCL needs one order on all ranks, and calls several threads on one device unsafe. With `overlap`, a background
    thread waits for the gathered rows, writes them and searches, on GPUs in a stream of its own. Get the result before the next
    call to the bank. The only host synchronisation is that of `exact_search`.
    """

    def __init__(
        self,
        rows: int,
        dim: int,
        classes: int,
        k: int,
        batch: int,
        shard_group: int = 1,
        backend: BackendName = "faiss",
        device: torch.device | str = "cpu",
        overlap: bool = True,
        timeout_minutes: float = 10.0,
        memory: float = 0.0,
    ) -> None:
        ranks = world()
        divisors = [n for n in range(1, ranks + 1) if ranks % n == 0]
        remedy = f"must divide the {ranks} ranks: one of {divisors}"
        require(shard_group in divisors, "bank.shard_group", shard_group, remedy)
        require(k <= rows, "method.neighbours", k, f"at most the {rows} unlabelled recordings in the bank")
        remedy = f"at most the {rows} unlabelled recordings in the bank, or some would be written twice in a step"
        require(batch <= rows, "optim.unlabelled_batch", batch, remedy)
        self.rows, self.dim, self.classes, self.k, self.memory = rows, dim, classes, k, memory
        self.shard_group, self.copies = shard_group, ranks // shard_group
        self.copy, place = divmod(rank(), shard_group)
        block = -(-rows // shard_group)
        self.start, self.stop = min(rows, place * block), min(rows, (place + 1) * block)
        self.length = self.stop - self.start
        # One spare row: rows of other blocks are written there, which avoids a mask and its host synchronisation.
        self.z = torch.zeros(self.length + 1, dim, device=device)
        self.device = self.z.device  # of "cuda" it has the number, which the background thread needs
        self.p = torch.zeros(self.length + 1, classes, device=self.device)
        self.written = torch.zeros(self.length + 1, dtype=torch.int64, device=self.device)
        self.within: Group = None
        self.across: Group = None
        if dist.is_initialized():
            # Each rank creates only its own two groups, not all W/L + L. That needs a default group without `device_id`.
            limit = timedelta(minutes=timeout_minutes)
            within = range(self.copy * shard_group, (self.copy + 1) * shard_group)
            local: dict[str, Any] = {"timeout": limit, "use_local_synchronization": True}
            self.within = dist.new_group(list(within), group_desc="bank/within", **local)
            across = range(place, ranks, shard_group)
            self.across = dist.new_group(list(across), group_desc="bank/across", **local)
        self.searcher, self._why = self._make_searcher(backend, batch // self.copies)
        self.worker = Worker(self.device) if overlap else None
        self.stream = torch.cuda.Stream(self.device) if overlap and self.device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._times = {"time/exchange": 0.0, "time/search": 0.0}

    def _make_searcher(self, backend: BackendName, queries: int) -> tuple[ExactSearch | IVFSearch, str]:
        # An environment variable can make fp32 products coarser; then half of the queries would be searched twice.
        torch.set_float32_matmul_precision("highest")
        if backend in ("auto", "faiss"):
            only = "faiss" if backend == "faiss" else ""
            choice = choose_backend(queries, self.length, self.dim, self.k, self.device, only)
            return ExactSearch(choice.name), str(choice)
        require_backend(backend, self.device)
        return (IVFSearch() if backend == "faiss-ivf" else ExactSearch(backend)), f"{backend} (as set)"

    @property
    def backend_name(self) -> str:
        """The backend that searches."""
        return self.searcher.name

    @property
    def is_first_replica(self) -> bool:
        """True on the ranks of the first copy, which save it."""
        return self.copy == 0

    def describe(self) -> str:
        """One line for the log."""
        size = (self.z.nbytes + self.p.nbytes + self.written.nbytes) / 2**20
        return (
            f"bank: {self.rows} rows, {self.copies} x {self.shard_group} blocks, {size:.1f} MiB per rank; "
            f"search by {self._why}, {'in the background' if self.worker else 'in the step'}"
        )

    @torch.no_grad()
    def exchange(self, ids: Tensor, z: Tensor, p: Tensor, queries: Tensor, step: int) -> PendingNeighbours:
        """ids [b], teacher's z [b, D] and p [b, C], queries [b, D] -> the queries' neighbours.

        The features of a row are replaced. Of its predictions, the share `memory` is kept (exponential average).
        The rows of all ranks are written before the search, and a query's own row is a candidate like any other. If an id
        occurs twice in the global batch, its last occurrence counts.
        """
        begin = time.perf_counter()
        gathered = self._gather(self._pack(ids, z, p), normalise(queries))
        seconds = time.perf_counter() - begin
        if self.worker is None:
            future: Future[Candidates] = Future()
            future.set_result(self._write_and_search(gathered, step))
            return PendingNeighbours(self, gathered, future, seconds)
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
            gathered.record_stream(self.stream)
        found = self.worker.submit(lambda: self._write_and_search(gathered, step))
        return PendingNeighbours(self, gathered, found, seconds)

    @torch.no_grad()
    def _write_and_search(self, gathered: "Gathered", step: int) -> Candidates:
        """The part without a collective of its own: it only waits for the gather."""
        streams: AbstractContextManager[object] = torch.cuda.stream(self.stream) if self.stream else nullcontext()
        begin = time.perf_counter()
        try:
            with streams:
                rows, queries = gathered.wait()
                self._write(rows, step, self.memory)
                middle = time.perf_counter()
                found = self.searcher.search(queries, self.z[: self.length], self.k)
        except RuntimeError as error:
            error.add_note(f"rank {rank()}: exchange of the memory bank at step {step}")
            raise
        self._times = {"time/exchange": middle - begin, "time/search": time.perf_counter() - middle}
        return found

    @torch.no_grad()
    def _finish(self, found: Candidates, seconds: float) -> Neighbours:
        begin = time.perf_counter()
        if self.stream is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_stream(self.stream)
            for tensor in found:
                tensor.record_stream(current)
        neighbours = self._collect(found)
        self._times["time/exchange"] += seconds + time.perf_counter() - begin
        return neighbours

    def _pack(self, ids: Tensor, z: Tensor, p: Tensor) -> Tensor:
        """-> int32 [b, 2 + D + C]: the bits of id, normalised features and predictions."""
        parts = ids.detach().to(torch.int64)[:, None], normalise(z), p.detach().float()
        return torch.cat([part.contiguous().view(torch.int32) for part in parts], 1)

    def _gather(self, rows: Tensor, queries: Tensor) -> "Gathered":
        """[b, width], [b, D] -> rows of all ranks [W b, width] in global batch order, queries of the shard group [L b, D].

        Two all-gathers: the rows over the replica group (between copies), then the result, with the queries, over the shard
        group. So each row is sent only once to each copy. The second one needs the first and is not waited for.
        """
        known = all_gather(rows, self.across, "bank/rows")  # [R, b, width]
        payload = torch.cat([known.reshape(-1), queries.view(torch.int32).view(-1)])
        return Gathered(all_gather_async(payload, self.within, "bank/exchange"), known.shape, self.dim)

    def _write(self, rows: Tensor, step: int, memory: float = 0.0) -> None:
        """Write rows [n, width] to this rank's block. Every occurrence of an id writes the values of the last one, so that the
        order of the writes does not matter."""
        ids = rows[:, :2].contiguous().view(torch.int64).squeeze(1)
        values = rows[:, 2:].view(torch.float32)
        ordered, order = ids.sort(stable=True)
        values = values[order[torch.searchsorted(ordered, ids, right=True) - 1]]
        place = torch.where((ids >= self.start) & (ids < self.stop), ids - self.start, self.length)
        z, p = values[:, : self.dim], values[:, self.dim :]
        self.z.index_copy_(0, place, z)
        self.p.index_copy_(0, place, torch.lerp(p, self.p[place], memory) if memory else p)
        self.written.index_fill_(0, place, step)
        self.searcher.changed(self.z[: self.length], place)

    def _collect(self, found: Candidates) -> Neighbours:
        """K best rows of this block for the queries of the shard group [L b, K] -> K best rows of all blocks for this
        rank's queries [b, K]."""
        parts = found.scores[..., None], (found.rows + self.start)[..., None], self.p[found.rows]
        payload = torch.cat([part.view(torch.int32) for part in parts], 2)
        got = all_to_all(payload, self.within, "bank/candidates")
        got = got.view(self.shard_group, -1, self.k, got.shape[2]).transpose(0, 1).flatten(1, 2)  # [b, L K, 4 + C]
        scores = got[..., :2].contiguous().view(torch.float64).squeeze(2)
        rows = got[..., 2:4].contiguous().view(torch.int64).squeeze(2)
        p = got[..., 4:].view(torch.float32)
        order = best_order(scores, rows, self.k)
        chosen = p.gather(1, order[..., None].expand(-1, -1, self.classes))
        return Neighbours(rows.gather(1, order), scores.gather(1, order), chosen)

    @torch.no_grad()
    def fill(self, ids: Tensor, z: Tensor, p: Tensor, step: int = 0) -> None:
        """Write rows without a search. The number of rows may differ per rank; id -1 marks padding."""
        rows = self._pack(ids, z, p)
        counts = torch.tensor([len(rows)], device=self.device)
        most = int(all_gather(all_gather(counts, self.across, "bank/fill"), self.within, "bank/fill").max())
        # Id -1 is all ones, as int32 -1 is. Padding rows are written to the spare row.
        rows = F.pad(rows, (0, 0, 0, most - len(rows)), value=-1)
        everyone, _ = self._gather(rows, torch.zeros(0, self.dim, device=self.device)).wait()
        self._write(everyone, step)

    def state(self) -> dict[str, Tensor]:
        """This rank's block, rows [start, stop): features, predictions, step of the last write. Views, not copies."""
        return {name: getattr(self, name)[: self.length] for name in ("z", "p", "written")}

    @torch.no_grad()
    def load(self, tensors: dict[str, Tensor]) -> None:
        """Load a block from `state`, or re-sharded from a checkpoint of another number of ranks."""
        for name, own in self.state().items():
            saved = tensors[name]
            if saved.shape != own.shape:
                raise UserError(f"saved bank: {name} has shape {list(saved.shape)}, this run needs {list(own.shape)}")
            own.copy_(saved)
        self.searcher.changed(self.z[: self.length], torch.arange(self.length, device=self.device))

    def age(self, step: int) -> float:
        """Mean number of steps since a row was written. A collective over the shard group."""
        total = (step - self.written[: self.length]).sum()
        return int(all_sum_nograd(total, self.within, "bank/age")) / self.rows

    def times(self) -> dict[str, float]:
        """Seconds of the latest step. On a GPU, the search includes the wait for work queued before it."""
        return self._times
