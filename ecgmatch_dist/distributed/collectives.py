"""Collectives that count their bytes, gathers of rows, and a differentiable sum over ranks.

Without a process group (one process) every function here is the identity or a local operation. `group` None means all
ranks. W is the number of ranks in the group. All ranks of a group must call the same functions in the same order.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ecgmatch_dist.distributed.whereabouts import during

Group = dist.ProcessGroup | None


# torch 2.13 renamed it and warns about the old name.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def rank(group: Group = None) -> int:
    """This rank's number in the group."""
    return dist.get_rank(group) if dist.is_initialized() else 0


def world(group: Group = None) -> int:
    """W, the number of ranks in the group."""
    return dist.get_world_size(group) if dist.is_initialized() else 1


def barrier() -> None:
    """Wait for all ranks."""
    if world() > 1:
        with during("barrier"):
            dist.barrier()


@dataclass
class Traffic:
    """Bytes received per rank, by collective. Sums count as a ring all-reduce. (Keyed by rank: in tests, ranks are threads.)"""

    counts: dict[int, Counter[str]] = field(default_factory=dict)

    def add(self, name: str, count: int) -> None:
        self.counts.setdefault(rank(), Counter())[name] += count

    def received(self) -> dict[str, int]:
        """Collective -> bytes that this rank received since `reset`."""
        return dict(self.counts.get(rank(), {}))

    def reset(self) -> None:
        self.counts.pop(rank(), None)


traffic = Traffic()


@dataclass(frozen=True)
class PendingCollective:
    """A running collective; `wait` returns its result."""

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
    """[...] -> uint8 [n]: gloo does not support some types, and bytes arrive unchanged."""
    return t.detach().contiguous().reshape(-1).view(torch.uint8)


def all_gather_async(t: Tensor, group: Group = None, name: str = "all_gather") -> PendingCollective:
    """Start `all_gather`."""
    w = world(group)
    if w == 1 or t.numel() == 0:
        return PendingCollective(t.detach().expand(w, *t.shape))
    payload = _as_bytes(t)
    out = payload.new_empty(w * payload.numel())
    with during(name):
        work = _all_gather_single(out, payload, group=group, async_op=True)
    traffic.add(name, (w - 1) * payload.numel())
    return PendingCollective(out, work, lambda out: out.view(t.dtype).view(w, *t.shape), name)


def all_gather(t: Tensor, group: Group = None, name: str = "all_gather") -> Tensor:
    """[...] of equal shape on every rank -> [W, ...] in rank order. Any type; no gradient."""
    return all_gather_async(t, group, name).wait()


def all_to_all_async(t: Tensor, group: Group = None, name: str = "all_to_all") -> PendingCollective:
    """Start `all_to_all`."""
    w = world(group)
    assert t.shape[0] % w == 0, f"{t.shape[0]} rows do not split over {w} ranks"
    if w == 1 or t.numel() == 0:
        return PendingCollective(t.detach())
    payload = _as_bytes(t)
    out = torch.empty_like(payload)
    with during(name):
        work = dist.all_to_all_single(out, payload, group=group, async_op=True)
    traffic.add(name, payload.numel() * (w - 1) // w)
    return PendingCollective(out, work, lambda out: out.view(t.dtype).view(t.shape), name)


def all_to_all(t: Tensor, group: Group = None, name: str = "all_to_all") -> Tensor:
    """[W * n, ...] -> the same shape: block i goes to rank i, block i of the result came from rank i. No gradient."""
    return all_to_all_async(t, group, name).wait()


def gather_rows(t: Tensor, group: Group = None, name: str = "gather_rows") -> Tensor:
    """[n, ...] of equal shape on every rank -> [W * n, ...] in rank order. No gradient."""
    return all_gather(t, group, name).flatten(0, 1)


class _GatherRows(torch.autograd.Function):
    """Every rank's loss depends on every rank's rows, so the gradients of a row are summed over ranks."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, group: Group, name: str) -> Tensor:
        ctx.group, ctx.name, ctx.rows = group, name, len(t)
        return gather_rows(t, group, name)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        first = rank(ctx.group) * ctx.rows
        return all_sum_nograd(grad, ctx.group, ctx.name)[first : first + ctx.rows], None, None


def gather_rows_with_gradient(t: Tensor, group: Group = None, name: str = "gather_rows") -> Tensor:
    """`gather_rows`, differentiable: exact when DDP averages the gradients and each rank's loss is a mean over its own rows."""
    return t if world(group) == 1 else _GatherRows.apply(t, group, name)  # type: ignore[no-untyped-call]


def gather_uneven(t: Tensor, group: Group = None, name: str = "gather_uneven") -> Tensor:
    """[n_r, ...] with any n_r >= 0 per rank -> [sum of n_r, ...] in rank order. Synchronises with the host (sizes)."""
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


def from_rank_0(t: Tensor, name: str = "from_rank_0") -> Tensor:
    """[...] of equal shape on every rank -> rank 0's. For what machines may round differently. No gradient."""
    if world() == 1:
        return t.detach()
    out = t.detach().clone(memory_format=torch.contiguous_format)
    with during(name):
        dist.broadcast(out, src=0)
    traffic.add(name, out.nbytes)
    return out


class _AllSum(torch.autograd.Function):
    """The loss of every rank depends on the terms of all ranks, so the backward sums over ranks, too."""

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
