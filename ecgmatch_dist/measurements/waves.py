"""The waves of the median beat: where its QRS complex begins and ends, how wide and how high its waves are, and what comes
before it.

Shapes: V = 12 leads, n beats, S = 90 samples of a beat.
"""

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter1d

from ecgmatch_dist.data.preprocess import LEADS
from ecgmatch_dist.measurements.beats import BEFORE, TINY, Beats, steepness
from ecgmatch_dist.measurements.rhythm import ATRIAL

Floats = NDArray[np.float32]

PR = 36  # samples before the QRS complex in which its P wave begins
CONDUCTION = [LEADS.index(name) for name in ("I", "V1", "V2", "V5", "V6")]  # where bundle branch blocks show
P_LEADS = [LEADS.index(name) for name in ("II", "aVF", "V1", "V2")]
P_SHOWN = [LEADS.index(name) for name in ("II", "V1")]


def qrs_limits(median: Floats) -> tuple[int, int]:
    """First and last sample of the QRS complex in the median beat [V, S]: where it is steep, near its peak."""
    steep = steepness(median)
    near = np.arange(len(steep))[BEFORE - 14 : BEFORE + 15]
    inside = near[steep[near] > 0.15 * steep.max()]
    return (int(inside[0]), int(inside[-1])) if len(inside) else (BEFORE - 5, BEFORE + 5)


def waves(median: Floats, onset: int, offset: int) -> Floats:
    """Intervals of the median beat [V, S] over all leads, then of each lead: QRS, J point and ST, T wave, P wave, notches."""
    size = np.sqrt((median**2).sum(0))
    first = max(0, onset - 28)
    p_peak = first + int(size[first : max(onset - 2, first + 1)].argmax())
    t_peak = find_t_peak(median, offset)
    steep = steepness(median)
    intervals = [
        offset - onset,
        t_peak - onset,
        onset - p_peak,
        size[p_peak],
        size[t_peak],
        (steep > 0.15 * steep.max()).sum(),
        size[onset : offset + 1].max(),
    ]
    level = from_pr_segment(median, onset)
    qrs, after = level[:, onset : offset + 2], level[:, offset + 6 :]
    turns = np.diff(np.sign(np.diff(qrs, axis=1)), axis=1)
    by_lead = [
        qrs.max(1),
        qrs.min(1),
        qrs.sum(1),
        (qrs > 0).mean(1),
        qrs[:, :3].mean(1),
        level[:, offset + 3],
        level[:, offset + 7],
        after.max(1),
        after.min(1),
        level[:, t_peak - 2 : t_peak + 3].mean(1),
        level[:, max(0, p_peak - 2) : p_peak + 3].mean(1),
        level[:, max(0, onset - 25) : onset - 1].max(1),
        (turns != 0).sum(1),
    ]
    return np.concatenate([intervals, *by_lead])


def p_waves(beats: Beats, onset: int) -> Floats:
    """Whether the same P wave comes before each beat: the correlation of what lies before its QRS complex with the median of
    that. Mean and spread over the beats, the size of the median P wave, then the correlation in each atrial lead. Low in
    fibrillation."""
    before = slice(max(0, onset - 25), max(onset - 2, 2))
    each, median = beats.windows[:, :, before], beats.median[:, before]
    each, median = each - each.mean(2, keepdims=True), median - median.mean(1, keepdims=True)
    product = each * median
    power = np.sqrt((each**2).sum(2) * (median**2).sum(1)) + TINY  # [n, V]
    together = product.sum((1, 2)) / (np.sqrt((each**2).sum((1, 2)) * (median**2).sum()) + TINY)
    by_lead = np.median(product.sum(2) / power, 0)[ATRIAL]
    return np.concatenate([[together.mean(), together.std(), np.sqrt((median**2).mean())], by_lead])


