"""The beats of a recording: where they are, and the median of them, which is free of noise and of single odd beats.

All signals here have 100 samples per second. Shapes: V = 12 leads, T samples, n beats, S = 90 samples of a beat.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import uniform_filter1d

Floats = NDArray[np.float32]

RATE = 100
TINY = 1e-6
BEFORE, AFTER = 40, 50  # samples of a beat before and after its peak: 0.4 s for the P wave, 0.5 s for the T wave
REFRACTORY = 25  # no heart beats twice within 0.25 s
SNAP = 6  # a peak of the slope is moved by at most 0.06 s, to the sample of highest energy


@dataclass(frozen=True)
class Beats:
    """The beats of one recording."""

    peaks: NDArray[np.int64]
    """Where they are, in samples."""
    whole: NDArray[np.int64]
    """Those of them that lie in the recording from `BEFORE` to `AFTER`."""
    windows: Floats
    """[n, V, S]: the signal around each whole one."""
    median: Floats
    """[V, S]"""
    slope: Floats
    """[T]: how steep all leads are together. High in a QRS complex."""


def find_beats(x: Floats) -> Beats:
    """x [V, T], at least S samples long."""
    from scipy.signal import find_peaks  # slow to import, and few runs measure beats

    steps = np.diff(x, axis=1, prepend=x[:, :1])
    slope = np.sqrt(np.maximum(uniform_filter1d((steps**2).sum(0), 9), 0))  # a running sum may end below 0
    found, _ = find_peaks(slope, distance=REFRACTORY, height=0.35 * np.percentile(slope, 97))
    energy = (x**2).sum(0)
    begins = np.maximum(found - SNAP, 0)
    snapped = [begin + int(energy[begin : peak + SNAP + 1].argmax()) for begin, peak in zip(begins, found, strict=True)]
    peaks = np.unique(np.array(snapped, np.int64))
    length = x.shape[1]
    whole = peaks[(peaks >= BEFORE) & (peaks + AFTER <= length)]
    if not len(whole):  # a recording without a heart beat still gets measurements
        whole = np.array([min(max(length // 2, BEFORE), length - AFTER)])
    windows = np.stack([x[:, peak - BEFORE : peak + AFTER] for peak in whole])
    return Beats(peaks, whole, windows, np.median(windows, 0), slope)


def steepness(beat: Floats) -> Floats:
    """How fast all leads change together: [..., V, S] -> [..., S - 1]."""
    steep: Floats = np.abs(np.diff(beat)).sum(-2)
    return steep
