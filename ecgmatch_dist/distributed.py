"""Ranks: process group, counted gathers, a differentiable sum.

Without a process group (one process) every function here is the identity or a local operation. `group` None means all
ranks. W is the number of ranks of the group. All ranks of a group must call the same functions in the same order.
"""

import inspect
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore
from torch.autograd.function import once_differentiable
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from ecgmatch_dist.errors import UserError
from ecgmatch_dist.watchdog import during

Group = dist.ProcessGroup | None

# torch 2.13 renamed it, and warns about the old name.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_timeout: timedelta | None = None  # of this session's groups; torch's own is half an hour


@dataclass(frozen=True)
class Ranks:
    """Where this process stands among the others."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    device: torch.device

    @property
    def main(self) -> bool:
        """True on the one rank that writes logs and files."""
        return self.rank == 0


def rank(group: Group = None) -> int:
    """Number of this rank in the group."""
    return dist.get_rank(group) if dist.is_initialized() else 0


def world(group: Group = None) -> int:
    """W, the number of ranks in the group."""
    return dist.get_world_size(group) if dist.is_initialized() else 1


def barrier() -> None:
    """Wait until all ranks are here."""
    if world() > 1:
        with during("barrier"):
            dist.barrier()


def _environment() -> tuple[int, int, int, int]:
    """RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE as torchrun sets them; (0, 1, 0, 1) where none is set."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    texts = [os.environ.get(name) for name in names]
    if not any(texts[:2]):
        return 0, 1, 0, 1
    for name, text in zip(names, texts, strict=True):
        if text is None or not text.isdecimal():
            raise UserError(f"environment variable {name} = {text!r}: start the ranks with torchrun, which sets it")
    r, w, local, local_world = (int(text or 0) for text in texts)
    if not (r < w and local < local_world <= w):
        raise UserError(f"environment {dict(zip(names, texts, strict=True))}: a rank must be less than its world size")
    return r, w, local, local_world


def pick_device(wanted: Literal["auto", "cpu", "cuda"], local_rank: int) -> torch.device:
    """This rank's device. A launcher may show each rank only its own GPU, which then has number 0."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if count == 0:
        raise UserError("runtime.device = 'cuda': torch sees no GPU here; choose cpu or auto")
    if count > 1 and local_rank >= count:
        raise UserError(f"local rank {local_rank}, but {count} GPUs on this node: start at most {count} ranks a node")
    return torch.device("cuda", local_rank if count > 1 else 0)


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """A copy on the device, through pinned memory: from any other the host would wait for what the GPU still has to do."""
    t = torch.from_numpy(array)
    return (t.pin_memory() if device.type == "cuda" else t).to(device, non_blocking=True)


@contextmanager
def session(device: Literal["auto", "cpu", "cuda"] = "auto", timeout_minutes: float = 10.0) -> Iterator[Ranks]:
    """The ranks torchrun started (gloo on CPU, NCCL on GPUs), or this process alone; a group made here is closed here.

    A collective that waits longer than the timeout raises an error instead of hanging.
    """
    if dist.is_initialized():
        r, w = dist.get_rank(), dist.get_world_size()
        local, local_world = _environment()[2:] if "LOCAL_RANK" in os.environ else (r, w)
        yield Ranks(r, w, local, local_world, pick_device(device, local))
        return
    r, w, local, local_world = _environment()
    ranks = Ranks(r, w, local, local_world, pick_device(device, local))
    if ranks.device.type == "cuda":
        torch.cuda.set_device(ranks.device)
    if "RANK" not in os.environ:
        yield ranks
        return
    global _timeout
    _timeout = timedelta(minutes=timeout_minutes)
    backend = "cpu:gloo,cuda:nccl" if ranks.device.type == "cuda" else "gloo"
    try:
        store, _, _ = next(rendezvous("env://", r, w, timeout=_timeout))
        # torchrun keeps its store across restarts: under the same names, a rank would find the addresses of dead ones.
        store = PrefixStore(f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
        dist.init_process_group(backend, store=store, rank=r, world_size=w, timeout=_timeout)
    except (dist.DistError, ValueError) as error:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        reason = str(error).splitlines()[0]
        raise UserError(
            f"rank {r} of {w} does not reach the others at {where} (MASTER_ADDR, _PORT): {reason}"
        ) from error
    try:
        yield ranks
    finally:
        dist.destroy_process_group()


def group_beside() -> Group:
    """A gloo group of all ranks with the session's timeout, for what meets behind the step and on the host."""
    return dist.new_group(backend="gloo", timeout=_timeout) if world() > 1 else None


@dataclass
class Traffic:
    """Bytes that each rank received, by collective; a ring's share is counted for sums."""

    counts: dict[int, Counter[str]] = field(default_factory=dict)

    def add(self, name: str, count: int) -> None:
        self.counts.setdefault(rank(), Counter())[name] += count

    def received(self) -> dict[str, int]:
        """Name of the collective -> bytes this rank received since `reset`."""
        return dict(self.counts.get(rank(), {}))

    def reset(self) -> None:
        self.counts.pop(rank(), None)