def pr_interval(median: Floats, onset: int) -> Floats:
    """From the peak and from the beginning of the P wave to the QRS complex: over all leads, then the median of those in which
    P waves show best, then how early the activity before the complex lies as a whole. Long in an AV block."""
    rest = median[:, max(0, onset - PR) : onset - 1]
    ends = np.linspace(0, 1, rest.shape[1])
    first, last = rest[:, :3].mean(1, keepdims=True), rest[:, -3:].mean(1, keepdims=True)
    level = rest - (first * (1 - ends) + last * ends)  # without the slope of T wave and baseline
    size = gaussian_filter1d(np.sqrt((level**2).sum(0)), 1)
    by_lead = [_peak_and_begin(np.abs(gaussian_filter1d(level[lead], 1))) for lead in P_LEADS]
    moving = np.sqrt((np.diff(median[:, max(0, onset - PR) : onset + 1], axis=1) ** 2).sum(0))
    before = np.arange(len(moving), 0, -1)
    return np.concatenate([_peak_and_begin(size), np.median(by_lead, 0), [before @ moving / (moving.sum() + TINY)]])


def _peak_and_begin(size: Floats) -> tuple[int, int]:
    """Samples from the peak of a wave, and from where it rises, to the end of its size."""
    peak = int(size.argmax())
    low = np.flatnonzero(size[:peak] <= 0.3 * size[peak])
    return len(size) - peak, len(size) - (int(low[-1]) + 1 if len(low) else 0)


def before_qrs(median: Floats, onset: int) -> Floats:
    """The signal before the QRS complex as it is, in pieces of 0.03 s, in the leads that show the P wave best."""
    before = median[P_SHOWN, max(0, onset - PR) : onset]
    level = before - before[:, -3:].mean(1, keepdims=True)
    level = np.pad(level, ((0, 0), (PR - level.shape[1], 0)))
    pieces: Floats = level.reshape(len(P_SHOWN), -1, 3).mean(2)
    return pieces


def qrs_shape(median: Floats, onset: int, offset: int) -> Floats:
    """The width of the QRS complex by several rules, in all leads and in those where a block of a bundle branch shows; and when
    it is highest and lowest there."""
    near = slice(BEFORE - 16, BEFORE + 20)
    steep = steepness(median)[near]
    widths = [(steep > share * steep.max()).sum() for share in (0.07, 0.1, 0.2, 0.3, 0.5)]
    for lead in CONDUCTION:
        change = np.abs(np.diff(median[lead]))[near]
        where = np.flatnonzero(change > 0.15 * change.max())
        widths += [np.ptp(where) if len(where) else 0, len(where)]
    qrs = median[CONDUCTION, onset : offset + 2]
    return np.concatenate([widths, qrs.argmax(1), qrs.argmin(1)])


def relative_to_qrs(median: Floats, onset: int, offset: int) -> Floats:
    """Waves of each lead as shares of its QRS complex, which do not depend on the scale of the lead: R, Q, T, J point, ST, the
    end of the complex, its area, and the signal at the T wave."""
    level = from_pr_segment(median, onset)
    qrs, after = level[:, onset : offset + 2], level[:, offset + 6 :]
    third = max(3, qrs.shape[1] // 3)
    t_peak = find_t_peak(median, offset)
    high, low = after.max(1), after.min(1)
    heights = [
        qrs.max(1),
        -qrs[:, : third + 1].min(1),
        np.where(high > -low, high, low),
        level[:, offset + 2],
        level[:, offset + 8],
        qrs[:, -third:].mean(1),
        qrs.sum(1),
        level[:, t_peak - 2 : t_peak + 3].mean(1),
    ]
    shares: Floats = np.stack(heights) / (np.ptp(qrs, axis=1) + TINY)
    return shares


def find_t_peak(median: Floats, offset: int) -> int:
    """Where the T wave is highest over all leads."""
    return offset + 6 + int((median[:, offset + 6 :] ** 2).sum(0).argmax())


def from_pr_segment(median: Floats, onset: int) -> Floats:
    """The median beat, from the level just before its QRS complex."""
    return median - np.median(median[:, max(0, onset - 8) : onset - 2], axis=1, keepdims=True)
