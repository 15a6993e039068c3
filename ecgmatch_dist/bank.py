"""The two memory banks, features and predictions of every unlabelled ECG, dealt over ranks: write, then search.

Legend: N rows, D features, C classes, K neighbours, W ranks, b a rank's share of the global batch. L consecutive ranks,
a shard group, hold one copy: each a block of ceil(N/L) rows. R = W/L copies; a replica group is the ranks with the same
block. A step moves (bytes a rank receives, `step_bytes`) nothing that depends on N:

    rows        (R-1) b (8 + 4D + 4C)                  all-gather over the replica group: the batch's teacher rows
    exchange    (L-1) [R b (8 + 4D + 4C) + 4 b D]      all-gather over the shard group: those rows, and the queries
    candidates  (L-1) b K (16 + 4C)                    all-to-all in the shard group: each block's K best for its asker
"""

import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from queue import SimpleQueue
from threading import Thread
from typing import Literal, NamedTuple
from weakref import finalize

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ecgmatch_dist.config import require
from ecgmatch_dist.distributed import Group, all_gather, all_sum_nograd, all_to_all, rank, world
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.ivf import IVFSearch
from ecgmatch_dist.search import Candidates, ExactSearch, best_order, choose_backend, normalise, require_backend

BackendName = Literal["auto", "torch", "faiss-cpu", "faiss-gpu", "faiss-ivf"]


class Neighbours(NamedTuple):
    """The K bank entries nearest to each query, best first; ties go to the lower row."""

    rows: Tensor  # int64 [b, K]
    scores: Tensor  # fp64 [b, K], inner products
    p: Tensor  # fp32 [b, K, C], their predictions


def resolve_shard_group(setting: int | Literal["auto", "world", "node"], ranks: int, ranks_per_node: int) -> int:
    """bank.shard_group -> L. auto: all ranks of one node, or a node's ranks where there are several."""
    if setting == "world":
        return ranks
    if setting in ("auto", "node"):
        return ranks_per_node
    return int(setting)


def step_bytes(batch: int, dim: int, classes: int, k: int, ranks: int, shard_group: int) -> dict[str, int]:
    """Bytes that a rank receives in a step, by collective; `batch` is global."""
    share, copies, others = batch // ranks, ranks // shard_group, shard_group - 1
    row = 8 + 4 * dim + 4 * classes
    return {
        "bank/rows": (copies - 1) * share * row,
        "bank/exchange": others * (copies * share * row + 4 * share * dim),
        "bank/candidates": others * share * k * (16 + 4 * classes),
    }


class Worker:
    """One background thread; a daemon, so that a rank that must end does not wait for a collective that never will."""

    def __init__(self) -> None:
        self.tasks: SimpleQueue[tuple[Future[Neighbours], Callable[[], Neighbours]] | None] = SimpleQueue()
        Thread(target=self._run, args=(self.tasks,), name="bank", daemon=True).start()
        finalize(self, self.tasks.put, None)

    @staticmethod
    def _run(tasks: "SimpleQueue[tuple[Future[Neighbours], Callable[[], Neighbours]] | None]") -> None:
        while task := tasks.get():
            future, work = task
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)
            del task, future, work  # nothing of a step may outlive it here

    def submit(self, work: Callable[[], Neighbours]) -> "Future[Neighbours]":
        future: Future[Neighbours] = Future()
        self.tasks.put((future, work))
        return future


class Pending:
    """An exchange under way; `result` waits for it, and raises what went wrong in it."""

    def __init__(self, future: "Future[Neighbours]", stream: torch.cuda.Stream | None) -> None:
        self.future, self.stream = future, stream

    def result(self) -> Neighbours:
        neighbours = self.future.result()
        if self.stream is not None:
            current = torch.cuda.current_stream(self.stream.device)
            current.wait_stream(self.stream)
            for tensor in neighbours:
                tensor.record_stream(current)
        return neighbours


