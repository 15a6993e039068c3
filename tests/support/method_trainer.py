"""Every method on small random signals: the loop without files, on any number of ranks."""

from typing import Any

import torch
from torch import Tensor

from ecgmatch_dist.augment import ECGAugment
from ecgmatch_dist.config import Augment, Bank, Config, Model, Optim, Runtime, methods
from ecgmatch_dist.distributed.session import Ranks
from ecgmatch_dist.learner import build_learner
from ecgmatch_dist.losses import annotation_weights
from ecgmatch_dist.methods.views import Views
from ecgmatch_dist.train import train_step

B, U, N, C, T, STEPS = 8, 16, 40, 5, 64, 3
CPU, LR = torch.device("cpu"), 0.05
BANK = Bank(shard_group="world", backend="torch", overlap=False)
PAPER, MILD = Augment(), Augment(pipeline="mild")
METHODS = [method() for method in methods().values()]


def data(absent: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Labelled signals and labels, unlabelled signals; each class is an offset in its own lead."""
    generator = torch.Generator().manual_seed(0)
    y = (torch.rand(B * 2, C, generator=generator) < 0.4).double()
    y[:, 0] = 0.0 if absent else y[:, 0]
    x_b = torch.randn(B * 2, 12, T, generator=generator).double()
    x_b[:, :C] += 2 * y[:, :, None]
    return x_b, y, torch.randn(N, 12, T, generator=generator).double()


class Trainer:
    """The loop without files: this rank's share of the same global batches on any number of ranks."""

    def __init__(
        self,
        rank: int,
        world: int,
        settings: Any,
        absent: bool = False,
        views: Augment = PAPER,
        bank: Bank = BANK,
        unknown: Tensor | None = None,
    ) -> None:
        """`unknown` [2 B, C]: labels that nobody has given."""
        self.rank, self.world = rank, world
        optim = Optim(
            steps=STEPS, lr=LR, encoder_lr_scale=1.0, weight_decay=0.0, unlabelled_batch=U, teacher_momentum=0.9
        )
        config = Config(
            method=settings,
            model=Model(width=8, heads=2, dropout=0.2),
            optim=optim,
            bank=bank,
            runtime=Runtime(device="cpu", precision="fp64"),
        )
        self.x_b, self.y_b, self.x_u = data(absent)
        if unknown is not None:
            self.y_b = self.y_b.masked_fill(unknown, torch.nan)
        self.weight_b = annotation_weights(self.y_b)
        self.learner = build_learner(config, Ranks(rank, world, rank, world, CPU), self.y_b, N, seed=1)
        self.model, self.student, self.teacher = self.learner.model, self.learner.student, self.learner.teacher
        self.method, self.bank = self.learner.method, self.learner.bank
        self.augment = ECGAugment(views)
        self.step = 0

    def share(self, total: int) -> slice:
        return slice(self.rank * total // self.world, (self.rank + 1) * total // self.world)

    def unlabelled(self) -> Any:
        ids = torch.arange(N)[self.share(N)]
        yield ids, self.x_u[ids]

    def one(self) -> dict[str, Tensor]:
        ids_b = ((torch.arange(B) + self.step * B) % len(self.x_b))[self.share(B)]
        ids_u = ((torch.arange(U) * 7 + self.step * 3) % N)[self.share(U)]
        arguments = (self.x_b[ids_b], self.y_b[ids_b], ids_b, self.x_u[ids_u], ids_u)
        weight_b = None if self.weight_b is None else self.weight_b[ids_b]
        views = Views(*arguments, self.augment, seed=1, step=self.step, weight_b=weight_b)
        losses = train_step(self.learner, views, LR, self.unlabelled)
        self.step += 1
        return {key: value.detach() for key, value in losses.items()}

    def state(self) -> dict[str, Tensor]:
        out = {f"student.{k}": v.clone() for k, v in self.model.state_dict().items() if "num_batches" not in k}
        out |= {f"teacher.{k}": v.clone() for k, v in self.teacher.state_dict().items() if "num_batches" not in k}
        return out | {f"method.{k}": v.clone() for k, v in self.method.state_dict().items()}
