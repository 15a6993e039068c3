"""DST, debiased self-training (Chen et al. 2022): pseudo-labels teach a head of their own, an adversary the worst case."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from ecgmatch_dist.bank import MemoryBank
from ecgmatch_dist.losses import bce
from ecgmatch_dist.methods.base import Simple, Views
from ecgmatch_dist.methods.configs import DST as Settings
from ecgmatch_dist.methods.lift import confidence, hard
from ecgmatch_dist.model import keyed_dropout
from ecgmatch_dist.student import Student
from ecgmatch_dist.teacher import Teacher

DROPOUT_STREAM = 17  # the encoder's is 16


class Reverse(torch.autograd.Function):
    """The identity whose gradient is multiplied by -r."""

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


class DST(Simple):
    """The main head learns from labels alone; the encoder from all three. All as the authors' code settles it: the adversary's
    labelled targets are the main head's predictions, it sees all unlabelled rows, and confidence must exceed tau."""

    uses_unlabelled = True
    uses_bank = False

    def __init__(self, settings: Settings, width: int, classes: int, steps: int, seed: int) -> None:
        self.settings, self.steps = settings, steps
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.heads = Heads(width, classes)
        self.auxiliary = self.heads

    def reversal(self, step: int) -> float:
        """r(t), from 0 towards its highest value."""
        high = self.settings.reversal
        return 2 * high / (1 + math.exp(-step / (self.settings.warmup * self.steps))) - high

    def losses(self, views: Views, student: Student, teacher: Teacher, bank: MemoryBank | None) -> dict[str, Tensor]:
        a = self.settings
        labelled, weak, strong = student(views.labelled, views.weak, views.strong)
        p_b, p = labelled.logits.detach().sigmoid(), weak.logits.detach().sigmoid()
        y_u, mask = hard(p), (confidence(p) > a.threshold).to(p.dtype)
        heads = self.heads
        loss_b = bce(labelled.logits, views.y_b)
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
