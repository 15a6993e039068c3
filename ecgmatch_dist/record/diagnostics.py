"""Diagnostics of pseudo-labels: how many are selected, their weights, and their average precision.

Precision is measured against the hidden labels of the unlabelled part, under names that begin with `hidden/`. It is only for
display: nothing in training reads it. Recordings that nobody has labelled have no part in it.
"""

import numpy as np
import torch
from sklearn.metrics import average_precision_score
from torch import Tensor

from ecgmatch_dist.data.labels import UNKNOWN
from ecgmatch_dist.distributed.collectives import gather_rows


class Diagnostics:
    """Collects the outputs [U, C] of the steps between two validations."""

    def __init__(self, classes: list[str], hidden: Tensor) -> None:
        """`hidden` [N_U, C]: labels that the method does not see; UNKNOWN where there are none."""
        self.classes, self.hidden = classes, hidden
        self.rows: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []

    def add(self, ids: Tensor, losses: dict[str, Tensor]) -> None:
        if "pseudo_labels" in losses:
            self.rows.append((ids, losses["pseudo_labels"], losses["weights"], losses["predictions"]))

    def summary(self) -> dict[str, float]:
        """Over the rows of all ranks since the last call; empty if the method makes no pseudo-labels."""
        if not self.rows:
            return {}
        ids, pseudo, weights, own = (gather_rows(torch.cat(column)) for column in zip(*self.rows, strict=True))
        self.rows.clear()
        truth = self.hidden[ids.cpu()].numpy()
        out: dict[str, float] = {}
        for c, name in enumerate(self.classes):
            out[f"weight/{name}"] = float(weights[:, c].mean())
            out[f"positive_rate/{name}"] = float((pseudo[:, c] >= 0.5).float().mean())
            selected = weights[:, c] > 0
            out[f"selected/{name}/positive"] = float((selected & (pseudo[:, c] >= 0.5)).float().mean())
            out[f"selected/{name}/negative"] = float((selected & (pseudo[:, c] < 0.5)).float().mean())
            looked_at = truth[:, c] != UNKNOWN
            y = truth[looked_at, c]
            if 0 < y.sum() < len(y):
                out[f"hidden/pseudo_ap/{name}"] = _ap(y, pseudo[:, c].cpu()[looked_at])
                out[f"hidden/own_ap/{name}"] = _ap(y, own[:, c].cpu()[looked_at])
        for kind in ("pseudo", "own"):
            values = [value for name, value in out.items() if name.startswith(f"hidden/{kind}_ap/")]
            if values:
                out[f"hidden/{kind}_map"] = float(np.mean(values))
        return out


def _ap(truth: np.ndarray, score: Tensor) -> float:
    return float(average_precision_score(truth, score.float().cpu().numpy()))
