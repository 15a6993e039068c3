"""MSDNN (Lai et al. 2023), a reconstruction: momentum contrast between views of unlabelled ECGs, then fine-tuning."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from ecgmatch_dist.bank.memory import MemoryBank
from ecgmatch_dist.config import MethodSettings
from ecgmatch_dist.distributed.collectives import gather_rows
from ecgmatch_dist.losses import bce
from ecgmatch_dist.methods.base import Method, Task
from ecgmatch_dist.methods.views import Views
from ecgmatch_dist.network.student import Student
from ecgmatch_dist.network.teacher import Teacher


@dataclass(frozen=True)
class MSDNNSettings(MethodSettings):
    """Momentum contrast on unlabelled signals, then supervised fine-tuning. A reconstruction."""

    name, title, place = "msdnn", "MSDNN", 31
    contrast: float = 0.5
    """Share of the steps with the contrastive loss; labels are used after them."""
    temperature: float = 0.2
    """Temperature of the contrastive softmax."""
    queue: int = 4096
    """Length of the queue of negative keys."""


class MSDNN(Method[MSDNNSettings], settings=MSDNNSettings):
    """First the student's strong view must match the teacher's weak view of the same ECG among a queue of other ECGs; then it
    learns from the labels alone. State: the queue of the latest keys, oldest first."""

    def __init__(self, settings: MSDNNSettings, task: Task) -> None:
        super().__init__(settings, task)
        self.validate_after = self.contrast_steps = int(settings.contrast * task.steps)
        self.queue = task.labels.new_zeros(0, task.width)

    def losses(self, views: Views, student: Student, teacher: Teacher, bank: MemoryBank | None) -> dict[str, Tensor]:
        if views.step >= self.contrast_steps:
            (labelled,) = student(views.labelled)
            loss_b = bce(labelled.logits, views.y_b, views.weight_b)
            return {"loss": loss_b, "loss/b": loss_b}
        (strong,) = student(views.strong)
        query, key = normalize(strong.z, dim=1), normalize(teacher.infer(views.weak.x).z, dim=1)
        same = (query * key).sum(1, keepdim=True)
        scores = torch.cat([same, query @ self.queue.T], dim=1) / self.settings.temperature
        loss = cross_entropy(scores, torch.zeros(len(scores), dtype=torch.int64, device=scores.device))
        self.queue = torch.cat([self.queue, gather_rows(key)])[-self.settings.queue :]
        # The classifier does not learn yet, but DDP needs a gradient of every parameter.
        return {"loss": loss + 0 * strong.logits.sum(), "loss/contrast": loss}

    def state_dict(self) -> dict[str, Tensor]:
        return {"queue": self.queue}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.queue = state["queue"].to(self.queue)
