"""How many operations a step launches, counted on `meta`: as a GPU makes it, and as it was with torch's operations alone.

`pytest -s tests/test_launches.py` prints the tables of docs/gpus.md.
"""

from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from ecgmatch_dist import augment
from ecgmatch_dist.capacity.timing import OPERATIONS
from ecgmatch_dist.config import Augment
from ecgmatch_dist.methods.ecgmatch import ECGMatchSettings
from ecgmatch_dist.network import batchnorm
from tests.support.meta_step import Launches, fake_ranks, meta_step, without_autocast
from tests.support.native_norm import kernels

K = 5


def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch, launches: Launches, *, kernels_: bool) -> None:
    """What `meta` cannot run counts as what it is: a view one kernel, a fused optimiser one operation per group."""

    def view(settings: Any, x: Tensor, keys: Tensor, choice: Tensor, *, strong: bool) -> Tensor:
        launches.counts["augment/kernel"] += 1
        return torch.empty_like(x)

    def fused_step(optimizer: torch.optim.Optimizer, norm: Tensor) -> None:
        norm.isfinite().logical_not().float()
        launches.counts["network/optim"] += len(optimizer.param_groups)

    if kernels_:
        kernel = pytest.importorskip(
            "ecgmatch_dist.augment.kernel", reason="Triton is not installed: pip install triton"
        )
        monkeypatch.setattr(kernel, "view", view)
    monkeypatch.setattr(augment, "has_kernel", lambda *_: kernels_)
    monkeypatch.setattr(batchnorm, "has_kernels", lambda device: kernels_)
    monkeypatch.setattr(import_module("ecgmatch_dist.train"), "step_if_finite", fused_step)
    # The number of queries for a second look is read by the host: none.
    monkeypatch.setattr(
        Tensor, "nonzero", lambda mask: torch.empty(0, mask.ndim, dtype=torch.int64, device=mask.device)
    )


def count(monkeypatch: pytest.MonkeyPatch, ranks: int, *, kernels_: bool) -> Launches:
    launches = Launches()
    without_autocast(monkeypatch)
    as_on_a_gpu(monkeypatch, launches, kernels_=kernels_)
    with kernels("Meta"), fake_ranks(ranks):
        meta_step(ECGMatchSettings(neighbours=K), rows=3000, batch=56, watch=launches)
    print(f"\nECGMatch, {ranks} ranks, {'kernels of GPUs' if kernels_ else 'torch alone'}\n{launches}")
    return launches


def test_a_step_launches_at_most_800_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    found = count(monkeypatch, 8, kernels_=True).counts.total()
    assert found <= 800
    assert found == pytest.approx(OPERATIONS, rel=0.03)  # of `ecgmatch plan`


def test_and_more_than_twice_as_many_with_torch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert count(monkeypatch, 8, kernels_=False).counts.total() > 1600


def test_a_view_by_torch_moves_many_times_its_bytes() -> None:
    """One view of the paper's batch. The kernel reads it once and writes it once."""
    x = torch.empty(448, 12, 6144, device="meta")
    keys = torch.empty(len(x), dtype=torch.int64, device="meta")
    launches = Launches()
    with launches:
        augment.ECGAugment(Augment()).strong(x, keys)
    once = 2 * x.nbytes
    print(
        f"\none view: {launches.counts.total()} operations, {launches.bytes / 1e9:.1f} GB; as one kernel {once / 1e9:.2f} GB"
    )
    assert launches.counts.total() > 200
    assert launches.bytes > 20 * once
