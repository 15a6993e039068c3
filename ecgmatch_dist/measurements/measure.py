"""Measurements of a recording: its rhythm, the waves of its median beat, and the distribution of its values.

Signals are band-passed and z-scored per lead, as in the shards, so amplitudes are relative to the lead.
Shapes: V = 12 leads, T samples, n beats, S = 90 samples of a beat.
"""

from collections.abc import Collection
from functools import cache

import numpy as np
from numpy.typing import NDArray

from ecgmatch_dist.data.preprocess import LEADS, resample
from ecgmatch_dist.measurements.beats import AFTER, BEFORE, RATE, find_beats
from ecgmatch_dist.measurements.rhythm import alikeness, between_beats, early_beats, regularity, rhythm
from ecgmatch_dist.measurements.waves import (
    before_qrs,
    p_waves,
    pr_interval,
    qrs_limits,
    qrs_shape,
    relative_to_qrs,
    waves,
)

Floats = NDArray[np.float32]


def measure(x: NDArray[np.floating], rate: float) -> Floats:
    """One recording [V, T], as in the shards -> its measurements, always as many, all finite. After a change of their values or
    their order: raise `config.OPINION`."""
    x = x.astype(np.float32)
    if rate != RATE:
        x = resample(x, rate, RATE).astype(np.float32)
    x = np.pad(x, ((0, 0), (0, max(0, 2 * (BEFORE + AFTER) - x.shape[1]))))
    x = np.nan_to_num(x, posinf=0, neginf=0)
    beats = find_beats(x)
    median = beats.median
    onset, offset = qrs_limits(median)
    groups = (
        rhythm(beats),
        regularity(beats.slope),
        early_beats(beats),
        alikeness(beats),
        between_beats(x, beats),
        waves(median, onset, offset),
        qrs_shape(median, onset, offset),
        relative_to_qrs(median, onset, offset),
        p_waves(beats, onset),
        pr_interval(median, onset),
        before_qrs(median, onset),
        moments(x),
    )
    return np.nan_to_num(np.concatenate([np.ravel(group) for group in groups]).astype(np.float32))


def measure_all(signals: Collection[NDArray[np.floating]], rate: float) -> NDArray[np.float32]:
    """[n, 12, T] -> [n, F]."""
    measured = [measure(signal, rate) for signal in signals]
    return np.stack(measured) if measured else np.empty((0, number_of_measurements()), np.float32)


@cache
def number_of_measurements() -> int:
    return len(measure(np.zeros((len(LEADS), RATE)), RATE))


def moments(x: Floats) -> Floats:
    """Per lead: how peaked and how one-sided its values are."""
    centred = x - x.mean(1, keepdims=True)
    return np.concatenate([np.log((centred**4).mean(1) + 1e-3), (centred**3).mean(1)])
