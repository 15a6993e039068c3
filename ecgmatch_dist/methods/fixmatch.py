"""FixMatch (Sohn et al. 2020): hard pseudo-labels of the weak view, where it is confident, for the strong view."""

from torch import Tensor

from ecgmatch_dist.bank import MemoryBank
from ecgmatch_dist.losses import bce
from ecgmatch_dist.methods.base import Simple, Views
from ecgmatch_dist.methods.configs import FixMatch as Settings
from ecgmatch_dist.methods.lift import confidence, hard
from ecgmatch_dist.student import Student
from ecgmatch_dist.teacher import Teacher


class FixMatch(Simple):
    """Confident means p >= tau or p <= 1 - tau; the mean counts the entries that are not."""

    uses_unlabelled = True
    uses_bank = False

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def losses(self, views: Views, student: Student, teacher: Teacher, bank: MemoryBank | None) -> dict[str, Tensor]:
        labelled, weak, strong = student(views.labelled, views.weak, views.strong)
        p = weak.logits.detach().sigmoid()
        y_u, mask = hard(p), (confidence(p) >= self.settings.threshold).to(p.dtype)
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
