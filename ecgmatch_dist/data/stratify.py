"""Iterative stratification (Sechidis and others, 2011) into two parts, for many units.

It draws exactly what `MultilabelStratifiedShuffleSplit` of the library iterative-stratification draws, from the same random
numbers, several times faster: the numbers of two parts are compared as they are, not as arrays. A test compares them."""

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ecgmatch_dist.terminal.waiting import track

Mask = NDArray[np.bool_]
Ints = NDArray[np.int64]
BLOCK = 100_000
"""Units between two movements of the bar."""


def draw_stratified(y: NDArray[np.uint8], fraction: float, random: np.random.RandomState) -> Mask:
    """Draw a `fraction` of n units with labels y [n, C], so that each class is shared in the same proportion: True [n]."""
    n, drawn = len(y), math.ceil(fraction * len(y))
    order = np.arange(n)
    random.shuffle(order)
    labels = y[order].astype(bool)
    shares = np.array([n - drawn, drawn]) / n
    wanted = (shares * n).tolist()  # units that each of the two parts still needs
    per_class = np.column_stack([np.outer(shares, labels.sum(0)), [0, 0]]).tolist()  # last: units without a class
    second = np.zeros(n, bool)
    for chosen, units in track(_turns(labels, random), "draw", n // BLOCK + labels.shape[1] + 1):
        second[units] = _deal(labels[units], chosen, per_class, wanted, random)
    out = np.zeros(n, bool)
    out[order] = second
    return out


def _turns(labels: Mask, random: np.random.RandomState) -> Iterator[tuple[int, Ints]]:
    """The rarest class among the units that are left, and those that have it, in blocks; at last those without a class."""
    waiting, left = np.ones(len(labels), bool), labels.sum(0)
    while left.any():
        rarest = np.flatnonzero(left == left[left > 0].min())
        chosen = int(rarest[0] if len(rarest) == 1 else rarest[random.randint(len(rarest))])
        units = np.flatnonzero(labels[:, chosen] & waiting)
        for start in range(0, len(units), BLOCK):
            yield chosen, units[start : start + BLOCK]
        waiting[units] = False
        left = left - labels[units].sum(0)
    units = np.flatnonzero(waiting)
    for start in range(0, len(units), BLOCK):
        yield labels.shape[1], units[start : start + BLOCK]


def _deal(
    labels: Mask, chosen: int, per_class: list[list[float]], wanted: list[float], random: np.random.RandomState
) -> list[bool]:
    """Units with labels [k, C], one after the other, to the part that most needs the class `chosen`, or most needs units.
    Updates what the parts need."""
    kinds, numbers = np.unique(labels, axis=0, return_inverse=True)
    classes = [np.flatnonzero(kind).tolist() for kind in kinds]
    first, second = per_class
    out = []
    for number in numbers.reshape(-1).tolist():  # NumPy 2.0.0 makes [k, 1] of them
        if first[chosen] != second[chosen]:
            to = second[chosen] > first[chosen]
        elif wanted[0] != wanted[1]:
            to = wanted[1] > wanted[0]
        else:
            to = bool(random.randint(2))
        needs = second if to else first
        for c in classes[number]:
            needs[c] -= 1
        wanted[to] -= 1
        out.append(to)
    return out