traffic = Traffic()


@dataclass(frozen=True)
class Pending:
    """A collective under way; `wait` gives its result."""

    out: Tensor
    work: dist.Work | None = None
    finish: Callable[[Tensor], Tensor] = lambda out: out
    name: str = ""

    def wait(self) -> Tensor:
        if self.work is not None:
            with during(self.name):
                self.work.wait()
        return self.finish(self.out)


def _as_bytes(t: Tensor) -> Tensor:
    """[...] -> uint8 [n]: gloo refuses some types, and bytes arrive as they were sent."""
    return t.detach().contiguous().reshape(-1).view(torch.uint8)


def all_gather_async(t: Tensor, group: Group = None, name: str = "all_gather") -> Pending:
    """Start `all_gather`."""
    w = world(group)
    if w == 1 or t.numel() == 0:
        return Pending(t.detach().expand(w, *t.shape))
    payload = _as_bytes(t)
    out = payload.new_empty(w * payload.numel())
    with during(name):
        work = _all_gather_single(out, payload, group=group, async_op=True)
    traffic.add(name, (w - 1) * payload.numel())
    return Pending(out, work, lambda out: out.view(t.dtype).view(w, *t.shape), name)


def all_gather(t: Tensor, group: Group = None, name: str = "all_gather") -> Tensor:
    """[...] of equal shape on every rank -> [W, ...] in rank order. Any type; no gradient."""
    return all_gather_async(t, group, name).wait()


def all_to_all_async(t: Tensor, group: Group = None, name: str = "all_to_all") -> Pending:
    """Start `all_to_all`."""
    w = world(group)
    assert t.shape[0] % w == 0, f"{t.shape[0]} rows do not split over {w} ranks"
    if w == 1 or t.numel() == 0:
        return Pending(t.detach())
    payload = _as_bytes(t)
    out = torch.empty_like(payload)
    with during(name):
        work = dist.all_to_all_single(out, payload, group=group, async_op=True)
    traffic.add(name, payload.numel() * (w - 1) // w)
    return Pending(out, work, lambda out: out.view(t.dtype).view(t.shape), name)


def all_to_all(t: Tensor, group: Group = None, name: str = "all_to_all") -> Tensor:
    """[W * n, ...] -> the same shape: block i goes to rank i, block i of the result came from rank i. No gradient."""
    return all_to_all_async(t, group, name).wait()


def gather_rows(t: Tensor, group: Group = None, name: str = "gather_rows") -> Tensor:
    """[n, ...] of equal shape on every rank -> [W * n, ...] in rank order. No gradient."""
    return all_gather(t, group, name).flatten(0, 1)


def gather_uneven(t: Tensor, group: Group = None, name: str = "gather_uneven") -> Tensor:
    """[n_r, ...], n_r >= 0 different on every rank -> [sum of n_r, ...] in rank order. Reads sizes on the host."""
    if world(group) == 1:
        return t.detach()
    sizes = all_gather(torch.tensor(t.shape[0], device=t.device), group, name).tolist()
    padded = F.pad(t.detach(), [0, 0] * (t.dim() - 1) + [0, max(sizes) - t.shape[0]])
    return torch.cat([rows[:n] for rows, n in zip(all_gather(padded, group, name), sizes, strict=True)])


def all_sum_nograd(t: Tensor, group: Group = None, name: str = "all_sum") -> Tensor:
    """[...] -> its sum over ranks, the same bits on every rank. No gradient."""
    w = world(group)
    if w == 1:
        return t.detach()
    out = t.detach().clone(memory_format=torch.contiguous_format)
    with during(name):
        dist.all_reduce(out, group=group)
    traffic.add(name, 2 * (w - 1) * out.nbytes // w)
    return out


class _AllSum(torch.autograd.Function):
    """Every rank's loss depends on every rank's term, so that the gradients are summed over ranks, too."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, group: Group, name: str) -> Tensor:
        ctx.group, ctx.name = group, name
        return all_sum_nograd(t, group, name)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return all_sum_nograd(grad, ctx.group, ctx.name), None, None


def all_sum(t: Tensor, group: Group = None, name: str = "all_sum") -> Tensor:
    """[...] -> its sum over ranks, differentiable: exact when DDP averages the gradients of the ranks' equal losses.

    The backward sums W equal gradients and DDP divides by W. A plain all_reduce would leave 1/W of the gradient.
    """
    return t if world(group) == 1 else _AllSum.apply(t, group, name)  # type: ignore[no-untyped-call]


def data_parallel(model: nn.Module, sync_buffers: bool = False) -> nn.Module:
    """The model under DDP, which averages gradients over ranks; itself where there is one rank.

    `sync_buffers` takes rank 0's BatchNorm statistics at each forward: needed with local BatchNorm only, the global one
    keeps them equal.
    """
    if world() == 1:
        return model
    renamed = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters  # torch 2.13
    switch: dict[str, Any] = {"forward_sync_buffers" if renamed else "broadcast_buffers": sync_buffers}
    return DistributedDataParallel(model, gradient_as_bucket_view=True, **switch)
