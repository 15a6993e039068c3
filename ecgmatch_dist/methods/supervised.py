"""The labelled data alone: the lower bound, and the start of the other methods."""

from torch import Tensor

from ecgmatch_dist.bank import MemoryBank
from ecgmatch_dist.losses import bce
from ecgmatch_dist.methods.base import Simple, Views
from ecgmatch_dist.student import Student
from ecgmatch_dist.teacher import Teacher


class Supervised(Simple):
    """Equation 3 on weak views of the labelled batch. No unlabelled signal passes through the network."""

    uses_unlabelled = False
    uses_bank = False

    def losses(self, views: Views, student: Student, teacher: Teacher, bank: MemoryBank | None) -> dict[str, Tensor]:
        (labelled,) = student(views.labelled)
        loss_b = bce(labelled.logits, views.y_b)
        return {"loss": loss_b, "loss/b": loss_b}
