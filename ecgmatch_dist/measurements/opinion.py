"""A second opinion for the committee: what advisers predict that are no networks, and how much it counts beside the networks'
prediction."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ecgmatch_dist.data.store import ShardStore
from ecgmatch_dist.distributed.collectives import from_rank_0
from ecgmatch_dist.evaluate import Predictions
from ecgmatch_dist.measurements.convolutions import fit_convolutions
from ecgmatch_dist.measurements.trees import fit_trees
from ecgmatch_dist.metrics import macro_ap
from ecgmatch_dist.network.backbones.base import Output

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
VOTES = {"trees": 2, "convolutions": 1}  # docs/experiments.md: how they were found
TITLES = {"trees": "trees on measurements", "convolutions": "random convolutions"}
FIT: dict[str, Callable[..., "Adviser"]] = {"trees": fit_trees, "convolutions": fit_convolutions}
Probabilities = Callable[[Tensor], Tensor]
"""Signals [b, 12, T] -> probabilities [b, C]."""


class Adviser(Protocol):
    """What predicts without a network."""

    def predict(self, signals: NDArray[np.floating], /) -> NDArray[np.float64]:
        """[n, 12, T] -> probabilities [n, C]."""


class Advisers:
    """One or several, by name, each with its votes."""

    def __init__(self, members: Mapping[str, Adviser]) -> None:
        self.members = members

    def __str__(self) -> str:
        return " and ".join(TITLES[name] for name in self.members)

    def predict(self, signals: NDArray[np.floating]) -> NDArray[np.float64]:
        """[n, 12, T] -> probabilities [n, C]: the weighted mean."""
        votes = sum(VOTES[name] for name in self.members)
        weighted = [VOTES[name] / votes * one.predict(signals) for name, one in self.members.items()]
        mean: NDArray[np.float64] = np.sum(weighted, axis=0)
        return mean


def fit_advisers(
    names: Sequence[str], store: ShardStore, rows: NDArray[np.int64], labels: NDArray[np.uint8], seed: int
) -> Advisers:
    """Fitted to these rows of the shards. A collective."""
    return Advisers({name: FIT[name](store, rows, labels, seed) for name in names})


class Opinion:
    """The advisers' prediction and its share. `fit` makes them, `validate` predicts the validation part by a module on
    all ranks, `say` writes a line to the log."""

    def __init__(
        self,
        fit: Callable[[], Advisers],
        validate: Callable[[nn.Module], Predictions],
        say: Callable[[str], None],
    ) -> None:
        self._fit, self._validate, self._say = fit, validate, say

    def weigh(self, networks: Probabilities) -> None:
        """Fit the advisers, and choose their share by the validation MAP of the mixture. A collective."""
        self.advisers = self._fit()
        theirs, own = (self._validate(_Asked(ask)) for ask in (networks, self.ask))
        maps = [
            macro_ap(own.labels, (1 - share) * theirs.probabilities + share * own.probabilities) for share in SHARES
        ]
        self.share = SHARES[int(from_rank_0(torch.tensor(np.argmax(maps))))]
        self._say(
            f"second opinion: {self.advisers} reach a validation MAP of {maps[-1]:.4f}, "
            f"the networks {maps[0]:.4f}; mixed, with a share of {self.share:.0%} for the second opinion, {max(maps):.4f}"
        )

    def ask(self, x: Tensor) -> Tensor:
        """The advisers' probabilities of x [b, 12, T]: [b, C]."""
        return torch.from_numpy(self.advisers.predict(x.cpu().numpy())).to(x.device, x.dtype)

    def mix(self, x: Tensor, p: Tensor) -> Tensor:
        """The networks' probabilities p [b, C] of x, mixed with the advisers' by their share."""
        return p if self.share == 0 else (1 - self.share) * p + self.share * self.ask(x)


class _Asked(nn.Module):
    """Probabilities as a network, for `evaluate.predict`."""

    def __init__(self, ask: Probabilities) -> None:
        super().__init__()
        self.ask = ask

    def forward(self, x: Tensor) -> Output:
        p = self.ask(x)
        return Output(p[:, :0], p.logit(eps=1e-6))
