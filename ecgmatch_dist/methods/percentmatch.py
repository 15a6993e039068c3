"""PercentMatch (Huang et al. 2022): separate positive and negative thresholds a class, at percentiles of the scores.

A reconstruction: no code was published and only the abstract could be read. What the abstract does not fix is a setting.
"""

import math

import torch
from torch import Tensor

from ecgmatch_dist.bank import MemoryBank
from ecgmatch_dist.distributed import gather_rows
from ecgmatch_dist.losses import bce
from ecgmatch_dist.methods.base import Pass, Simple, Views
from ecgmatch_dist.methods.configs import PercentMatch as Settings
from ecgmatch_dist.methods.table import Table
from ecgmatch_dist.student import Student
from ecgmatch_dist.teacher import Teacher


class PercentMatch(Simple):
    """State: the latest weak-view score Q [N_U, C] of every unlabelled ECG, the thresholds [2, C], the labelled scores of the
    current interval. Quantiles do not decompose over ranks, so every rank holds all scores and computes the same ones."""

    uses_unlabelled = True
    uses_bank = False

    def __init__(self, settings: Settings, labels: Tensor, rows: int, steps: int) -> None:
        self.settings, self.steps = settings, steps
        self.prior: list[float] = labels.double().mean(0).tolist()
        self.Q = Table(rows, labels.shape[1], 0.0, torch.float64, labels.device)
        self.labelled = torch.zeros(0, 2, labels.shape[1], dtype=torch.float64, device=labels.device)  # scores, labels
        none = self.labelled.new_zeros(labels.shape[1])
        self.tau = torch.stack([none, none + 1])  # tau-, tau+
        self.fresh = True

    def prepare(self, step: int, student: Student, bank: MemoryBank | None, unlabelled: Pass) -> None:
        """The table before the first step: one pass over the unlabelled part."""
        if step > 0:
            return
        for ids, x in unlabelled():
            self.Q.write(ids, student.look(x).logits.sigmoid())

    def refresh(self) -> None:
        """New thresholds from the scores, smoothed with the old ones."""
        a = self.settings
        new = torch.empty_like(self.tau)
        for c, prior in enumerate(self.prior):
            if a.score_source == "unlabelled_marginal":  # of all scores, the share that is expected on each side
                low = high = self.Q.values[:, c]
                scaled = a.percentile == "prior_scaled"
                negative, positive = (
                    (a.negative * (1 - prior), a.positive * prior) if scaled else (1 - a.negative, 1 - a.positive)
                )
            else:  # of the scores of labelled negatives and positives, the surer share
                scores, y = self.labelled[:, 0, c], self.labelled[:, 1, c] > 0.5
                low, high, negative, positive = scores[~y], scores[y], a.negative, a.positive
            new[0, c] = torch.quantile(low, negative) if len(low) else 0.0
            new[1, c] = torch.quantile(high, 1 - positive) if len(high) else 1.0
        self.tau = new if self.fresh else a.momentum * self.tau + (1 - a.momentum) * new
        self.fresh = False
        self.labelled = self.labelled[:0]

    def weights(self, step: int) -> Tensor:
        """[2, C] for the negative and positive side."""
        if self.settings.weighting == "threshold_tied":  # small while the scores are unsure
            return torch.stack([1 - self.tau[0], self.tau[1]])
        progress = min(1.0, step / (0.4 * self.steps))
        return torch.full_like(self.tau, math.exp(-5 * (1 - progress) ** 2))

    def losses(self, views: Views, student: Student, teacher: Teacher, bank: MemoryBank | None) -> dict[str, Tensor]:
        labelled, weak, strong = student(views.labelled, views.weak, views.strong)
        p = weak.logits.detach().sigmoid()
        self.Q.write(views.ids_u, p)
        seen = torch.stack([labelled.logits.detach().sigmoid().double(), views.y_b.double()], dim=1)
        self.labelled = torch.cat([self.labelled, gather_rows(seen)])
        if views.step % self.settings.refresh == 0:
            self.refresh()
        low, high = self.tau.to(p.dtype)
        positive, negative = p >= high, p <= low
        weight = self.weights(views.step).to(p.dtype)
        mask = torch.where(positive, weight[1], torch.where(negative, weight[0], 0.0)) * (positive ^ negative)
        y_u = positive.to(p.dtype)
        loss_b, loss_u = bce(labelled.logits, views.y_b), bce(strong.logits, y_u, mask)
        loss = loss_b + self.settings.lambda_u * loss_u
        return {
            "loss": loss,
            "loss/b": loss_b,
            "loss/u": loss_u,
            "pseudo_labels": y_u,
            "weights": mask,
            "predictions": p,
        }

    def state_dict(self) -> dict[str, Tensor]:
        fresh = torch.tensor([int(self.fresh)])
        return {"Q": self.Q.values, "tau": self.tau, "labelled": self.labelled, "fresh": fresh}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.Q.values.copy_(state["Q"])
        self.tau, self.labelled = state["tau"].to(self.tau), state["labelled"].to(self.tau)
        self.fresh = bool(state["fresh"].item())
