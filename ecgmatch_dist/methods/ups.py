"""UPS (Rizve et al. 2021): pseudo-labels that are both confident and certain, where certain means stable under dropout."""

from typing import NamedTuple

import torch
from torch import Tensor

from ecgmatch_dist import keyed
from ecgmatch_dist.bank import MemoryBank
from ecgmatch_dist.distributed import all_sum_nograd, world
from ecgmatch_dist.losses import bce
from ecgmatch_dist.methods.base import Pass, Simple, View, Views
from ecgmatch_dist.methods.configs import UPS as Settings
from ecgmatch_dist.methods.table import Table
from ecgmatch_dist.student import Student
from ecgmatch_dist.teacher import Teacher

FLOOR = 25  # positives that the balance leaves to every class
FIRST_PASS = 16  # views 16, 17, ... are the passes with dropout


class Selection(NamedTuple):
    """Of some rows, each [n, C]: mean probability, its deviation, and which entries are selected positives and negatives."""

    p: Tensor
    u: Tensor
    positive: Tensor
    negative: Tensor


def select(logits: Tensor, a: Settings) -> Selection:
    """Logits [F, n, C] of F passes with dropout -> what is confident and certain. Bounds as in the authors' code."""
    p, softened = logits.sigmoid(), (logits / a.temperature_n).sigmoid()
    mean, u = p.mean(0), p.std(0)
    positive = (mean >= a.tau_p) & (u < a.kappa_p)
    negative = (softened.mean(0) < a.tau_n) & (softened.std(0) < a.kappa_n)
    return Selection(mean, u, positive, negative & ~positive)


def balance(positive: Tensor, u: Tensor) -> Tensor:
    """Keep as many positives of each class as the rarest has, but at least FLOOR, the most certain ones: [N, C] -> [N, C]."""
    count = max(FLOOR, int(positive.sum(0).min()))
    rank = torch.where(positive, u, torch.inf).argsort(dim=0, stable=True).argsort(0)
    kept: Tensor = positive & (rank < count)
    return kept


class UPS(Simple):
    """Rounds: train; select over the whole unlabelled part; begin again from the starting weights with labelled and selected
    rows. Only the last round's validations count. The optimiser's momentum is kept across rounds. Online: select in the batch.

    State: pseudo-labels and selection of every unlabelled ECG, and the starting weights.
    """

    uses_unlabelled = True
    uses_bank = False

    def __init__(
        self, settings: Settings, rows: int, classes: int, steps: int, seed: int, device: torch.device
    ) -> None:
        self.settings, self.seed = settings, seed
        self.length = -(-steps // settings.rounds) if settings.mode == "rounds" else steps  # steps a round
        self.counts_from = (settings.rounds - 1) * self.length if settings.mode == "rounds" else 0
        self.positive, self.negative = (Table(rows, classes, 0, torch.int8, device) for _ in range(2))
        self.initial: dict[str, Tensor] = {}

    def passes(self, x: Tensor, ids: Tensor, step: int, student: Student) -> Tensor:
        """[F, n, C]: logits with dropout, keyed by step, pass and row."""
        keys = [keyed.row_keys(self.seed, step, FIRST_PASS + f, ids) for f in range(self.settings.passes)]
        return torch.stack([student.look(x, k, "dropout").logits for k in keys])

    def prepare(self, step: int, student: Student, bank: MemoryBank | None, unlabelled: Pass) -> None:
        if self.settings.mode == "online" or step % self.length:
            return
        if step == 0:
            self.initial = {name: t.detach().clone() for name, t in student.model.state_dict().items()}
            return
        deviation = Table(len(self.positive.values), self.positive.values.shape[1], 0.0, torch.float64, student.device)
        for ids, x in unlabelled():
            chosen = select(self.passes(x, ids, step, student), self.settings)
            self.positive.write(ids, chosen.positive)
            self.negative.write(ids, chosen.negative)
            deviation.write(ids, chosen.u)
        if step // self.length <= self.settings.balanced_rounds:
            self.positive.values.copy_(balance(self.positive.values > 0, deviation.values))
        student.model.load_state_dict(self.initial)

    def losses(self, views: Views, student: Student, teacher: Teacher, bank: MemoryBank | None) -> dict[str, Tensor]:
        if self.settings.mode == "online":
            chosen = select(self.passes(views.weak.x, views.ids_u, views.step, student), self.settings)
            positive, negative = chosen.positive, chosen.negative
        else:
            positive, negative = self.positive.values[views.ids_u] > 0, self.negative.values[views.ids_u] > 0
        labelled, strong = student(views.labelled, View(views.strong.x, views.strong.keys))
        y_u = positive.to(strong.logits.dtype)
        g = (positive | negative).to(y_u.dtype)
        # The mean over the selected rows of all ranks, of each row's mean over its selected classes.
        entries = g.sum(1, keepdim=True)
        share = g / entries.clamp(min=1)
        rows = all_sum_nograd((entries > 0).sum().to(y_u.dtype)).clamp(min=1) / world()
        loss_u = bce(strong.logits, y_u, share) * share.numel() / rows
        loss_b = bce(labelled.logits, views.y_b)
        own = strong.logits.detach().sigmoid()
        loss = loss_b + self.settings.lambda_u * loss_u
        return {
            "loss": loss,
            "loss/b": loss_b,
            "loss/u": loss_u,
            "pseudo_labels": y_u,
            "weights": g,
            "predictions": own,
        }

    def state_dict(self) -> dict[str, Tensor]:
        initial = {f"initial.{name}": tensor for name, tensor in self.initial.items()}
        return {"positive": self.positive.values, "negative": self.negative.values, **initial}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.positive.values.copy_(state["positive"])
        self.negative.values.copy_(state["negative"])
        self.initial = {n.removeprefix("initial."): t for n, t in state.items() if n.startswith("initial.")}
