"""SoftMatch (Chen et al. 2023): a pseudo-label counts less the further its confidence is below the running mean."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ecgmatch_dist.bank.memory import MemoryBank
from ecgmatch_dist.distributed.collectives import all_sum_nograd
from ecgmatch_dist.losses import class_frequencies
from ecgmatch_dist.methods.advised import Advised, AdvisedSettings
from ecgmatch_dist.methods.base import Task
from ecgmatch_dist.methods.binary import confidence, hard
from ecgmatch_dist.methods.fixmatch import pseudo_label_losses
from ecgmatch_dist.methods.views import Views
from ecgmatch_dist.network.student import Student
from ecgmatch_dist.network.teacher import Teacher

EPSILON = 1e-6


@dataclass(frozen=True)
class SoftMatchSettings(AdvisedSettings):
    """Pseudo-labels weighted by a truncated Gaussian of their confidence."""

    name, title, place = "softmatch", "SoftMatch", 24
    momentum: float = 0.999
    """Momentum of the running mean and variance of the confidence."""
    n_sigma: float = 2.0
    """n: the Gaussian has the standard deviation sigma / n."""
    lambda_u: float = 1.0
    """Weight of the pseudo-label loss."""
    align: Literal["labelled_prior", "uniform", "none"] = "labelled_prior"
    """Class distribution that probabilities are aligned to before their confidence is weighted."""


class SoftMatch(Advised[SoftMatchSettings], settings=SoftMatchSettings):
    """State: running mean and variance of the confidence and running mean of p, each [C] in fp64, over the global batch."""

    def __init__(self, settings: SoftMatchSettings, task: Task) -> None:
        super().__init__(settings, task)
        self.prior = class_frequencies(task.labels)  # labelled class frequencies
        self.mu, self.var = torch.full_like(self.prior, 0.5), torch.ones_like(self.prior)
        self.mean_p = torch.full_like(self.prior, -1.0)  # negative: no batch seen yet

    def align(self, p: Tensor) -> Tensor:
        """p [U, C] moved from the running class distribution to the target; only the weights use it."""
        if self.settings.align == "none":
            return p
        target = self.prior if self.settings.align == "labelled_prior" else torch.full_like(self.prior, 0.5)
        positive = p * (target + EPSILON) / (self.mean_p + EPSILON)
        negative = (1 - p) * (1 - target + EPSILON) / (1 - self.mean_p + EPSILON)
        return positive / (positive + negative)

    def update(self, p: Tensor) -> Tensor:
        """Update the running values with the global batch, then return the weights [U, C] of this rank's rows."""
        m = self.settings.momentum
        n = all_sum_nograd(p.new_full((1,), len(p)))
        mean_p = all_sum_nograd(p.sum(0)) / n
        self.mean_p = torch.where(self.mean_p < 0, mean_p, m * self.mean_p + (1 - m) * mean_p)
        sure = confidence(self.align(p))
        mean = all_sum_nograd(sure.sum(0)) / n
        var = all_sum_nograd((sure - mean).square().sum(0)) / (n - 1).clamp(min=1)
        self.mu, self.var = m * self.mu + (1 - m) * mean, m * self.var + (1 - m) * var
        below = (sure - self.mu).clamp(max=0)
        return torch.exp(-below.square() / (2 * self.var / self.settings.n_sigma**2))

    def losses(self, views: Views, student: Student, teacher: Teacher, bank: MemoryBank | None) -> dict[str, Tensor]:
        labelled, weak, strong = student(views.labelled, views.weak, views.strong)
        p = weak.logits.detach().sigmoid()
        guess = self.advised(views.ids_u, p)
        weights, y_u = self.update(guess.double()).to(p.dtype), hard(guess)
        losses = pseudo_label_losses(views, labelled, strong, y_u, weights, p, self.settings.lambda_u)
        return losses | {"softmatch/mu": self.mu.mean(), "softmatch/var": self.var.mean()}

    def state_dict(self) -> dict[str, Tensor]:
        return super().state_dict() | {"mu": self.mu, "var": self.var, "mean_p": self.mean_p}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        super().load_state_dict(state)
        self.mu, self.var, self.mean_p = (state[name].to(self.mu) for name in ("mu", "var", "mean_p"))
