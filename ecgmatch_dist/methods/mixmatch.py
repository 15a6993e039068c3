"""MixMatch (Berthelot et al. 2019), and Mixed Mean Teacher (Zhang et al. 2022), in which the teacher guesses."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ecgmatch_dist import keyed
from ecgmatch_dist.bank.memory import MemoryBank
from ecgmatch_dist.losses import bce
from ecgmatch_dist.methods.advised import Advised, AdvisedSettings
from ecgmatch_dist.methods.binary import sharpen
from ecgmatch_dist.methods.mixing import permute_rows
from ecgmatch_dist.methods.views import View, Views
from ecgmatch_dist.network.student import Mode, Student
from ecgmatch_dist.network.teacher import Teacher

LAMBDA_STREAM = 24  # of keyed.py
TRIES = 16  # of Jöhnk's rejection; at alpha = 0.75, all of them fail once in ten million draws


@dataclass(frozen=True)
class MixMatchSettings(AdvisedSettings):
    """The sharpened mean guess of two weak views; every row is mixed with a random other row."""

    name, title, place = "mixmatch", "MixMatch", 10
    temperature: float = 0.5
    """Temperature of the sharpening; 1: none."""
    alpha: float = 0.75
    """Parameter of the Beta distribution of the mixing coefficient."""
    lambda_u: float = 75.0
    """Weight of the squared error, reached at the end of the ramp."""
    ramp: float = 0.4
    """Share of the steps over which the weight grows; at most 16,384 steps."""
    guess: Literal["train_frozen", "eval"] = "train_frozen"
    """BatchNorm while guessing: statistics of the batch, without updating the running ones (train_frozen), or the running ones
    (eval)."""


def beta(keys: Tensor, alpha: float) -> Tensor:
    """Beta(alpha, alpha) for each key, [b], by Jöhnk's method: U^(1/a) / (U^(1/a) + V^(1/a)) where the sum is at most 1."""
    powers = keyed.uniform(keys, 2 * TRIES, LAMBDA_STREAM).double().pow(1 / alpha)
    u, v = powers[:, :TRIES], powers[:, TRIES:]
    first = (u + v <= 1).int().argmax(1, keepdim=True)  # the first accepted try
    u, v = u.gather(1, first), v.gather(1, first)
    return (u / (u + v))[:, 0]


class MixMatch(Advised[MixMatchSettings], settings=MixMatchSettings):
    """Rows: the labelled ones, and two weak views of the unlabelled ones, both with the sharpened mean guess as label. Each row
    is mixed with a random row of the global batch."""

    def guess(self, views: Views, student: Student, teacher: Teacher) -> Tensor:
        """[U, C]: the mean of two weak views' probabilities."""
        mode: Mode = "batch" if self.settings.guess == "train_frozen" else "eval"
        both = torch.cat([views.weak.x, views.weak_again.x])
        keys = torch.cat([views.weak.keys, views.weak_again.keys])
        first, second = student.infer(both, keys, mode).logits.sigmoid().chunk(2)
        return (first + second) / 2

    def losses(self, views: Views, student: Student, teacher: Teacher, bank: MemoryBank | None) -> dict[str, Tensor]:
        settings = self.settings
        p = self.guess(views, student, teacher)
        y_u = sharpen(self.advised(views.ids_u, p), settings.temperature)
        parts = (views.labelled, views.weak, views.weak_again)
        x, keys = torch.cat([v.x for v in parts]), torch.cat([v.keys for v in parts])
        y = torch.cat([views.y_b, y_u, y_u])

        sizes = [len(view.x) for view in parts]
        x_other, y_other = permute_rows((x, y), sizes, views.seed, views.step)
        lam = beta(keys, settings.alpha).to(x.dtype)
        lam = torch.maximum(lam, 1 - lam)
        x = torch.lerp(x_other, x, lam[:, None, None])
        y = torch.lerp(y_other, y, lam[:, None])

        (mixed,) = student(View(x, keys))
        b = sizes[0]
        weight_b = views.weight_b
        errors = mixed.logits[b:].sigmoid() - y[b:]
        if weight_b is not None:  # a label that was mixed with an unknown one is unknown (NaN)
            weight_b = torch.where(y[:b].isnan(), 0.0, weight_b)
            errors = torch.where(y[b:].isnan(), 0.0, errors)
        loss_b = bce(mixed.logits[:b], y[:b], weight_b)
        loss_u = errors.square().mean()
        ramp = min(16384.0, settings.ramp * self.task.steps)
        return {
            "loss": loss_b + settings.lambda_u * min(1.0, views.step / ramp) * loss_u,
            "loss/b": loss_b,
            "loss/u": loss_u,
            "pseudo_labels": y_u,
            "weights": torch.ones_like(y_u),
            "predictions": p,
        }


@dataclass(frozen=True)
class MixedMeanTeacherSettings(MixMatchSettings):
    """MixMatch with the guesses of the moving-average teacher. A reconstruction from the abstract."""

    name, title, place = "mixed_mean_teacher", "Mixed Mean Teacher", 30


class MixedMeanTeacher(MixMatch, settings=MixedMeanTeacherSettings):
    """MixMatch with the teacher's guesses."""

    def guess(self, views: Views, student: Student, teacher: Teacher) -> Tensor:
        return (teacher.infer(views.weak.x).logits.sigmoid() + teacher.infer(views.weak_again.x).logits.sigmoid()) / 2
