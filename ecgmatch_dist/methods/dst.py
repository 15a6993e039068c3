"""DST, debiased self-training (Chen et al. 2022): pseudo-labels train a head of their own, an adversary is the worst case."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ecgmatch_dist.bank.memory import MemoryBank
from ecgmatch_dist.losses import bce
from ecgmatch_dist.methods.advised import Advised, AdvisedSettings
from ecgmatch_dist.methods.base import Task
from ecgmatch_dist.methods.binary import confidence, hard
from ecgmatch_dist.methods.views import Views
from ecgmatch_dist.network.backbones.base import keyed_dropout
from ecgmatch_dist.network.model import seeded
from ecgmatch_dist.network.student import Student
from ecgmatch_dist.network.teacher import Teacher

DROPOUT_STREAM = 17  # of keyed.py; the encoder has 16


@dataclass(frozen=True)
class DSTSettings(AdvisedSettings):
    """Debiased self-training: a second head learns from pseudo-labels, a third one is the worst case for the encoder."""

    name, title, place = "dst", "DST", 22
    threshold: float = 0.9
    """tau: confidence must be above it."""
    lambda_self: float = 1.0
    """Weight of the pseudo-label loss of the second head."""
    lambda_worst: float = 0.3
    """Weight of the worst-case loss."""
    eta: float = 2.0
    """Weight of the labelled rows in the worst-case loss."""
    reversal: float = 0.1
    """Highest factor of the gradient reversal."""
    warmup: float = 0.1
    """Share of the steps over which the reversal grows."""


class Reverse(torch.autograd.Function):
    """Gradient reversal: the identity, with its gradient multiplied by -r."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, r: float) -> Tensor:
        ctx.r = r
        return z.view_as(z)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return -ctx.r * grad, None


class Heads(nn.Module):
    """The two heads that are discarded after training: on z [n, D], logits [n, C]."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.pseudo_hidden, self.pseudo_out = nn.Linear(width, 2 * width), nn.Linear(2 * width, classes)
        self.worst = nn.Sequential(
            nn.Linear(width, 2 * width), nn.BatchNorm1d(2 * width), nn.ReLU(),
            nn.Linear(2 * width, 2 * width), nn.BatchNorm1d(2 * width), nn.ReLU(),
            nn.Linear(2 * width, classes),
        )  # fmt: skip

    def pseudo(self, z: Tensor, keys: Tensor) -> Tensor:
        logits: Tensor = self.pseudo_out(keyed_dropout(self.pseudo_hidden(z).relu(), keys, 0.5, DROPOUT_STREAM))
        return logits


class DST(Advised[DSTSettings], settings=DSTSettings):
    """The main head learns from labels alone, the encoder from all three heads. As in the authors' code, the worst-case head's
    labelled targets are the main head's predictions, and it sees all unlabelled rows."""

    def __init__(self, settings: DSTSettings, task: Task) -> None:
        super().__init__(settings, task)
        with seeded(task.seed):
            self.auxiliary = self.heads = Heads(task.width, task.classes)

    def reversal(self, step: int) -> float:
        """r(t), which grows from 0 towards its highest value."""
        high = self.settings.reversal
        return 2 * high / (1 + math.exp(-step / (self.settings.warmup * self.task.steps))) - high

    def losses(self, views: Views, student: Student, teacher: Teacher, bank: MemoryBank | None) -> dict[str, Tensor]:
        a = self.settings
        labelled, weak, strong = student(views.labelled, views.weak, views.strong)
        p_b, p = labelled.logits.detach().sigmoid(), weak.logits.detach().sigmoid()
        guess = self.advised(views.ids_u, p)
        y_u, mask = hard(guess), (confidence(guess) > a.threshold).to(p.dtype)
        heads = self.heads
        loss_b = bce(labelled.logits, views.y_b, views.weight_b)
        loss_u = bce(heads.pseudo(strong.z, views.strong.keys), y_u, mask)
        z: Tensor = Reverse.apply(torch.cat([labelled.z, weak.z]), self.reversal(views.step))  # type: ignore[no-untyped-call]
        worst_b, worst_u = heads.worst(z).split([len(p_b), len(p)])
        loss_w = a.eta * bce(worst_b, hard(p_b)) + bce(worst_u, 1 - y_u)
        return {
            "loss": loss_b + a.lambda_self * loss_u + a.lambda_worst * loss_w,
            "loss/b": loss_b,
            "loss/u": loss_u,
            "loss/worst": loss_w,
            "pseudo_labels": y_u,
            "weights": mask,
            "predictions": p,
        }
