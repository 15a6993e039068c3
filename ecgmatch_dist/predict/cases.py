"""Known cases that are like a new one: labelled and validation recordings, compared by their whitened features.

The features of a network are nearly parallel: all cosines are close to 1. Whitened (mean 0, all directions equally wide; by
Ledoit and Wolf's covariance, which is sound also for few cases), unrelated recordings have a cosine near 0.
"""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.covariance import LedoitWolf

from ecgmatch_dist.predict.result import Case
from ecgmatch_dist.record.predictions import predictions_file, read_predictions

Floats = NDArray[np.floating[Any]]
SAMPLE = 1000  # cases that are compared with all others, for what is usual


class KnownCases:
    """The recordings that the model knows the labels of."""

    def __init__(self, ids: NDArray[np.str_], labels: NDArray[np.uint8], features: Floats, classes: list[str]) -> None:
        self.ids, self.labels, self.classes = ids, labels, classes
        self._whiten = LedoitWolf().fit(features.astype(np.float64))
        values, directions = np.linalg.eigh(self._whiten.covariance_)
        self._directions = directions / np.sqrt(np.maximum(values, 1e-12 * max(values[-1], 1e-12)))
        self.features = self.whiten(features)
        own = self.features[:: -(-len(ids) // SAMPLE)] @ self.features.T
        own[np.arange(len(own)), np.arange(0, len(ids), -(-len(ids) // SAMPLE))] = -1  # not itself
        best = own.max(1)
        self.usual, self.rare = float(np.median(best)), float(np.quantile(best, 0.01))
        """Similarity of a known case to the one most like it: the median, and what only 1 % stay below."""

    @classmethod
    def of_run(cls, folder: Path, classes: list[str]) -> "KnownCases":
        """Labelled and validation recordings of a finished run."""
        parts = [read_predictions(predictions_file(folder, part)) for part in ("labelled", "validation")]
        ids, labels, _, features = (np.concatenate(column) for column in zip(*parts, strict=True))
        return cls(ids, labels, features, classes)

    def whiten(self, features: Floats) -> NDArray[np.float32]:
        """[n, D] -> [n, D], whitened and of length 1."""
        white = (features - self._whiten.location_) @ self._directions
        lengths = np.maximum(np.linalg.norm(white, axis=1, keepdims=True), 1e-12)
        return np.asarray(white / lengths, np.float32)

    def nearest(self, features: Floats, count: int) -> list[tuple[Case, ...]]:
        """The `count` most similar cases of each row of `features` [n, D]."""
        similarity = self.whiten(features) @ self.features.T
        order = np.argsort(-similarity, axis=1, kind="stable")[:, :count]
        return [
            tuple(Case(str(self.ids[i]), float(row[i]), self.classes_of(int(i))) for i in best)
            for row, best in zip(similarity, order, strict=True)
        ]

    def classes_of(self, case: int) -> tuple[str, ...]:
        return tuple(name for name, label in zip(self.classes, self.labels[case], strict=True) if label == 1)
