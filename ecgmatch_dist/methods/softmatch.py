"""SoftMatch (Chen et al. 2023): every pseudo-label counts, less the further its confidence lies below the running mean."""

import torch
from torch import Tensor

from ecgmatch_dist.bank import MemoryBank
from ecgmatch_dist.distributed import all_sum_nograd
from ecgmatch_dist.losses import bce
from ecgmatch_dist.methods.base import Simple, Views
from ecgmatch_dist.methods.configs import SoftMatch as Settings
from ecgmatch_dist.methods.lift import confidence, hard
from ecgmatch_dist.student import Student
from ecgmatch_dist.teacher import Teacher

EPSILON = 1e-6


class SoftMatch(Simple):
    """State: running mean and variance of the confidence and running mean of p, each [C] in fp64, over the global batch."""

    uses_unlabelled = True
    uses_bank = False

    def __init__(self, settings: Settings, labels: Tensor) -> None:
        """`labels` [N_B, C]: their class frequencies are what confidences are aligned to."""
        self.settings = settings
        self.prior = labels.double().mean(0)
        self.mu, self.var = torch.full_like(self.prior, 0.5), torch.ones_like(self.prior)
        self.mean_p = torch.full_like(self.prior, -1.0)  # negative: no batch seen yet

    def align(self, p: Tensor) -> Tensor:
        """p [U, C] moved from the distribution seen so far towards the target; feeds the weights alone."""
        if self.settings.align == "none":
            return p
        target = self.prior if self.settings.align == "labelled_prior" else torch.full_like(self.prior, 0.5)
        positive = p * (target + EPSILON) / (self.mean_p + EPSILON)
        negative = (1 - p) * (1 - target + EPSILON) / (1 - self.mean_p + EPSILON)
        return positive / (positive + negative)

    def update(self, p: Tensor) -> Tensor:
        """Take in the global batch, then give the weights [U, C] of this rank's rows."""
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
        weights, y_u = self.update(p.double()).to(p.dtype), hard(p)
        loss_b, loss_u = bce(labelled.logits, views.y_b), bce(strong.logits, y_u, weights)
        return {
            "loss": loss_b + self.settings.lambda_u * loss_u,
            "loss/b": loss_b,
            "loss/u": loss_u,
            "softmatch/mu": self.mu.mean(),
            "softmatch/var": self.var.mean(),
            "pseudo_labels": y_u,
            "weights": weights,
            "predictions": p,
        }

    def state_dict(self) -> dict[str, Tensor]:
        return {"mu": self.mu, "var": self.var, "mean_p": self.mean_p}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.mu, self.var, self.mean_p = (state[name].to(self.mu) for name in ("mu", "var", "mean_p"))
