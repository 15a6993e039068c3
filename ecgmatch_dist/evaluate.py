"""Predictions of a whole part of the split, and the choice of the best model. Each rank computes its share and receives all."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ecgmatch_dist.data.stream import FiniteBatch
from ecgmatch_dist.distributed.collectives import all_gather, gather_uneven
from ecgmatch_dist.network.crops import over_crops
from ecgmatch_dist.network.student import autocast


@dataclass(frozen=True)
class Predictions:
    """Predictions of all n recordings of a part, in the order of the split; the same on every rank."""

    labels: NDArray[np.uint8]
    """[n, C]"""
    probabilities: NDArray[np.floating[Any]]
    """[n, C]"""
    features: NDArray[np.floating[Any]]
    """z, [n, D]"""


@dataclass
class Best:
    """The best model so far: highest validation MAP; of equal ones the later, as in the official code."""

    map: float = -1.0
    step: int = 0
    thresholds: list[float] = field(default_factory=list)
    checks_since: int = 0

    def update(self, step: int, map_: float, thresholds: list[float]) -> bool:
        if map_ < self.map:
            self.checks_since += 1
            return False
        self.map, self.step, self.thresholds, self.checks_since = map_, step, thresholds, 0
        return True


@torch.no_grad()
def predict_share(
    model: nn.Module,
    batches: Iterable[FiniteBatch],
    device: torch.device,
    dtype: torch.dtype,
    crop: int = 0,
    precision: str = "fp32",
) -> tuple[Tensor, Tensor]:
    """This rank's m recordings, without padding -> ids [m], and probabilities and features side by side [m, C + D].

    Computed in eval mode; the model's mode is restored. Without recordings the shapes are [0] and [0, 0].
    """
    training = model.training
    model.eval()
    ids, rows = [], []
    try:
        for batch in batches:
            if batch.valid.any():
                x = torch.from_numpy(batch.x[batch.valid]).to(device, non_blocking=True).to(dtype)
                with autocast(device, precision):
                    z, logits = (t.to(dtype) for t in over_crops(model, x, crop))
                ids.append(torch.from_numpy(batch.ids[batch.valid]))
                rows.append(torch.cat([logits.sigmoid(), z], 1))
    finally:
        model.train(training)
    if not rows:
        return torch.empty(0, dtype=torch.int64, device=device), torch.empty(0, 0, dtype=dtype, device=device)
    return torch.cat(ids).to(device), torch.cat(rows)


def predict(
    model: nn.Module,
    batches: Iterable[FiniteBatch],
    labels: NDArray[np.uint8],
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    crop: int = 0,
    precision: str = "fp32",
) -> Predictions:
    """Predict the batches of all ranks and gather the results. `labels` [n, C] of the whole part, by id. `crop`: `over_crops`;
    `precision`: as in training.

    Ranks may have any number of recordings, also none, but each recording must be on exactly one rank.
    """
    ids, rows = predict_share(model, batches, device, dtype, crop, precision)
    width = int(all_gather(torch.tensor(rows.shape[1], device=device)).max())  # unknown to a rank without rows
    ids = gather_uneven(ids, name="evaluate")
    rows = gather_uneven(rows.reshape(-1, width), name="evaluate")
    ids, order = ids.sort()
    n, classes = labels.shape
    assert torch.equal(ids.cpu(), torch.arange(n)), f"{len(ids)} predictions of {n} recordings, or some recording twice"
    values = rows[order].cpu().numpy()
    return Predictions(labels, values[:, :classes], values[:, classes:])
