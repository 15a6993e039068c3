"""The model that grows with the answers, its learning curve by cross-validation, and the labels that it doubts.

On ECG measurements one forest for all classes. On the frozen features of a network a regularised linear head, the forest, or
the mean of both: which, says the cross-validation. Legend: n answered recordings, N all, F features, C classes. Labels are 0, 1
or UNKNOWN.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.ensemble import ExtraTreesRegressor
from sklearn.linear_model import RidgeCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from ecgmatch_dist.data.labels import UNKNOWN, known
from ecgmatch_dist.forecast import Forecast, Range, forecast
from ecgmatch_dist.label.space import Floats, Points
from ecgmatch_dist.metrics import macro_ap

Labels = NDArray[np.uint8]
TREES = 100
FOLDS = 5
SHARES = (0.3, 0.45, 0.6, 0.8, 1.0)
"""Of the answers, in their order: the points of the learning curve."""
TREES_IN_FOLDS = 40
RESAMPLES = 200
DOUBTED = 10
"""One in so many labels is doubted at most."""
LEAST = 20
"""Answers for a cross-validation."""
PENALTIES = np.logspace(1, 5, 9)
"""Of the linear head; each class takes the one that predicts best when a recording is left out."""
Fit = Callable[[Floats, Labels, int, int], Any]
"""Features [n, F], labels [n, C], a seed, trees -> something whose `predict` gives [m, C]."""


@dataclass(frozen=True)
class Doubt:
    """A label that the model does not believe, seen from recordings other than this one."""

    row: int
    """Of the answers."""
    class_: int
    label: int
    probability: float


@dataclass(frozen=True, eq=False)
class Grown:
    """A model and what it is worth."""

    answers: int
    probabilities: Points
    """[N, C]"""
    curve: tuple[tuple[int, Range], ...] = ()
    """Answers that were learnt from, and the MAP that they reach on others."""
    fit: Forecast | None = None
    doubts: tuple[Doubt, ...] = field(default=())
    model: str = "forest"
    """A name of `MODELS`."""


def fit_forest(features: Floats, labels: Labels, seed: int, trees: int = TREES) -> ExtraTreesRegressor:
    """Trees that predict all classes at once: with few labels as good as a forest per class, at a fifth of the time."""
    forest = ExtraTreesRegressor(trees, min_samples_leaf=2, max_features=0.2, random_state=seed)
    return forest.fit(features, targets(labels))


def fit_linear(features: Floats, labels: Labels, seed: int = 0, trees: int = 0) -> Any:
    """Ridge regression of all classes: what is left out is computed in closed form, so the penalty costs nothing to choose."""
    return make_pipeline(StandardScaler(), RidgeCV(PENALTIES, alpha_per_target=True)).fit(features, targets(labels))


MODELS: dict[str, tuple[Fit, ...]] = {
    "forest": (fit_forest,),
    "linear head": (fit_linear,),
    "linear head and forest": (fit_linear, fit_forest),
}
"""Each is the mean of its parts."""


def targets(labels: Labels) -> Floats:
    """Where a class is unknown, it counts with its frequency. scikit-learn wants no last axis of a single class."""
    looked = labels != UNKNOWN
    share = (np.where(looked, labels, 0).sum(0) + 0.5) / (looked.sum(0) + 1)
    found = np.where(looked, labels, share)
    return found if found.shape[1] > 1 else found[:, 0]


def learn(
    model: str, features: Floats, labels: Labels, seed: int = 0, trees: int = TREES
) -> Callable[[Floats], Points]:
    """Fit a model of `MODELS`: a function from features [m, F] to probabilities [m, C]."""
    parts = [fit(features, labels, seed, trees) for fit in MODELS[model]]

    def predict(some: Floats) -> Points:
        each = [np.asarray(part.predict(some), np.float32).reshape(len(some), labels.shape[1]) for part in parts]
        found: Points = np.clip(np.mean(each, 0), 0, 1)
        return found

    return predict


def grow(
    features: Floats, rows: NDArray[np.int64], labels: Labels, seed: int = 0, models: tuple[str, ...] = ("forest",)
) -> Grown:
    """Learn from the labels [n, C] of these rows, in the order in which they were given, of all features [N, F]. Of several
    `models`, the one that is best by cross-validation."""
    looked = known(labels)
    own, y = features[rows[looked]], labels[looked]
    if len(y) < LEAST:
        return Grown(len(y), learn(models[0], own, y, seed)(features), model=models[0])
    model = best_model(own, y, seed, models)
    curve, beside = learning_curve(own, y, seed, model=model)
    sizes = [n for n, _ in curve]
    place = np.flatnonzero(looked)
    doubts = [Doubt(int(place[d.row]), d.class_, d.label, d.probability) for d in doubted(y, beside)]
    fit = forecast(sizes, [at.value for _, at in curve], seed)
    return Grown(len(y), learn(model, own, y, seed)(features), tuple(curve), fit, tuple(doubts), model)


def best_model(features: Floats, labels: Labels, seed: int, models: tuple[str, ...]) -> str:
    """The model with the best MAP by cross-validation; with one to choose from, that one."""
    if len(models) == 1:
        return models[0]
    scores = {name: learning_curve(features, labels, seed, (1.0,), name)[0][0][1].value for name in models}
    return max(scores, key=lambda name: scores[name])


def learning_curve(
    features: Floats, labels: Labels, seed: int, shares: tuple[float, ...] = SHARES, model: str = "forest"
) -> tuple[list[tuple[int, Range]], Points]:
    """MAP of models that learnt from the first answers, always measured on all of them, each predicted by a model that has not
    seen it; and these predictions of the last model [n, C]."""
    n, c = labels.shape
    fold = np.random.default_rng([seed, 1]).permutation(n) % FOLDS
    curve = []
    p = np.zeros((n, c), np.float32)
    for share in shares:
        for k in range(FOLDS):
            train = np.flatnonzero(fold != k)
            train = train[: max(round(share * len(train)), 1)]
            p[fold == k] = learn(model, features[train], labels[train], seed, TREES_IN_FOLDS)(features[fold == k])
        curve.append((round(share * n * (1 - 1 / FOLDS)), map_interval(labels, p, seed)))
    return curve, p


def map_interval(labels: Labels, p: Points, seed: int) -> Range:
    """MAP and a 90 % interval: the recordings are drawn again, with replacement. How often each is drawn is its weight
    [R, n], so that every class is sorted once."""
    rng = np.random.default_rng([seed, 2])
    weights = rng.multinomial(len(p), np.full(len(p), 1 / len(p)), RESAMPLES)
    of_class = []
    for c in range(labels.shape[1]):
        order = np.argsort(-p[:, c], kind="stable")
        order = order[labels[order, c] != UNKNOWN]
        drawn, hits = weights[:, order], weights[:, order] * (labels[order, c] == 1)
        if 0 < hits.sum() < drawn.sum():
            precision = np.cumsum(hits, 1) / np.maximum(np.cumsum(drawn, 1), 1)
            of_class.append((hits * precision).sum(1) / np.maximum(hits.sum(1), 1))
    value = macro_ap(labels, p)
    if not of_class:
        return Range(value, value, value)
    low, high = np.quantile(np.mean(of_class, 0), [0.05, 0.95])
    return Range(value, min(float(low), value), max(float(high), value))


def doubted(labels: Labels, p: Points) -> list[Doubt]:
    """Confident learning: a label is doubted where the model, which has not seen it, is as sure of the opposite as it is on
    average of recordings that are labelled so. The strongest doubt of a recording, the most doubtful first; at most a tenth of
    the recordings, because a weak model doubts nearly everything."""
    found: dict[int, tuple[float, Doubt]] = {}
    for c in range(labels.shape[1]):
        there, absent = labels[:, c] == 1, labels[:, c] == 0
        if not (there.any() and absent.any()):
            continue
        usual = {1: float(p[there, c].mean()), 0: float(p[absent, c].mean())}
        if usual[1] <= usual[0]:  # the model knows nothing of this class
            continue
        for row in np.flatnonzero((absent & (p[:, c] >= usual[1])) | (there & (p[:, c] <= usual[0]))).tolist():
            label, chance = int(labels[row, c]), float(p[row, c])
            strength = usual[0] - chance if label else chance - usual[1]
            if row not in found or strength > found[row][0]:
                found[row] = (strength, Doubt(row, c, label, chance))
    strongest = sorted(found.values(), key=lambda pair: -pair[0])[: -(-len(labels) // DOUBTED)]
    return [doubt for _, doubt in strongest]
