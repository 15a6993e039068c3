"""A step of training on `meta`, the device without numbers: reading one raises, and every operation can be counted."""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ecgmatch_dist.augment import ECGAugment
from ecgmatch_dist.config import Augment, Bank, Config, Model, Optim
from ecgmatch_dist.distributed import collectives
from ecgmatch_dist.distributed.session import Ranks, to_device
from ecgmatch_dist.learner import Learner, build_learner
from ecgmatch_dist.methods.views import Views
from ecgmatch_dist.train import train_step

META = torch.device("meta")
PACKAGE = Path(sys.modules["ecgmatch_dist"].__file__ or "").parent
C = 5


def without_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """`meta` has no autocast."""
    monkeypatch.setattr(torch, "autocast", lambda device, **options: nullcontext())


@contextmanager
def fake_ranks(world: int) -> Iterator[None]:
    """One rank of several: collectives return the right shapes."""
    dist.init_process_group("cpu:fake,meta:fake", rank=0, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        collectives.traffic.reset()
        dist.destroy_process_group()


def meta_learner(method: Any, rows: int, batch: int) -> tuple[Learner, Tensor]:
    """`batch`: of this rank. DDP is left out: it reads shapes."""
    optim = Optim(unlabelled_batch=batch * collectives.world())
    bank = Bank(backend="torch", overlap=False)  # in a thread of its own it would not be checked
    config = Config(method=method, model=Model(width=8, heads=2), optim=optim, bank=bank)
    ranks = Ranks(0, collectives.world(), 0, collectives.world(), META)
    labels = torch.empty(40, C, device=META)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "tolist", lambda t: [0.3] * len(t))  # labels may be read before the first step
        plain = Tensor.__bool__  # so may whether all of them are given
        patch.setattr(Tensor, "__bool__", lambda t: t.device != META and plain(t))
        patch.setattr("ecgmatch_dist.network.student.data_parallel", lambda model, **options: model)
        return build_learner(config, ranks, labels, rows, seed=1), labels


def meta_step(
    method: Any, rows: int, batch: int, watch: Any, labelled: int = 8, number: int = 1
) -> tuple[dict[str, Tensor], Learner]:
    """One whole step inside `watch`, from batches in the host's memory to the teacher."""
    parts, labels = meta_learner(method, rows, batch)
    host = np.zeros(labelled, np.int64), np.zeros((labelled, 12, 128), np.float16), np.zeros(batch, np.int64)
    host = *host, np.zeros((batch, 12, 128), np.float16)
    if not method.uses_unlabelled:
        host = *host[:2], host[2][:0], host[3][:0]
    with watch:
        ids_b, x_b, ids_u, x_u = (to_device(array, META) for array in host)
        arguments = x_b.float(), labels[ids_b], ids_b, x_u.float(), ids_u
        views = Views(*arguments, ECGAugment(Augment()), 1, step=number)
        losses = train_step(parts, views, 0.1, lambda: iter(()))
    return losses, parts


class Launches(TorchDispatchMode):
    """Counts operations that a GPU would launch, by the module of the package that asked for them. Views of a tensor and new
    memory launch nothing. What autograd does by itself counts as "backward"."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.bytes = 0
        """That the operations read and write."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        out = func(*args, **(kwargs or {}))
        if not (
            func.is_view or name.startswith(("empty", "new_empty", "detach", "_unsafe_view", "lift", "_reshape_alias"))
        ):
            self.counts[caller()] += 1
            self.bytes += sum(t.nbytes for t in tree_leaves((args, kwargs, out)) if isinstance(t, Tensor))
        return out

    def __str__(self) -> str:
        lines = [f"{count:6}  {name}" for name, count in self.counts.most_common()]
        return "\n".join([*lines, f"{self.counts.total():6}  operations"])


def caller() -> str:
    """The module of the package nearest to the operation. `train.py` asks for nothing itself but the backward."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(PACKAGE) and path.stem != "collectives":
            part = path.relative_to(PACKAGE).with_suffix("").as_posix().removesuffix("/__init__")
            if part == "network/backbones/base" and frame.f_code.co_name == "keyed_dropout":
                part = "dropout"
            return "backward" if part == "train" else part
        frame = frame.f_back
    return "backward"
