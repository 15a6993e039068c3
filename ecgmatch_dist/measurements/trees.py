"""Randomised trees from measurements to diagnoses, one forest per class."""

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.ensemble import ExtraTreesClassifier

from ecgmatch_dist.data.labels import UNKNOWN
from ecgmatch_dist.data.store import ShardStore
from ecgmatch_dist.measurements.measure import measure

TREES = 300


class MeasurementTrees:
    """Fitted to the labelled recordings. The same on every rank: each fits its own from the same data and seed."""

    def __init__(
        self, signals: NDArray[np.floating], labels: NDArray[np.uint8], rate: float, seed: int, threads: int = 1
    ) -> None:
        """`signals` [n, 12, T] as in the shards, `labels` [n, C] in {0, 1, UNKNOWN}."""
        self.rate = rate
        rows = measure_all(signals, rate)
        self.forests: list[ExtraTreesClassifier | float] = []
        for column in labels.T:
            looked = column != UNKNOWN  # where nobody has looked for the class, the recording does not count
            y = column[looked]
            if not 0 < y.sum() < len(y):  # nothing to learn: the class's frequency
                self.forests.append(float(y.sum() + 0.5) / (len(y) + 1))
                continue
            forest = ExtraTreesClassifier(
                TREES, min_samples_leaf=2, max_features=0.2, random_state=seed, n_jobs=threads
            )
            # One thread predicts: several would add up the trees in an order that changes the last bit.
            self.forests.append(forest.fit(rows[looked], y).set_params(n_jobs=1))

    def predict(self, signals: NDArray[np.floating]) -> NDArray[np.float64]:
        """[n, 12, T] -> probabilities [n, C]."""
        rows = measure_all(signals, self.rate)
        if not len(rows):
            return np.empty((0, len(self.forests)))
        columns = [
            np.full(len(rows), forest) if isinstance(forest, float) else forest.predict_proba(rows)[:, 1]
            for forest in self.forests
        ]
        return np.stack(columns, 1)


def fit_trees(store: ShardStore, rows: NDArray[np.int64], labels: NDArray[np.uint8], seed: int) -> MeasurementTrees:
    """Trees fitted to these rows of the shards, by as many threads as torch computes with."""
    return MeasurementTrees(store.read(rows), labels, store.preprocess.rate, seed, torch.get_num_threads())


def measure_all(signals: NDArray[np.floating], rate: float) -> NDArray[np.float32]:
    """[n, 12, T] -> [n, F]."""
    return np.stack([measure(signal, rate) for signal in signals]) if len(signals) else np.empty((0, 0), np.float32)
