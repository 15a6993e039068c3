"""MixMatch (Berthelot et al. 2019), and Mixed Mean Teacher (Zhang et al. 2022) which takes its guesses from the teacher."""

import torch
from torch import Tensor

from ecgmatch_dist import keyed
from ecgmatch_dist.bank import MemoryBank
from ecgmatch_dist.losses import bce
from ecgmatch_dist.methods.base import Simple, View, Views
from ecgmatch_dist.methods.configs import MixedMeanTeacher
from ecgmatch_dist.methods.configs import MixMatch as Settings
from ecgmatch_dist.methods.lift import sharpen
from ecgmatch_dist.methods.partners import partners
from ecgmatch_dist.student import Mode, Student
from ecgmatch_dist.teacher import Teacher

LAMBDA_STREAM = 24
TRIES = 16  # of Jöhnk's rejection; at alpha = 0.75 all fail once in ten million


def beta(keys: Tensor, alpha: float) -> Tensor:
    """Beta(alpha, alpha) for each key, [b], by Jöhnk's method: U^(1/a) / (U^(1/a) + V^(1/a)) where the sum is at most 1."""
    powers = keyed.uniform(keys, 2 * TRIES, LAMBDA_STREAM).double().pow(1 / alpha)
    u, v = powers[:, :TRIES], powers[:, TRIES:]
    first = (u + v <= 1).int().argmax(1, keepdim=True)  # the first accepted try
    u, v = u.gather(1, first), v.gather(1, first)
    return (u / (u + v))[:, 0]


class MixMatch(Simple):
    """Rows: labelled, and two weak views of the unlabelled, both with the sharpened mean guess. Each is mixed with a row drawn
    from all of them, of all ranks."""

    uses_unlabelled = True
    uses_bank = False

    def __init__(self, settings: Settings, steps: int) -> None:
        self.settings, self.steps = settings, steps

    def guess(self, views: Views, student: Student, teacher: Teacher) -> Tensor:
        """[U, C]: the mean of two weak views' probabilities."""
        if isinstance(self.settings, MixedMeanTeacher):
            return (teacher.look(views.weak.x).logits.sigmoid() + teacher.look(views.weak_again.x).logits.sigmoid()) / 2
        mode: Mode = "batch" if self.settings.guess == "train_frozen" else "eval"
        both = torch.cat([views.weak.x, views.weak_again.x])
        keys = torch.cat([views.weak.keys, views.weak_again.keys])
        first, second = student.look(both, keys, mode).logits.sigmoid().chunk(2)
        return (first + second) / 2

    def losses(self, views: Views, student: Student, teacher: Teacher, bank: MemoryBank | None) -> dict[str, Tensor]:
        settings = self.settings
        p = self.guess(views, student, teacher)
        y_u = sharpen(p, settings.temperature)
        parts = (views.labelled, views.weak, views.weak_again)
        x, keys = torch.cat([v.x for v in parts]), torch.cat([v.keys for v in parts])
        y = torch.cat([views.y_b, y_u, y_u])

        sizes = [len(view.x) for view in parts]
        x_other, y_other = partners((x, y), sizes, views.seed, views.step)
        lam = beta(keys, settings.alpha).to(x.dtype)
        lam = torch.maximum(lam, 1 - lam)
        x = torch.lerp(x_other, x, lam[:, None, None])
        y = torch.lerp(y_other, y, lam[:, None])

        (mixed,) = student(View(x, keys))
        b = sizes[0]
        loss_b = bce(mixed.logits[:b], y[:b])
        loss_u = (mixed.logits[b:].sigmoid() - y[b:]).square().mean()
        ramp = min(16384.0, settings.ramp * self.steps)
        return {
            "loss": loss_b + settings.lambda_u * min(1.0, views.step / ramp) * loss_u,
            "loss/b": loss_b,
            "loss/u": loss_u,
            "pseudo_labels": y_u,
            "weights": torch.ones_like(y_u),
            "predictions": p,
        }
