"""Contrastive learning without labels: two random views of a recording must find each other among those of all others (SimCLR).

The start of the supervised run: `--selfsupervised contrastive`. Legend: U recordings of this rank, W ranks, E features.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from ecgmatch_dist.bank.memory import MemoryBank
from ecgmatch_dist.config import MethodSettings
from ecgmatch_dist.distributed.collectives import gather_rows, gather_rows_with_gradient, rank
from ecgmatch_dist.errors import require
from ecgmatch_dist.methods.base import Images, Method, Task
from ecgmatch_dist.methods.views import Views
from ecgmatch_dist.network.model import seeded
from ecgmatch_dist.network.student import Student
from ecgmatch_dist.network.teacher import Teacher


@dataclass(frozen=True)
class ContrastiveSettings(MethodSettings):
    """Learns features from the signals of the training part, labelled or not. Tables show a linear probe of them."""

    name, title, place = "contrastive", "Contrastive, linear probe", 1
    needs_labels = False
    is_start = True
    temperature: float = 0.1
    """Temperature of the softmax."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.temperature > 0, "method.temperature", self.temperature, "greater than 0")


class Contrastive(Method[ContrastiveSettings], settings=ContrastiveSettings):
    """The loss compares projections of z by a small network, which is discarded. Negatives come from all ranks."""

    probes = True

    def __init__(self, settings: ContrastiveSettings, task: Task) -> None:
        super().__init__(settings, task)
        self.validate_after = task.steps - 1  # only at the end: labels choose nothing
        with seeded(task.seed):
            self.projection = nn.Sequential(
                nn.Linear(task.width, task.width), nn.ReLU(), nn.Linear(task.width, task.width)
            )
        self.auxiliary = self.projection

    def losses(self, views: Views, student: Student, teacher: Teacher, bank: MemoryBank | None) -> dict[str, Tensor]:
        one, other = student(*views.pair)
        loss = nt_xent(self.projection(one.z), self.projection(other.z), views.ids_u, self.settings.temperature)
        # The classifier does not learn, but DDP needs a gradient of every parameter.
        return {"loss": loss + 0 * one.logits.sum(), "loss/contrast": loss}

    def images(self, views: Views) -> Images:
        return Images({"x_u": views.x_u, "one": views.pair[0].x, "other": views.pair[1].x})


def nt_xent(one: Tensor, other: Tensor, ids: Tensor, temperature: float) -> Tensor:
    """Two views [U, E] of the recordings `ids` [U] -> the mean over this rank's 2 U views of the cross-entropy of finding the
    other view of the same recording among the 2 W U views of all ranks.

    A recording can occur twice in a global batch: its further views are neither positive nor negative.
    """
    pair = torch.stack([normalize(one, dim=1), normalize(other, dim=1)], 1)  # [U, 2, E]
    everyone = gather_rows_with_gradient(pair, name="contrast").flatten(0, 1)  # [2 W U, E]
    all_ids = gather_rows(ids, name="contrast").repeat_interleave(2)  # [2 W U]
    own = torch.arange(2 * len(ids), device=ids.device) + rank() * 2 * len(ids)  # where this rank's views lie in it
    positive = own ^ 1  # the two views of a recording are neighbours
    scores = pair.flatten(0, 1) @ everyone.T / temperature  # [2 U, 2 W U]
    place = torch.arange(len(all_ids), device=ids.device)
    same = ids.repeat_interleave(2)[:, None] == all_ids
    hidden = same & (place != positive[:, None])  # itself, and further views of the same recording
    return cross_entropy(scores.masked_fill(hidden, -torch.inf), positive)
