"""No hidden host synchronisation: a step of every method on `meta`, where reading a number raises, on one rank and on two.

`Copies` and `Numbers` catch what `meta` lets pass: tensors made from Python numbers or copied from host memory, for which the
host would wait on a GPU. docs/exactness.md lists the exceptions.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ecgmatch_dist.config import methods
from ecgmatch_dist.learner import Learner
from ecgmatch_dist.methods.ecgmatch import ECGMatchSettings
from ecgmatch_dist.methods.flexmatch import FlexMatchSettings
from ecgmatch_dist.methods.mixmatch import MixMatchSettings
from ecgmatch_dist.methods.percentmatch import PercentMatchSettings
from ecgmatch_dist.methods.ups import UPSSettings
from ecgmatch_dist.network import batchnorm
from tests.support.meta_step import META, fake_ranks, meta_step, without_autocast
from tests.support.native_norm import kernels

K = 3
METHODS = [ECGMatchSettings(neighbours=K), *(m() for m in methods().values() if m is not ECGMatchSettings)]
VARIANTS = [
    ECGMatchSettings(neighbours=K, similarity="euclidean", query="teacher"),
    FlexMatchSettings(lift="classes"),
    MixMatchSettings(guess="eval"),
    UPSSettings(mode="online"),
]


class Copies(TorchDispatchMode):
    """Raises where host memory is copied to the device, or used there, with waiting."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        from_host = any(t.device != META and t.dim() > 0 for t in tensors)
        on_device = any(isinstance(t, Tensor) and t.device == META for t in [*tensors, *tree_leaves(out)])
        if from_host and on_device and not (kwargs or {}).get("non_blocking"):
            raise AssertionError(f"{func} brings memory of the host to the device and waits for it")
        return out


class Numbers(TorchFunctionMode):
    """Raises where a tensor on the device is made from Python numbers. (A call like `new_full` does not wait.)"""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (torch.tensor, torch.as_tensor, Tensor.new_tensor) and out.device == META:
            raise AssertionError(f"{func} brings numbers of the host to the device and waits for it")
        return out


@pytest.fixture(autouse=True)
def no_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    without_autocast(monkeypatch)


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One rank of two, with BatchNorm as on a GPU."""
    monkeypatch.setattr(batchnorm, "has_kernels", lambda device: True)
    with kernels("Meta"), fake_ranks(2):
        yield


@contextmanager
def watched() -> Iterator[None]:
    with Numbers(), Copies():
        yield


def step(method: Any, rows: int, batch: int) -> tuple[dict[str, Tensor], Learner]:
    return meta_step(method, rows, batch, watched())


def name(method: Any) -> str:
    return "-".join([method.name, *(str(v) for k, v in vars(method).items() if v != getattr(type(method)(), k))])


def check(losses: dict[str, Tensor], parts: Learner) -> None:
    assert losses["loss"].device == META
    assert all(p.grad is not None for p in parts.model.parameters())


@pytest.mark.parametrize("method", METHODS + VARIANTS, ids=name)
def test_the_step_reads_nothing_from_the_device(method: Any) -> None:
    """A bank of at most K + 8 rows has no ties to check: the whole step runs, search included."""
    check(*step(method, rows=K + 8, batch=K + 8))


@pytest.mark.parametrize("method", METHODS + VARIANTS, ids=name)
def test_nor_on_two_ranks(method: Any, two_ranks: None) -> None:
    check(*step(method, rows=K + 8, batch=4))


def test_new_thresholds_read_nothing() -> None:
    check(*step(PercentMatchSettings(refresh=1), rows=64, batch=16))


def test_only_the_search_reads_how_many_ties_it_must_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a larger bank one number is read per step: how many queries must be searched again in fp64."""
    method = ECGMatchSettings(neighbours=K)
    with pytest.raises(NotImplementedError, match=r"torch\.nonzero"):
        step(method, rows=301, batch=16)
    read: list[tuple[int, ...]] = []

    def none(mask: Tensor) -> Tensor:
        read.append(tuple(mask.shape))
        return torch.empty(0, mask.ndim, dtype=torch.int64, device=mask.device)

    monkeypatch.setattr(Tensor, "nonzero", none)
    step(method, rows=301, batch=16)
    assert read == [(16,)]


@pytest.mark.parametrize(
    "bring",
    [
        lambda x: x.new_tensor([1]),
        lambda x: torch.tensor(1.0, device=x.device),
        lambda x: torch.ones(2).to(x.device),
        lambda x: x[torch.tensor([0, 1])],
    ],
)
def test_copies_and_numbers_raise(bring: Any) -> None:
    x = torch.empty(4, device=META)
    with Numbers(), Copies():
        assert (x + torch.tensor(2.0)).shape == (4,)  # a number goes along with the call
        with pytest.raises(AssertionError, match="waits"):
            bring(x)
