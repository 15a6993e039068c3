"""Randomised trees from measurements to diagnoses, one forest per class.

scikit-learn grows them on rank 0. All ranks predict from the same plain arrays: machines that round differently would grow
different trees, and the ranks would disagree."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ecgmatch_dist.data.labels import UNKNOWN
from ecgmatch_dist.data.store import ShardStore
from ecgmatch_dist.distributed.collectives import from_rank_0, gather_uneven, rank, world
from ecgmatch_dist.measurements.measure import measure_all

FOREST = {"n_estimators": 300, "min_samples_leaf": 2, "max_features": 0.5}
PUBLISHED = {"n_estimators": 60, "min_samples_leaf": 5, "max_features": 0.5}
"""Of trees that come with a model: 2.5 MB for 6,000 labels, instead of 18."""
READ = 256  # recordings in memory at once while they are measured
DESCENDING = 5_000_000  # pairs of a tree and a recording at once


class Forests(NamedTuple):
    """The nodes of all trees of all classes. A leaf is its own child."""

    feature: NDArray[np.int32]
    """[M] measurement that a node looks at."""
    threshold: NDArray[np.float64]
    """[M] up to it, go left."""
    left: NDArray[np.int32]
    right: NDArray[np.int32]
    """[M] children."""
    share: NDArray[np.float64]
    """[M] share of the positive recordings in a node."""
    roots: NDArray[np.int32]
    """[R] first node of each tree, class by class."""
    trees: NDArray[np.int32]
    """[C] number of trees of each class."""


class PublicTrees(NamedTuple):
    """Trees of another database, which has more labels. They come with the model that a chain begins with."""

    forests: Forests
    same_classes: bool
    """Whether their classes are those of the run. If not, what they say is a measurement and no opinion."""

    @property
    def learnt(self) -> NDArray[np.bool_]:
        """[C] classes that they tell apart. Of the others their recordings were all alike, or not annotated: one leaf."""
        forests = self.forests
        grown = forests.left[forests.roots] != forests.roots
        found: NDArray[np.bool_] = np.logical_or.reduceat(grown, np.cumsum([0, *forests.trees[:-1]]))
        return found


class MeasurementTrees:
    """Predicts signals of one sampling rate. What public trees say of a class is one more measurement; where they know the same
    classes, the prediction is the mean of both."""

    def __init__(self, forests: Forests, rate: float, public: PublicTrees | None = None) -> None:
        self.forests, self.rate, self.public = forests, rate, public

    def predict(self, signals: NDArray[np.floating]) -> NDArray[np.float64]:
        """[n, 12, T] -> probabilities [n, C]."""
        rows = measure_all(signals, self.rate)
        if self.public is None:
            return descend(self.forests, rows)
        theirs = descend(self.public.forests, rows)
        own = descend(self.forests, with_answers(rows, theirs))
        return np.where(self.public.learnt, (own + theirs) / 2, own) if self.public.same_classes else own


def with_answers(rows: NDArray[np.float32], theirs: NDArray[np.float64]) -> NDArray[np.float32]:
    """Measurements [n, F], and what public trees say of them [n, C'] -> [n, F + C']."""
    return np.hstack([rows, theirs.astype(np.float32)])


def grow(
    rows: NDArray[np.float32],
    labels: NDArray[np.uint8],
    seed: int,
    threads: int = 1,
    settings: Mapping[str, float] = FOREST,
) -> Forests:
    """Forests fitted to measurements [n, F] with labels [n, C] in {0, 1, UNKNOWN}."""
    from sklearn.ensemble import ExtraTreesClassifier  # slow to import, and few runs ask trees

    parts: list[Forests] = []
    for column in labels.T:
        looked = column != UNKNOWN  # where nobody has looked for the class, the recording does not count
        y = column[looked]
        if not 0 < y.sum() < len(y):  # nothing to learn: a leaf with the class's frequency
            parts.append(_leaf(float(y.sum() + 0.5) / (len(y) + 1)))
            continue
        forest = ExtraTreesClassifier(**settings, random_state=seed, n_jobs=threads).fit(rows[looked], y)
        parts.append(_join([_nodes(tree.tree_) for tree in forest.estimators_], one_class=True))
    return _join(parts)


def descend(forests: Forests, rows: NDArray[np.float32]) -> NDArray[np.float64]:
    """Measurements [n, F] -> probabilities [n, C]: the mean share of the leaves of a class's trees."""
    step = max(1, min(READ, DESCENDING // len(forests.roots)))
    blocks = [_descend(forests, rows[i : i + step]) for i in range(0, len(rows), step)]
    return np.concatenate(blocks) if blocks else np.empty((0, len(forests.trees)))


def _descend(forests: Forests, rows: NDArray[np.float32]) -> NDArray[np.float64]:
    node = np.repeat(forests.roots[:, None], len(rows), 1)  # [R, n]
    number = np.arange(len(rows))
    while True:
        goes_left = rows[number, forests.feature[node]] <= forests.threshold[node]
        below = np.where(goes_left, forests.left[node], forests.right[node])
        if np.array_equal(below, node):
            break
        node = below
    ends = np.cumsum(forests.trees)
    shares = forests.share[node]
    # Tree after tree, as scikit-learn adds: the same bits, however many rows there are.
    return np.stack([sum(shares[end - n : end]) / n for end, n in zip(ends, forests.trees, strict=True)], 1)


def fit_trees(
    store: ShardStore,
    rows: NDArray[np.int64],
    labels: NDArray[np.uint8],
    seed: int,
    public: PublicTrees | None = None,
    settings: Mapping[str, float] = FOREST,
) -> MeasurementTrees:
    """Trees fitted to these rows of the shards, the same on every rank. Each rank measures its share of the recordings; rank 0
    grows the trees, by as many threads as torch computes with. A collective."""
    rate = store.preprocess.rate
    mine = np.array_split(rows, world())[rank()]
    read = range(0, max(len(mine), 1), READ)  # fewer recordings than ranks: none of them, with their measurements
    pieces = [measure_all(store.read(mine[i : i + READ]) if len(mine) else (), rate) for i in read]
    measured = gather_uneven(torch.from_numpy(np.concatenate(pieces))).numpy()
    grown = None
    if rank() == 0:
        seen = with_answers(measured, descend(public.forests, measured)) if public else measured
        grown = grow(seen, labels, seed, torch.get_num_threads(), settings)
    return MeasurementTrees(shared(grown), rate, public)


def shared(forests: Forests | None) -> Forests:
    """Rank 0's forests on every rank. A collective."""
    own: tuple[NDArray[Any], ...] = forests or _leaf(0.0)
    lengths = from_rank_0(torch.tensor([len(array) for array in own])).tolist()
    arrays = (np.resize(array, length) for array, length in zip(own, lengths, strict=True))  # of rank 0: as they are
    return Forests(*(from_rank_0(torch.from_numpy(array)).numpy() for array in arrays))


def _leaf(share: float) -> Forests:
    """One tree that is a leaf."""
    zero = np.zeros(1, np.int32)
    return Forests(zero, np.zeros(1), zero, zero, np.array([share]), zero, zero + 1)


def _nodes(tree: Any) -> Forests:
    """One of scikit-learn's trees. It marks a leaf by children of -1."""
    count: int = tree.node_count
    own = np.arange(count, dtype=np.int32)
    leaf = tree.children_left < 0
    zero = np.zeros(1, np.int32)
    return Forests(
        np.where(leaf, 0, tree.feature).astype(np.int32),
        tree.threshold.copy(),
        np.where(leaf, own, tree.children_left).astype(np.int32),
        np.where(leaf, own, tree.children_right).astype(np.int32),
        tree.value[:, 0, 1].copy(),
        zero,
        zero + 1,
    )


def _join(parts: list[Forests], one_class: bool = False) -> Forests:
    """Forests of several classes, or several trees of one class."""
    starts = np.cumsum([0, *(len(part.feature) for part in parts[:-1])], dtype=np.int32)

    def moved(name: str) -> NDArray[np.int32]:
        return np.concatenate([getattr(part, name) + start for part, start in zip(parts, starts, strict=True)])

    trees = np.concatenate([part.trees for part in parts])
    return Forests(
        np.concatenate([part.feature for part in parts]),
        np.concatenate([part.threshold for part in parts]),
        moved("left"),
        moved("right"),
        np.concatenate([part.share for part in parts]),
        moved("roots"),
        trees.sum(keepdims=True, dtype=np.int32) if one_class else trees,
    )
