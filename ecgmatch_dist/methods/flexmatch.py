"""FlexMatch (Zhang et al. 2021): FixMatch with thresholds that rise with what has been learnt of each class."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ecgmatch_dist.bank.memory import MemoryBank
from ecgmatch_dist.methods.advised import Advised, AdvisedSettings
from ecgmatch_dist.methods.base import Task
from ecgmatch_dist.methods.binary import confidence, hard
from ecgmatch_dist.methods.fixmatch import pseudo_label_losses
from ecgmatch_dist.methods.row_state import RowState
from ecgmatch_dist.methods.views import Views
from ecgmatch_dist.network.student import Student
from ecgmatch_dist.network.teacher import Teacher

UNUSED = -1


@dataclass(frozen=True)
class FlexMatchSettings(AdvisedSettings):
    """FixMatch with thresholds that rise with what has been learnt of each class."""

    name, title, place = "flexmatch", "FlexMatch", 21
    threshold: float = 0.95
    """tau, the highest threshold."""
    lambda_u: float = 1.0
    """Weight of the pseudo-label loss."""
    lift: Literal["sides", "classes"] = "sides"
    """What the learning status is relative to: the other side of the same class, or the positives of all classes."""


class FlexMatch(Advised[FlexMatchSettings], settings=FlexMatchSettings):
    """State: S [N_U, C], the last confident prediction (0 or 1) of each ECG and class, or UNUSED.

    A step takes its thresholds from S as the previous step left it. S changes only where the confidence reaches the full tau.
    While all of S is unused, the thresholds are zero and every entry passes, as in the authors' code.
    """

    def __init__(self, settings: FlexMatchSettings, task: Task) -> None:
        super().__init__(settings, task)
        self.sides = RowState(task.rows, task.classes, UNUSED, torch.int8, task.device)

    def thresholds(self) -> tuple[Tensor, Tensor]:
        """[C] for the negative and [C] for the positive side: tau M(beta), M(b) = b / (2 - b)."""
        tau, S = self.settings.threshold, self.sides.values
        learnt = [S.eq(side).sum(0).double() for side in (0, 1)]
        if self.settings.lift == "sides":  # relative to the other side of the class
            unused = S.eq(UNUSED).sum(0).double()
            most = torch.maximum(torch.maximum(*learnt), unused).clamp(min=1)
            low, high = (n / most for n in learnt)
            return tau * low / (2 - low), tau * high / (2 - high)
        # Relative to the other classes' positives; negatives keep the fixed threshold.
        without_positive = S.ne(1).all(1).sum().double()
        high = learnt[1] / torch.maximum(learnt[1].max(), without_positive).clamp(min=1)
        return torch.full_like(high, tau), tau * high / (2 - high)

    def losses(self, views: Views, student: Student, teacher: Teacher, bank: MemoryBank | None) -> dict[str, Tensor]:
        labelled, weak, strong = student(views.labelled, views.weak, views.strong)
        p = weak.logits.detach().sigmoid()
        guess = self.advised(views.ids_u, p)
        y_u, sure = hard(guess), confidence(guess)
        low, high = self.thresholds()
        mask = (sure >= torch.where(y_u == 1, high, low)).to(p.dtype)
        self.sides.write(views.ids_u, y_u, sure >= self.settings.threshold)
        return pseudo_label_losses(views, labelled, strong, y_u, mask, p, self.settings.lambda_u)

    def state_dict(self) -> dict[str, Tensor]:
        return super().state_dict() | {"S": self.sides.values}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        super().load_state_dict(state)
        self.sides.values.copy_(state["S"])
