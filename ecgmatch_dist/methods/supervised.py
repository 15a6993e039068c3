"""Supervised training on labelled data: the lower bound, which the other methods start from, and the upper bound."""

from dataclasses import dataclass

from torch import Tensor

from ecgmatch_dist.bank.memory import MemoryBank
from ecgmatch_dist.config import MethodSettings
from ecgmatch_dist.config.roles import added
from ecgmatch_dist.losses import bce
from ecgmatch_dist.methods.base import Method
from ecgmatch_dist.methods.views import Views
from ecgmatch_dist.network.student import Student
from ecgmatch_dist.network.teacher import Teacher


@dataclass(frozen=True)
class SupervisedSettings(MethodSettings):
    """The labelled part alone: the lower bound, and the start of the other methods."""

    name, title, place = "supervised", "Supervised", 0
    uses_unlabelled = False
    is_start = True
    measurements: bool = added(False)
    """Fit trees on ECG measurements to the labelled part, too. They answer beside the network (`ecgmatch predict --trees`), and
    change nothing of it."""

    @property
    def asks_trees(self) -> bool:
        return self.measurements


class Supervised(Method[MethodSettings], settings=SupervisedSettings):
    """Equation 3 on weak views of the labelled batch. No unlabelled signal passes through the network."""

    def losses(self, views: Views, student: Student, teacher: Teacher, bank: MemoryBank | None) -> dict[str, Tensor]:
        (labelled,) = student(views.labelled)
        loss_b = bce(labelled.logits, views.y_b, views.weight_b)
        return {"loss": loss_b, "loss/b": loss_b}


@dataclass(frozen=True)
class FullySupervisedSettings(MethodSettings):
    """All labels of the training part: the upper bound."""

    name, title, place = "fully_supervised", "Fully supervised", 100
    uses_unlabelled = False
    knows_all_labels = True


class FullySupervised(Supervised, settings=FullySupervisedSettings):
    """The same loss. `run.py` adds the unlabelled part to the labelled one."""
