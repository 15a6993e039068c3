"""PercentMatch (Huang et al. 2022): separate positive and negative thresholds per class, at percentiles of the scores.

A reconstruction: no code was published, and only the abstract was available. What it leaves open is a setting.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ecgmatch_dist.bank.memory import MemoryBank
from ecgmatch_dist.distributed.collectives import gather_rows
from ecgmatch_dist.losses import class_frequencies
from ecgmatch_dist.methods.advised import Advised, AdvisedSettings
from ecgmatch_dist.methods.base import Task
from ecgmatch_dist.methods.fixmatch import pseudo_label_losses
from ecgmatch_dist.methods.row_state import RowState
from ecgmatch_dist.methods.views import Pass, Views
from ecgmatch_dist.network.student import Student
from ecgmatch_dist.network.teacher import Teacher


@dataclass(frozen=True)
class PercentMatchSettings(AdvisedSettings):
    """Thresholds at percentiles of each class's scores. A reconstruction from the abstract."""

    name, title, place = "percentmatch", "PercentMatch", 23
    positive: float = 0.8
    """a+: share of the expected positives to select."""
    negative: float = 0.8
    """a-: share of the expected negatives to select."""
    momentum: float = 0.99
    """Momentum of the thresholds."""
    refresh: int = 50
    """Steps between updates of the thresholds."""
    lambda_u: float = 1.0
    """Weight of the pseudo-label loss."""
    score_source: Literal["unlabelled_marginal", "labelled_conditional"] = "unlabelled_marginal"
    """Scores for the percentiles: of all unlabelled ECGs, or of labelled ones by their label."""
    percentile: Literal["prior_scaled", "fixed"] = "prior_scaled"
    """Scale the shares by the labelled class frequencies, or use them as they are."""
    weighting: Literal["threshold_tied", "exp_ramp"] = "threshold_tied"
    """Weights tied to the thresholds, or a ramp over the first part of training."""


class PercentMatch(Advised[PercentMatchSettings], settings=PercentMatchSettings):
    """State: the latest weak-view score Q [N_U, C] of every unlabelled ECG, the thresholds tau [2, C], and the labelled scores
    since the last update. Quantiles are no sums over ranks, so every rank holds all scores."""

    def __init__(self, settings: PercentMatchSettings, task: Task) -> None:
        super().__init__(settings, task)
        labels = task.labels
        self.prior: list[float] = class_frequencies(labels).tolist()
        self.Q = RowState(task.rows, labels.shape[1], 0.0, torch.float64, labels.device)
        self.labelled = torch.zeros(0, 2, labels.shape[1], dtype=torch.float64, device=labels.device)  # scores, labels
        zero = self.labelled.new_zeros(labels.shape[1])
        self.tau = torch.stack([zero, zero + 1])  # tau-, tau+: nothing passes
        self.fresh = True  # no thresholds to smooth with yet

    def prepare(self, step: int, student: Student, bank: MemoryBank | None, unlabelled: Pass) -> None:
        """Before the first step, score the whole unlabelled part."""
        super().prepare(step, student, bank, unlabelled)
        if step > 0:
            return
        for ids, x in unlabelled():
            self.Q.write(ids, self.advised(ids, student.infer(x).logits.sigmoid()))

    def refresh(self) -> None:
        """Update the thresholds from the scores."""
        a = self.settings
        new = torch.empty_like(self.tau)
        for c, prior in enumerate(self.prior):
            if a.score_source == "unlabelled_marginal":  # a share of all scores on each side
                low = high = self.Q.values[:, c]
                scaled = a.percentile == "prior_scaled"
                negative, positive = (
                    (a.negative * (1 - prior), a.positive * prior) if scaled else (1 - a.negative, 1 - a.positive)
                )
            else:  # the more confident share of the labelled negatives' and positives' scores
                scores, y = (
                    self.labelled[:, 0, c],
                    self.labelled[:, 1, c],
                )  # y is NaN where nobody has looked: on no side
                low, high, negative, positive = scores[y < 0.5], scores[y > 0.5], a.negative, a.positive
            new[0, c] = torch.quantile(low, negative) if len(low) else 0.0
            new[1, c] = torch.quantile(high, 1 - positive) if len(high) else 1.0
        self.tau = new if self.fresh else a.momentum * self.tau + (1 - a.momentum) * new
        self.fresh = False
        self.labelled = self.labelled[:0]

    def weights(self, step: int) -> Tensor:
        """[2, C]: of negatives and of positives."""
        if self.settings.weighting == "threshold_tied":  # small while the scores are uncertain
            return torch.stack([1 - self.tau[0], self.tau[1]])
        progress = min(1.0, step / (0.4 * self.task.steps))
        return torch.full_like(self.tau, math.exp(-5 * (1 - progress) ** 2))

    def losses(self, views: Views, student: Student, teacher: Teacher, bank: MemoryBank | None) -> dict[str, Tensor]:
        labelled, weak, strong = student(views.labelled, views.weak, views.strong)
        p = weak.logits.detach().sigmoid()
        guess = self.advised(views.ids_u, p)
        self.Q.write(views.ids_u, guess)
        scored = torch.stack([labelled.logits.detach().sigmoid().double(), views.y_b.double()], dim=1)
        self.labelled = torch.cat([self.labelled, gather_rows(scored)])
        if views.step % self.settings.refresh == 0:
            self.refresh()
        low, high = self.tau.to(p.dtype)
        positive, negative = guess >= high, guess <= low
        weight = self.weights(views.step).to(p.dtype)
        mask = torch.where(positive, weight[1], torch.where(negative, weight[0], 0.0)) * (positive ^ negative)
        y_u = positive.to(p.dtype)
        return pseudo_label_losses(views, labelled, strong, y_u, mask, p, self.settings.lambda_u)

    def state_dict(self) -> dict[str, Tensor]:
        fresh = torch.tensor([int(self.fresh)])
        return super().state_dict() | {"Q": self.Q.values, "tau": self.tau, "labelled": self.labelled, "fresh": fresh}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        super().load_state_dict(state)
        self.Q.values.copy_(state["Q"])
        self.tau, self.labelled = state["tau"].to(self.tau), state["labelled"].to(self.tau)
        self.fresh = bool(state["fresh"].item())
