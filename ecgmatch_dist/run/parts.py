"""The recordings and labels of a run, part by part, as its method may see them."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ecgmatch_dist.config import MethodSettings
from ecgmatch_dist.data.archive import Archive
from ecgmatch_dist.data.labels import UNKNOWN, known
from ecgmatch_dist.data.order import Ints, Permutation
from ecgmatch_dist.data.split_file import Split
from ecgmatch_dist.data.store import ShardStore

FEWER = 2  # the draw of `data.unlabelled`; streams have the permutations of other parts


@dataclass(frozen=True)
class Parts:
    """The parts "labelled", "unlabelled", "validation" and "test" of a run."""

    store: ShardStore
    archive: Archive
    """Unlabelled recordings that are not in the split; their ids follow those of the split's unlabelled part."""
    labels: dict[str, NDArray[np.uint8]]
    """[n, C] of each part: 1, 0 or UNKNOWN."""
    rows: dict[str, Ints]
    """[n] of each part: its rows in the store; those of the archive have none."""

    def ids(self, part: str, places: Ints | None = None) -> list[str]:
        """database/key of the recordings of a part, or of those at some places of its list; those of the archive follow."""
        rows, more = self.rows[part], self.archive.names if part == "unlabelled" else []
        if places is None:
            return self.store.ids(rows) + more
        return [self.store.ids(rows[[i]])[0] if i < len(rows) else more[i - len(rows)] for i in places.tolist()]

    def targets(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Labels of the labelled part on the device, [N_B, C]; NaN where nobody has looked."""
        y = torch.from_numpy(self.labels["labelled"]).to(device, dtype)
        return y.masked_fill(y == UNKNOWN, torch.nan)


def parts_of(split: Split, store: ShardStore, archive: Archive, unlabelled: int = 0) -> Parts:
    """The parts as the split has them, but at most so many of the unlabelled recordings; 0: all."""
    rows = split.rows(store)
    labels = split.all_labels(store, rows)
    if 0 < unlabelled < len(rows["unlabelled"]):
        # The first of a shuffled list, so that a larger number adds to those of a smaller one.
        shuffled = Permutation(len(rows["unlabelled"]), split.seed, epoch=0, part=FEWER)
        kept = np.sort(shuffled(np.arange(unlabelled)))
        rows["unlabelled"], labels["unlabelled"] = rows["unlabelled"][kept], labels["unlabelled"][kept]
    return Parts(store, archive, labels, rows)


def as_seen_by(method: MethodSettings, parts: Parts) -> Parts:
    """The parts as the method may see them, with the archive at the end of the unlabelled part."""
    labels, rows = dict(parts.labels), dict(parts.rows)

    def joined(which: NDArray[np.bool_]) -> tuple[Ints, NDArray[np.uint8]]:
        """The labelled part, followed by these rows of the unlabelled part."""
        return (
            np.concatenate([rows["labelled"], rows["unlabelled"][which]]),
            np.concatenate([labels["labelled"], labels["unlabelled"][which]]),
        )

    if method.knows_all_labels:
        rows["labelled"], labels["labelled"] = joined(known(labels["unlabelled"]))
    if not method.needs_labels:  # it sees the signals of the whole training part, not validation and test
        rows["unlabelled"], labels["unlabelled"] = joined(np.ones(len(rows["unlabelled"]), bool))
    nobody_knows = np.full((len(parts.archive), labels["unlabelled"].shape[1]), UNKNOWN, np.uint8)
    labels["unlabelled"] = np.concatenate([labels["unlabelled"], nobody_knows])
    return Parts(parts.store, parts.archive, labels, rows)
