"""A second opinion for the committee: the trees' prediction, and how much it counts beside the networks'."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from ecgmatch_dist.distributed.collectives import from_rank_0
from ecgmatch_dist.evaluate import Predictions
from ecgmatch_dist.measurements.trees import MeasurementTrees
from ecgmatch_dist.metrics import macro_ap
from ecgmatch_dist.network.backbones.base import Output

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
EPSILON = 1e-6
Probabilities = Callable[[Tensor], Tensor]
"""Signals [b, 12, T] -> probabilities [b, C]."""


def mixture(p: Tensor, trees: Tensor, share: float | Tensor, normal: int | None) -> Tensor:
    """The networks' probabilities p [..., C] and the trees', by the share of the trees. `normal` is a class that stands beside
    no other one: its probability becomes the geometric mean of itself and of the chance of no other class."""
    p = torch.lerp(p, trees.to(p.dtype), share)
    if normal is None:
        return p
    is_normal = torch.arange(p.shape[-1], device=p.device) == normal
    no_other = torch.where(is_normal, 1, 1 - p).prod(-1, keepdim=True)
    return torch.where(is_normal, (p * no_other).sqrt(), p)


def as_measured(trees: Tensor) -> Tensor:
    """The trees' probabilities as `evaluate.predict` returns them: by way of logits, so none is 0 or 1."""
    return trees.logit(eps=EPSILON).sigmoid()


class Opinion:
    """The trees' prediction and its share. `fit` makes the trees, `predict` predicts a part of the split by a module on all
    ranks, `say` writes a line to the log. `normal`: the class that stands beside no other one, if there is one."""

    def __init__(
        self,
        fit: Callable[[], MeasurementTrees],
        predict: Callable[[nn.Module, str], Predictions],
        say: Callable[[str], None],
        normal: int | None = None,
    ) -> None:
        self._fit, self._predict, self._say, self.normal = fit, predict, say, normal

    def weigh(self, networks: Probabilities) -> None:
        """Fit the trees, and choose their share by the validation MAP of the mixture. A collective."""
        self.weigh_beside(self._predict(_Asked(networks), "validation"))

    def weigh_beside(self, networks: Predictions) -> Predictions:
        """The same beside predictions of the validation part. Returns the mixture's. A collective."""
        self.trees = self._fit()
        own = self._predict(_Asked(self.ask), "validation")
        p, trees = (torch.from_numpy(predictions.probabilities) for predictions in (networks, own))
        alone = [macro_ap(own.labels, each.numpy()) for each in (trees, p)]
        mixed = [mixture(p, trees, share, self.normal).numpy() for share in SHARES]
        scores = [macro_ap(own.labels, each) for each in mixed]
        chosen = int(from_rank_0(torch.tensor(np.argmax(scores))))
        self.share = SHARES[chosen]
        who = "trees on measurements" + (", and those that came with the weights," if self.trees.public else "")
        self._say(
            f"second opinion: {who} reach a validation MAP of {alone[0]:.4f}, the networks {alone[1]:.4f}; "
            f"their mean with a share of {self.share:.0%} trees {max(scores):.4f}"
        )
        return Predictions(own.labels, mixed[chosen], own.features)

    def beside(self, networks: Predictions, part: str) -> Predictions:
        """Predictions of a part, mixed with the trees'. A collective."""
        own = self._predict(_Asked(self.ask), part)
        p, trees = (torch.from_numpy(predictions.probabilities) for predictions in (networks, own))
        return Predictions(own.labels, mixture(p, trees, self.share, self.normal).numpy(), own.features)

    def ask(self, x: Tensor) -> Tensor:
        """The trees' probabilities of x [b, 12, T]: [b, C]."""
        return torch.from_numpy(self.trees.predict(x.cpu().numpy())).to(x.device, x.dtype)

    def mix(self, x: Tensor, p: Tensor) -> Tensor:
        """The networks' probabilities p [b, C] of x, mixed with the trees' by their share."""
        return mixture(p, self.ask(x) if self.share else p, self.share, self.normal)


class _Asked(nn.Module):
    """Probabilities as a network, for `evaluate.predict`."""

    def __init__(self, ask: Probabilities) -> None:
        super().__init__()
        self.ask = ask

    def forward(self, x: Tensor) -> Output:
        p = self.ask(x)
        return Output(p[:, :0], p.logit(eps=EPSILON))
