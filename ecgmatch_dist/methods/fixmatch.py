"""FixMatch (Sohn et al. 2020): confident predictions of the weak view are hard pseudo-labels of the strong view."""

from dataclasses import dataclass

from torch import Tensor

from ecgmatch_dist.bank.memory import MemoryBank
from ecgmatch_dist.losses import bce
from ecgmatch_dist.methods.advised import Advised, AdvisedSettings
from ecgmatch_dist.methods.binary import confidence, hard
from ecgmatch_dist.methods.views import Views
from ecgmatch_dist.network.backbones.base import Output
from ecgmatch_dist.network.student import Student
from ecgmatch_dist.network.teacher import Teacher


@dataclass(frozen=True)
class FixMatchSettings(AdvisedSettings):
    """Hard pseudo-labels above a fixed confidence."""

    name, title, place = "fixmatch", "FixMatch", 20
    threshold: float = 0.95
    """tau: positives have p >= tau, negatives p <= 1 - tau."""
    lambda_u: float = 1.0
    """Weight of the pseudo-label loss."""


def pseudo_label_losses(
    views: Views, labelled: Output, strong: Output, y_u: Tensor, weights: Tensor, p: Tensor, lambda_u: float
) -> dict[str, Tensor]:
    """The losses of methods that train the strong view with weighted pseudo-labels: L_b + lambda_u mean(weights bce).

    `y_u`, `weights` and the weak view's probabilities `p` are [U, C]. The mean counts the entries of weight 0.
    """
    loss_b, loss_u = bce(labelled.logits, views.y_b, views.weight_b), bce(strong.logits, y_u, weights)
    return {
        "loss": loss_b + lambda_u * loss_u,
        "loss/b": loss_b,
        "loss/u": loss_u,
        "pseudo_labels": y_u,
        "weights": weights,
        "predictions": p,
    }


class FixMatch(Advised[FixMatchSettings], settings=FixMatchSettings):
    """Confident means p >= tau or p <= 1 - tau."""

    def losses(self, views: Views, student: Student, teacher: Teacher, bank: MemoryBank | None) -> dict[str, Tensor]:
        labelled, weak, strong = student(views.labelled, views.weak, views.strong)
        p = weak.logits.detach().sigmoid()
        guess = self.advised(views.ids_u, p)
        y_u, mask = hard(guess), (confidence(guess) >= self.settings.threshold).to(p.dtype)
        return pseudo_label_losses(views, labelled, strong, y_u, mask, p, self.settings.lambda_u)
