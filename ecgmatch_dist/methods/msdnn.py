"""MSDNN (Lai et al. 2023), a reconstruction: momentum contrast between views of unlabelled ECGs, then fine-tuning."""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from ecgmatch_dist.bank import MemoryBank
from ecgmatch_dist.distributed import gather_rows
from ecgmatch_dist.losses import bce
from ecgmatch_dist.methods.base import Simple, Views
from ecgmatch_dist.methods.configs import MSDNN as Settings
from ecgmatch_dist.student import Student
from ecgmatch_dist.teacher import Teacher


class MSDNN(Simple):
    """First the student's strong view must find the teacher's weak view of the same ECG among a queue of others; then the
    labels alone. State: the queue of the latest keys, oldest first, the same on all ranks."""

    uses_unlabelled = True
    uses_bank = False

    def __init__(self, settings: Settings, width: int, steps: int, dtype: torch.dtype, device: torch.device) -> None:
        self.settings = settings
        self.counts_from = int(settings.contrast * steps)
        self.queue = torch.zeros(0, width, dtype=dtype, device=device)

    def losses(self, views: Views, student: Student, teacher: Teacher, bank: MemoryBank | None) -> dict[str, Tensor]:
        if views.step >= self.counts_from:
            (labelled,) = student(views.labelled)
            loss_b = bce(labelled.logits, views.y_b)
            return {"loss": loss_b, "loss/b": loss_b}
        (strong,) = student(views.strong)
        query, key = normalize(strong.z, dim=1), normalize(teacher.look(views.weak.x).z, dim=1)
        same = (query * key).sum(1, keepdim=True)
        scores = torch.cat([same, query @ self.queue.T], dim=1) / self.settings.temperature
        loss = cross_entropy(scores, torch.zeros(len(scores), dtype=torch.int64, device=scores.device))
        self.queue = torch.cat([self.queue, gather_rows(key)])[-self.settings.queue :]
        # The classifier learns nothing yet; DDP wants a gradient of every parameter all the same.
        return {"loss": loss + 0 * strong.logits.sum(), "loss/contrast": loss}

    def state_dict(self) -> dict[str, Tensor]:
        return {"queue": self.queue}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.queue = state["queue"].to(self.queue)
