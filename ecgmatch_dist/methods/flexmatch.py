"""FlexMatch (Zhang et al. 2021): FixMatch whose thresholds follow how much of each class has been learnt."""

import torch
from torch import Tensor

from ecgmatch_dist.bank import MemoryBank
from ecgmatch_dist.losses import bce
from ecgmatch_dist.methods.base import Simple, Views
from ecgmatch_dist.methods.configs import FlexMatch as Settings
from ecgmatch_dist.methods.lift import confidence, hard
from ecgmatch_dist.methods.table import Table
from ecgmatch_dist.student import Student
from ecgmatch_dist.teacher import Teacher

UNUSED = -1


class FlexMatch(Simple):
    """The table S [N_U, C] holds the last side (0 or 1) that each ECG was confidently put on, or UNUSED.

    Thresholds come from S as the previous step left it; S changes only where the confidence reaches the full tau. While all
    is unused the thresholds are zero and everything passes, as in the authors' code.
    """

    uses_unlabelled = True
    uses_bank = False

    def __init__(self, settings: Settings, rows: int, classes: int, device: torch.device) -> None:
        self.settings = settings
        self.table = Table(rows, classes, UNUSED, torch.int8, device)

    def thresholds(self) -> tuple[Tensor, Tensor]:
        """[C] for the negative and [C] for the positive side: tau M(beta), M(b) = b / (2 - b)."""
        tau, S = self.settings.threshold, self.table.values
        learnt = [S.eq(side).sum(0).double() for side in (0, 1)]
        if self.settings.lift == "sides":  # the two sides of a class compete
            unused = S.eq(UNUSED).sum(0).double()
            most = torch.maximum(torch.maximum(*learnt), unused).clamp(min=1)
            low, high = (n / most for n in learnt)
            return tau * low / (2 - low), tau * high / (2 - high)
        without = S.ne(1).all(1).sum().double()  # the diseases compete; negatives keep the fixed bar
        high = learnt[1] / torch.maximum(learnt[1].max(), without).clamp(min=1)
        return torch.full_like(high, tau), tau * high / (2 - high)

    def losses(self, views: Views, student: Student, teacher: Teacher, bank: MemoryBank | None) -> dict[str, Tensor]:
        labelled, weak, strong = student(views.labelled, views.weak, views.strong)
        p = weak.logits.detach().sigmoid()
        y_u, sure = hard(p), confidence(p)
        low, high = self.thresholds()
        mask = (sure >= torch.where(y_u == 1, high, low)).to(p.dtype)
        self.table.write(views.ids_u, y_u, sure >= self.settings.threshold)
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
        return {"S": self.table.values}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.table.values.copy_(state["S"])
