"""How far two readers agree: Cohen's kappa of each class, on the recordings that both have answered."""

from dataclasses import dataclass
from itertools import combinations

import numpy as np

from ecgmatch_dist.data.labels import UNKNOWN
from ecgmatch_dist.label.answers import Answers

FEW = 20
"""Recordings; with fewer, kappa says little."""


@dataclass(frozen=True)
class Agreement:
    """Two readers and one class."""

    readers: tuple[str, str]
    name: str
    recordings: int
    """Where both said yes or no."""
    both: int
    """Yes from both."""
    one: int
    """Yes from one of them only."""
    kappa: float | None
    """1: always the same, 0: as often as by chance. None: not defined, both always said the same one thing."""


def agreements(answers: Answers) -> list[Agreement]:
    """Every pair of readers that share a recording, every class."""
    found = []
    for pair in combinations(sorted(answers.of_reader), 2):
        first, second = (answers.of_reader[reader] for reader in pair)
        shared = [recording for recording in first if recording in second]
        if not shared:
            continue
        labels = np.array([[answers.label(reader, recording) for reader in pair] for recording in shared])  # [n, 2, C]
        for c, name in enumerate(answers.scheme.short):
            sure = labels[(labels[:, :, c] != UNKNOWN).all(1), :, c]
            both, one = int(sure.all(1).sum()), int((sure[:, 0] != sure[:, 1]).sum())
            found.append(Agreement(pair, name, len(sure), both, one, kappa(sure.astype(bool))))
    return found


def kappa(marks: "np.ndarray[tuple[int, int], np.dtype[np.bool_]]") -> float | None:
    """Cohen's kappa of two readers' marks [n, 2]."""
    if not len(marks):
        return None
    observed = float((marks[:, 0] == marks[:, 1]).mean())
    first, second = marks.mean(0)
    chance = float(first * second + (1 - first) * (1 - second))
    return (observed - chance) / (1 - chance) if chance < 1 else None
