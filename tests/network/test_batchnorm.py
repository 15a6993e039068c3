"""BatchNorm over ranks: what a GPU runs, with its kernels written out, against the plain path, against one rank, on `meta`."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from ecgmatch_dist.distributed.collectives import traffic
from ecgmatch_dist.network import batchnorm
from ecgmatch_dist.network.batchnorm import GlobalBatchNorm
from tests.support.native_norm import kernels
from tests.support.ranks import run_threads

C = 6


@pytest.fixture
def gpu_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The path of GPUs on this device."""
    monkeypatch.setattr(batchnorm, "has_kernels", lambda device: True)
    with kernels("CPU"), kernels("Meta"):
        yield


def passes(norm: nn.Module, x: Tensor, grad: Tensor) -> dict[str, Tensor]:
    """Two training passes: output, gradients and buffers."""
    x = x.clone().requires_grad_()
    norm(x)
    out = norm(x)
    out.backward(grad)
    assert x.grad is not None
    return {
        "out": out.detach(),
        "x": x.grad,
        **{n: p.grad for n, p in norm.named_parameters()},
        **dict(norm.named_buffers()),
    }


def on_rank(rank: int, world: int, shares: list[int], x: Tensor, grad: Tensor) -> dict[str, Tensor]:
    first = sum(shares[:rank])
    own = slice(first, first + shares[rank])
    return passes(made(GlobalBatchNorm(C).to(x.dtype)), x[own], grad[own])


def made(norm: Any) -> Any:
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(0.5, 2, C))
        norm.bias.copy_(torch.linspace(-1, 1, C))
    return norm


@pytest.mark.parametrize("shares", [[4, 4, 4, 4], [0, 5, 0, 11], [16, 0, 0, 0]], ids=str)
def test_gpu_path_is_one_rank_s_batchnorm(shares: list[int], gpu_path: None) -> None:
    """Also where ranks have different numbers of rows, or none."""
    g = torch.Generator().manual_seed(0)
    x, grad = (3 + torch.randn(16, C, 1, 9, generator=g, dtype=torch.float64) for _ in range(2))
    x = x.contiguous(memory_format=torch.channels_last)
    expected = passes(made(nn.BatchNorm2d(C).double()), x, grad)
    ranks = run_threads(4, on_rank, shares, x, grad)
    for name in ("out", "x"):
        torch.testing.assert_close(torch.cat([found[name] for found in ranks]), expected[name])
    for name in ("weight", "bias"):  # local sums: DDP adds them up
        torch.testing.assert_close(sum(found[name] for found in ranks), expected[name])
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        for found in ranks:
            torch.testing.assert_close(found[name], expected[name])


def test_gpu_path_reads_nothing_and_keeps_bf16(gpu_path: None) -> None:
    """One of eight ranks on `meta`, in the types of autocast."""
    dist.init_process_group("cpu:fake,meta:fake", rank=0, world_size=8, store=FakeStore())
    try:
        traffic.reset()
        x = torch.empty(4, C, 1, 9, device="meta", dtype=torch.bfloat16, requires_grad=True)
        norm = GlobalBatchNorm(C).to("meta")
        out = norm(x)
        out.backward(torch.empty_like(out))
        assert out.dtype == x.grad.dtype == torch.bfloat16  # type: ignore[union-attr]
        assert norm.weight.grad.dtype == norm.bias.grad.dtype == torch.float32
        assert traffic.received() == {"batchnorm": 7 * 4 * (2 * C + 1) + 2 * 7 * 4 * 2 * C // 8}
    finally:
        traffic.reset()
        dist.destroy_process_group()
