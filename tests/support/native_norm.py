"""The kernels of torch's SyncBatchNorm, which only GPUs have, written out for CPU tensors, and as shapes for `meta`."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.library import Library


def stats(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    rows = x.transpose(0, 1).flatten(1).to(torch.promote_types(x.dtype, torch.float32))
    return rows.mean(1), (rows.var(1, correction=0) + eps).rsqrt()


def gather(
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    """Rank after rank, as batch_norm_reduce_statistics_kernel does."""
    n = counts.new_zeros(())
    average, squares = torch.zeros_like(mean[0]), torch.zeros_like(mean[0])
    for m, s, count in zip(mean, invstd, counts, strict=True):
        factor = 1 / (n + count)
        squares = squares + (1 / s**2 - eps) * count + (average - m) ** 2 * n * count * factor
        average = n * factor * average + count * factor * m
        n = n + count
    running_mean.copy_((1 - momentum) * running_mean + momentum * average)
    running_var.copy_((1 - momentum) * running_var + momentum * squares / (n - 1))
    return average, (squares / n + eps).rsqrt()


def column(t: Tensor, x: Tensor) -> Tensor:
    return t.view(1, -1, *[1] * (x.dim() - 2))


def normalised(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, invstd: Tensor, eps: float) -> Tensor:
    return ((x - column(mean, x)) * column(invstd * weight, x) + column(bias, x)).to(x.dtype)


def reduce(
    grad: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor, *_: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    wide = torch.promote_types(x.dtype, torch.float32)
    others = [d for d in range(x.dim()) if d != 1]
    dy = grad.to(wide).sum(others)
    dy_xmu = (grad.to(wide) * (x.to(wide) - column(mean, x))).sum(others)
    return dy, dy_xmu, (dy_xmu * invstd).to(weight.dtype), dy.to(weight.dtype)


def backward(
    grad: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor, dy: Tensor, dy_xmu: Tensor, counts: Tensor
) -> Tensor:
    n = counts.sum()
    inner = grad - column(dy / n, x) - (x - column(mean, x)) * column(invstd**2 * dy_xmu / n, x)
    return (inner * column(invstd * weight, x)).to(x.dtype)


KERNELS = {
    "batch_norm_stats": stats,
    "batch_norm_gather_stats_with_counts": gather,
    "batch_norm_elemt": normalised,
    "batch_norm_backward_reduce": reduce,
    "batch_norm_backward_elemt": backward,
}
SHAPES = {
    "batch_norm_update_stats": lambda x, mean, *_: (
        torch.empty_like(mean),
        torch.empty_like(mean),
    ),  # of the plain path
    "batch_norm_stats": lambda x, *_: (x.new_empty(x.shape[1]).float(), x.new_empty(x.shape[1]).float()),
    "batch_norm_gather_stats_with_counts": lambda x, mean, *_: (mean.new_empty(mean.shape[1]),) * 2,
    "batch_norm_elemt": lambda x, *_: torch.empty_like(x),
    "batch_norm_backward_reduce": lambda grad, x, mean, *_: tuple(torch.empty_like(mean) for _ in range(4)),
    "batch_norm_backward_elemt": lambda grad, x, *_: torch.empty_like(x),
}


@contextmanager
def kernels(device: str) -> Iterator[None]:
    """Inside, torch has these kernels on "CPU" or "Meta"."""
    library = Library("aten", "IMPL")
    for name, kernel in (KERNELS if device == "CPU" else SHAPES).items():
        library.impl(name, kernel, device)
    try:
        yield
    finally:
        library._destroy()
