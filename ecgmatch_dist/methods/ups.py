"""UPS (Rizve et al. 2021): pseudo-labels that are both confident and certain. Certain means stable under dropout."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ecgmatch_dist import keyed
from ecgmatch_dist.bank.memory import MemoryBank
from ecgmatch_dist.distributed.collectives import all_sum_nograd, world
from ecgmatch_dist.losses import bce
from ecgmatch_dist.methods.advised import Advised, AdvisedSettings
from ecgmatch_dist.methods.base import Task
from ecgmatch_dist.methods.row_state import RowState
from ecgmatch_dist.methods.views import Pass, Views
from ecgmatch_dist.network.student import Student
from ecgmatch_dist.network.teacher import Teacher

FLOOR = 25  # positives that balancing leaves to every class
EPSILON = 1e-6  # keeps the trees' 0 and 1 finite as logits
FIRST_PASS = 16  # keys of views 16, 17, ... are for the passes with dropout


@dataclass(frozen=True)
class UPSSettings(AdvisedSettings):
    """Pseudo-labels that are both confident and certain under dropout."""

    name, title, place = "ups", "UPS", 25
    mode: Literal["rounds", "online"] = "rounds"
    """rounds: select from the whole unlabelled part, then train again from the start; online: select within each batch."""
    rounds: int = 3
    """Number of rounds. The first one is supervised."""
    restart: Literal["all", "weights"] = "all"
    """What each round begins anew: weights, schedule and momentum (the authors' code), or the weights alone, while the learning
    rate goes on falling."""
    passes: int = 10
    """Number of forward passes with dropout."""
    tau_p: float = 0.5
    """Smallest mean probability of a positive."""
    tau_n: float = 0.05
    """Mean probability below which a class is negative."""
    kappa_p: float = 0.05
    """Standard deviation below which a positive is certain."""
    kappa_n: float = 0.005
    """Standard deviation below which a negative is certain."""
    temperature_n: float = 2.0
    """Temperature of the probabilities that select negatives."""
    lambda_u: float = 1.0
    """Weight of the pseudo-label loss."""
    balanced_rounds: int = 1
    """Number of first selections in which no class has more positives than the rarest one (at least 25)."""


class Selection(NamedTuple):
    """Each [n, C]: mean probability p, its standard deviation u, and the selected positives and negatives."""

    p: Tensor
    u: Tensor
    positive: Tensor
    negative: Tensor


def select(logits: Tensor, a: UPSSettings) -> Selection:
    """Select the confident and certain entries from the logits [F, n, C] of F passes with dropout, as in the authors' code."""
    p, softened = logits.sigmoid(), (logits / a.temperature_n).sigmoid()
    mean, u = p.mean(0), p.std(0)
    positive = (mean >= a.tau_p) & (u < a.kappa_p)
    negative = (softened.mean(0) < a.tau_n) & (softened.std(0) < a.kappa_n)
    return Selection(mean, u, positive, negative & ~positive)


def balance(positive: Tensor, u: Tensor) -> Tensor:
    """Keep the most certain positives, per class as many as the rarest class has, but at least FLOOR: [N, C] -> [N, C]."""
    count = max(FLOOR, int(positive.sum(0).min()))
    rank = torch.where(positive, u, torch.inf).argsort(dim=0, stable=True).argsort(0)
    kept: Tensor = positive & (rank < count)
    return kept


class UPS(Advised[UPSSettings], settings=UPSSettings):
    """Mode rounds: train, select from the whole unlabelled part, and train again from the starting weights on labelled and
    selected rows, with a new schedule and optimiser. Only the last round is validated. Mode online: select in each batch.

    State: the selection of every unlabelled ECG, and the starting weights.
    """

    def __init__(self, settings: UPSSettings, task: Task) -> None:
        super().__init__(settings, task)
        rounds = settings.mode == "rounds"
        self.round_steps = -(-task.steps // settings.rounds) if rounds else task.steps
        self.validate_after = (settings.rounds - 1) * self.round_steps if rounds else 0
        self.positive, self.negative = (RowState(task.rows, task.classes, 0, torch.int8, task.device) for _ in range(2))
        self.initial: dict[str, Tensor] = {}

    def phase(self, step: int) -> tuple[int, int]:
        if self.settings.mode == "online" or self.settings.restart == "weights":
            return super().phase(step)
        begin = step - step % self.round_steps
        return step - begin, min(self.round_steps, self.task.steps - begin)

    def passes(self, x: Tensor, ids: Tensor, step: int, student: Student) -> Tensor:
        """Logits [F, n, C] of F passes with dropout, keyed by step, pass and row, each mixed with the trees' answer."""
        keys = [keyed.row_keys(self.task.seed, step, FIRST_PASS + f, ids) for f in range(self.settings.passes)]
        logits = torch.stack([student.infer(x, k, "dropout").logits for k in keys])
        return self.advised(ids, logits.sigmoid()).logit(EPSILON) if self.trees else logits

    def prepare(self, step: int, student: Student, bank: MemoryBank | None, unlabelled: Pass) -> None:
        super().prepare(step, student, bank, unlabelled)
        if self.settings.mode == "online" or step % self.round_steps:
            return
        if step == 0:
            self.initial = {name: t.detach().clone() for name, t in student.model.state_dict().items()}
            return
        deviation = RowState(self.task.rows, self.task.classes, 0.0, torch.float64, student.device)
        for ids, x in unlabelled():
            chosen = select(self.passes(x, ids, step, student), self.settings)
            self.positive.write(ids, chosen.positive)
            self.negative.write(ids, chosen.negative)
            deviation.write(ids, chosen.u)
        if step // self.round_steps <= self.settings.balanced_rounds:
            self.positive.values.copy_(balance(self.positive.values > 0, deviation.values))
        student.model.load_state_dict(self.initial)

    def losses(self, views: Views, student: Student, teacher: Teacher, bank: MemoryBank | None) -> dict[str, Tensor]:
        if self.settings.mode == "online":
            chosen = select(self.passes(views.weak.x, views.ids_u, views.step, student), self.settings)
            positive, negative = chosen.positive, chosen.negative
        else:
            positive, negative = self.positive.values[views.ids_u] > 0, self.negative.values[views.ids_u] > 0
        labelled, strong = student(views.labelled, views.strong)
        y_u = positive.to(strong.logits.dtype)
        selected = (positive | negative).to(y_u.dtype)
        # Each row's mean over its selected classes, then the mean over the selected rows of all ranks.
        entries = selected.sum(1, keepdim=True)
        share = selected / entries.clamp(min=1)
        rows = all_sum_nograd((entries > 0).sum().to(y_u.dtype)).clamp(min=1) / world()
        loss_u = bce(strong.logits, y_u, share) * share.numel() / rows
        loss_b = bce(labelled.logits, views.y_b, views.weight_b)
        return {
            "loss": loss_b + self.settings.lambda_u * loss_u,
            "loss/b": loss_b,
            "loss/u": loss_u,
            "pseudo_labels": y_u,
            "weights": selected,
            "predictions": strong.logits.detach().sigmoid(),
        }

    def state_dict(self) -> dict[str, Tensor]:
        initial = {f"initial.{name}": tensor for name, tensor in self.initial.items()}
        return super().state_dict() | {"positive": self.positive.values, "negative": self.negative.values, **initial}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        super().load_state_dict(state)
        self.positive.values.copy_(state["positive"])
        self.negative.values.copy_(state["negative"])
        self.initial = {n.removeprefix("initial."): t for n, t in state.items() if n.startswith("initial.")}
