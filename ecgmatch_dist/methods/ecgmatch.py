"""ECGMatch: pseudo-labels by the vote of K nearest bank entries, weighted by their agreement, and aligned label correlation."""

import torch
from torch import Tensor

from ecgmatch_dist.bank import MemoryBank
from ecgmatch_dist.distributed import all_sum
from ecgmatch_dist.losses import bce, correlation, correlation_alignment, neighbour_agreement, pseudo_labels, total
from ecgmatch_dist.methods.base import Pass, Simple, Views
from ecgmatch_dist.methods.configs import ECGMatch as Settings
from ecgmatch_dist.student import Student
from ecgmatch_dist.teacher import Teacher


class ECGMatch(Simple):
    """The paper's method. `labels` [N_B, C] is the whole labelled set: its correlation R_b is computed once (equation 9)."""

    uses_unlabelled = True
    uses_bank = True

    def __init__(self, settings: Settings, labels: Tensor, bank_view: str) -> None:
        self.settings, self.bank_view = settings, bank_view
        self.R_b = correlation(labels, settings.similarity)
        self.R_u = torch.zeros_like(self.R_b)  # of the latest step, for the eye
        self.committee: list[Teacher] = []  # the supervised runs beside the start

    def prepare(self, step: int, student: Student, bank: MemoryBank | None, unlabelled: Pass) -> None:
        """Before the first step, fill the banks with the starting weights' view of the signals themselves: its features, and
        its predictions or the mean of the committee's."""
        if step == 0:
            assert bank is not None
            for ids, x in unlabelled():
                seen = student.look(x)
                others = [member.look(x).logits for member in self.committee]
                bank.fill(ids, seen.z, torch.stack([seen.logits, *others]).sigmoid().mean(0))
        self.committee.clear()  # nobody asks it again

    def losses(self, views: Views, student: Student, teacher: Teacher, bank: MemoryBank | None) -> dict[str, Tensor]:
        assert bank is not None
        settings = self.settings

        # The teacher fills the bank, then the student asks it for neighbours: all rows of the global batch are written
        # before any is searched. The exchange runs behind the training forward, only the loss needs its result.
        seen = views.clean if self.bank_view == "clean" else views.weak
        taught = teacher.look(seen.x)
        asked = student.look(seen.x) if settings.query == "student" else taught
        pending = bank.exchange(views.ids_u, taught.z, taught.logits.sigmoid(), asked.z, views.step)

        labelled, weak, strong = student(views.labelled, views.weak, views.strong)

        y_u = pseudo_labels(pending.result().p)  # equation 1
        weights = neighbour_agreement(y_u) if settings.refine else torch.ones_like(y_u)  # equation 6
        loss_b = bce(labelled.logits, views.y_b)
        loss_u = bce(strong.logits, y_u, weights)
        predictions = torch.cat([weak.logits, strong.logits]).sigmoid()
        R_u = correlation(predictions, settings.similarity, reduce=all_sum)
        loss_f = correlation_alignment(self.R_b, R_u)
        self.R_u = R_u.detach()
        return {
            "loss": total(loss_b, loss_u, loss_f, settings.lambda_u, settings.lambda_f),
            "loss/b": loss_b,
            "loss/u": loss_u,
            "loss/f": loss_f,
            "pseudo_labels": y_u,
            "weights": weights,
            "predictions": asked.logits.sigmoid(),
        }