class MemoryBank:
    """Plain tensors outside the model (DDP would broadcast buffers over the blocks). All ranks call it alike.

    With `overlap` the exchange and the search run in a thread of their own, on process groups of their own and on GPUs
    on a stream of their own, while the caller computes; ask for the result before anything else is asked of the bank.
    The only host synchronisation is the one of `exact_search`.
    """

    def __init__(
        self,
        rows: int,
        dim: int,
        classes: int,
        k: int,
        batch: int,
        shard_group: int = 1,
        backend: BackendName = "auto",
        device: torch.device | str = "cpu",
        overlap: bool = True,
        timeout_minutes: float = 10.0,
        memory: float = 0.0,
    ) -> None:
        ranks = world()
        fits = [n for n in range(1, ranks + 1) if ranks % n == 0]
        require(shard_group in fits, "bank.shard_group", shard_group, f"must divide the {ranks} ranks: one of {fits}")
        require(k <= rows, "method.neighbours", k, f"at most the {rows} unlabelled recordings in the bank")
        remedy = f"at most the {rows} unlabelled recordings in the bank, or some would be written twice in a step"
        require(batch <= rows, "optim.unlabelled_batch", batch, remedy)
        self.rows, self.dim, self.classes, self.k, self.memory = rows, dim, classes, k, memory
        self.shard_group, self.copies = shard_group, ranks // shard_group
        self.copy, place = divmod(rank(), shard_group)
        block = -(-rows // shard_group)
        self.start, self.stop = min(rows, place * block), min(rows, (place + 1) * block)
        self.length = self.stop - self.start
        self.device = torch.device(device)
        # One row more than the block: rows of other blocks are written there, so that no mask has to be read.
        self.z = torch.zeros(self.length + 1, dim, device=self.device)
        self.p = torch.zeros(self.length + 1, classes, device=self.device)
        self.written = torch.zeros(self.length + 1, dtype=torch.int64, device=self.device)
        self.within: Group = None
        self.across: Group = None
        if dist.is_initialized():
            # Each rank makes its own two groups, not all W/L + L of them; that needs a default group without `device_id`.
            limit = timedelta(minutes=timeout_minutes)
            within = range(self.copy * shard_group, (self.copy + 1) * shard_group)
            self.within = dist.new_group(list(within), timeout=limit, use_local_synchronization=True)
            across = range(place, ranks, shard_group)
            self.across = dist.new_group(list(across), timeout=limit, use_local_synchronization=True)
        self.searcher, self._why = self._make_searcher(backend, batch // self.copies)
        self.worker = Worker() if overlap else None
        self.stream = torch.cuda.Stream(self.device) if overlap and self.device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._times = {"time/exchange": 0.0, "time/search": 0.0}

    def _make_searcher(self, backend: BackendName, queries: int) -> tuple[ExactSearch | IVFSearch, str]:
        if backend == "auto":
            choice = choose_backend(queries, self.length, self.dim, self.k, self.device)
            return ExactSearch(choice.name), str(choice)
        require_backend(backend, self.device)
        return (IVFSearch() if backend == "faiss-ivf" else ExactSearch(backend)), f"{backend} (as set)"

    @property
    def backend_name(self) -> str:
        """Who searches."""
        return self.searcher.name

    @property
    def is_first_replica(self) -> bool:
        """True on the ranks that together hold the first copy: those that save it."""
        return self.copy == 0

    def describe(self) -> str:
        """One line for the log."""
        size = (self.z.nbytes + self.p.nbytes + self.written.nbytes) / 2**20
        return (
            f"bank: {self.rows} rows, {self.copies} x {self.shard_group} blocks, {size:.1f} MiB a rank; "
            f"search by {self._why}; exchange {'behind the forward' if self.worker else 'in the step'}"
        )

    @torch.no_grad()
    def exchange(self, ids: Tensor, z: Tensor, p: Tensor, queries: Tensor, step: int) -> Pending:
        """ids [b], teacher's z [b, D] and p [b, C], queries [b, D] -> the queries' neighbours.

        A row's features are replaced; of its predictions, `memory` is the share that stays.
        The rows of all ranks are written before any is searched; a query's own row is a candidate like any other. If an
        id occurs twice in the global batch, its last occurrence counts.
        """
        rows, queries = self._pack(ids, z, p), normalise(queries)
        if self.worker is None:
            future: Future[Neighbours] = Future()
            future.set_result(self._step(rows, queries, step))
            return Pending(future, None)
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
            rows.record_stream(self.stream)
            queries.record_stream(self.stream)
        return Pending(self.worker.submit(lambda: self._step(rows, queries, step)), self.stream)

    @torch.no_grad()
    def _step(self, rows: Tensor, queries: Tensor, step: int) -> Neighbours:
        streams: AbstractContextManager[object] = torch.cuda.stream(self.stream) if self.stream else nullcontext()
        begin = time.perf_counter()
        try:
            with streams:
                rows, queries = self._spread(rows, queries)
                self._write(rows, step, self.memory)
                middle = time.perf_counter()
                found = self.searcher.search(queries, self.z[: self.length], self.k)
                searched = time.perf_counter()
                neighbours = self._collect(found)
        except RuntimeError as error:
            error.add_note(f"rank {rank()}: exchange of the memory bank at step {step}")
            raise
        self._times = {
            "time/exchange": time.perf_counter() - begin - (searched - middle),
            "time/search": searched - middle,
        }
        return neighbours

    def _pack(self, ids: Tensor, z: Tensor, p: Tensor) -> Tensor:
        """-> int32 [b, 2 + D + C], the bits of id, normalised features and predictions side by side."""
        parts = ids.detach().to(torch.int64)[:, None], normalise(z), p.detach().float()
        return torch.cat([part.contiguous().view(torch.int32) for part in parts], 1)

    def _spread(self, rows: Tensor, queries: Tensor) -> tuple[Tensor, Tensor]:
        """[b, width], [b, D] -> all rows [W b, width] in the order of the global batch, the group's queries [L b, D].

        Rows travel between copies once, to one rank a copy, which passes them on in its group, with its queries.
        """
        known = all_gather(rows, self.across, "bank/rows")  # [R, b, width]
        payload = torch.cat([known.reshape(-1), queries.view(torch.int32).view(-1)])
        parts = all_gather(payload, self.within, "bank/exchange")  # [L, R b width + b D]
        groups = parts[:, : known.numel()].reshape(self.shard_group, *known.shape)
        everyone = groups.transpose(0, 1).reshape(-1, rows.shape[1])  # ranks count inside a group first
        return everyone, parts[:, known.numel() :].contiguous().view(torch.float32).view(-1, self.dim)

    def _write(self, rows: Tensor, step: int, memory: float = 0.0) -> None:
        """[n, width] -> this rank's block. All occurrences of an id write the values of its last, in whatever order."""
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
        """This block's K best rows for the group's queries [L b, K] -> the K best of all blocks for this rank's."""
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
        """Write rows without a search. Ranks may bring different numbers of rows; id -1 marks padding."""
        rows = self._pack(ids, z, p)
        counts = torch.tensor([len(rows)], device=self.device)
        most = int(all_gather(all_gather(counts, self.across, "bank/fill"), self.within, "bank/fill").max())
        # The bits of id -1 are ones; what else such a row holds goes nowhere.
        rows = F.pad(rows, (0, 0, 0, most - len(rows)), value=-1)
        everyone, _ = self._spread(rows, torch.zeros(0, self.dim, device=self.device))
        self._write(everyone, step)

    def state(self) -> dict[str, Tensor]:
        """This rank's block, rows [start, stop): features, predictions, step of the last write. Not copies."""
        return {name: getattr(self, name)[: self.length] for name in ("z", "p", "written")}

    @torch.no_grad()
    def load(self, tensors: dict[str, Tensor]) -> None:
        """Take over a block that `state` gave, or that was dealt anew from what other numbers of ranks saved."""
        for name, own in self.state().items():
            saved = tensors[name]
            if saved.shape != own.shape:
                raise UserError(f"saved bank: {name} has shape {list(saved.shape)}, this run needs {list(own.shape)}")
            own.copy_(saved)
        self.searcher.changed(self.z[: self.length], torch.arange(self.length, device=self.device))

    def age(self, step: int) -> float:
        """Mean number of steps since a row was written. A collective: all ranks of a shard group call it."""
        total = (step - self.written[: self.length]).sum()
        return int(all_sum_nograd(total, self.within, "bank/age")) / self.rows

    def times(self) -> dict[str, float]:
        """Seconds of the latest step; on a GPU the search includes waiting for what was queued before it."""
        return self._times
