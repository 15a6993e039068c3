"""No hidden host synchronisation: a step of every method on `meta`, where reading a number raises, on one rank and on two.

`Copies` and `Numbers` catch what `meta` lets pass: tensors made from Python numbers or copied from host memory, for which the
host would wait on a GPU. docs/exactness.md lists the exceptions.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ecgmatch_dist.augment import ECGAugment
from ecgmatch_dist.config import Augment, Bank, Config, Model, Optim, methods
from ecgmatch_dist.distributed import collectives
from ecgmatch_dist.distributed.session import Ranks, to_device
from ecgmatch_dist.learner import Learner, build_learner
from ecgmatch_dist.methods.ecgmatch import ECGMatchSettings
from ecgmatch_dist.methods.flexmatch import FlexMatchSettings
from ecgmatch_dist.methods.mixmatch import MixMatchSettings
from ecgmatch_dist.methods.percentmatch import PercentMatchSettings
from ecgmatch_dist.methods.ups import UPSSettings
from ecgmatch_dist.methods.views import Views
from ecgmatch_dist.train import train_step

META = torch.device("meta")
B, C, K = 8, 5, 3
BANK = Bank(backend="torch", overlap=False)  # in a thread of its own it would not be checked
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
def without_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """`meta` has no autocast."""
    monkeypatch.setattr(torch, "autocast", lambda device, **options: nullcontext())


def update_stats(x: Tensor, *_: Any) -> tuple[Tensor, ...]:
    """Shapes of a torch kernel that `meta` does not support."""
    return x.new_empty(x.shape[1]), x.new_empty(x.shape[1])


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One rank of two: collectives return the right shapes. DDP is left out."""
    monkeypatch.setattr(torch, "batch_norm_update_stats", update_stats)
    dist.init_process_group("cpu:fake,meta:fake", rank=0, world_size=2, store=FakeStore())
    yield
    collectives.traffic.reset()
    dist.destroy_process_group()


def learner(method: Any, rows: int, batch: int) -> tuple[Learner, Tensor]:
    optim = Optim(unlabelled_batch=batch * collectives.world())
    config = Config(method=method, model=Model(width=8, heads=2), optim=optim, bank=BANK)
    ranks = Ranks(0, collectives.world(), 0, collectives.world(), META)
    labels = torch.empty(40, C, device=META)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "tolist", lambda t: [0.3] * len(t))  # labels may be read before the first step
        plain = Tensor.__bool__  # so may whether all of them are given
        patch.setattr(Tensor, "__bool__", lambda t: t.device != META and plain(t))
        patch.setattr(
            "ecgmatch_dist.network.student.data_parallel", lambda model, **options: model
        )  # DDP reads shapes, too
        return build_learner(config, ranks, labels, rows, seed=1), labels


def step(method: Any, rows: int, batch: int, number: int = 1) -> tuple[dict[str, Tensor], Learner]:
    """One whole step, from batches in the host's memory to the teacher."""
    parts, labels = learner(method, rows, batch)
    host = np.zeros(B, np.int64), np.zeros((B, 12, 128), np.float16), np.zeros(batch, np.int64)
    host = *host, np.zeros((batch, 12, 128), np.float16)
    if not method.uses_unlabelled:
        host = *host[:2], host[2][:0], host[3][:0]
    with Numbers(), Copies():
        ids_b, x_b, ids_u, x_u = (to_device(array, META) for array in host)
        arguments = x_b.float(), labels[ids_b], ids_b, x_u.float(), ids_u
        views = Views(*arguments, ECGAugment(Augment()), 1, step=number)
        losses = train_step(parts, views, 0.1, lambda: iter(()))
    return losses, parts


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
