"""Measurements of a recording: its rhythm, how alike its beats are, the waves of its median beat, what lies between beats.

Signals are band-passed and z-scored per lead, as in the shards, so amplitudes are relative to the lead.
Shapes: V = 12 leads, T samples, n beats, S = 90 samples of a beat.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ecgmatch_dist.data.preprocess import LEADS, resample
from ecgmatch_dist.measurements.beats import AFTER, BEFORE, RATE, Beats, find_beats

Floats = NDArray[np.float32]

BANDS = (
    (1, 3),
    (3, 5),
    (5, 7),
    (7, 10),
    (10, 15),
    (15, 30),
)  # Hz; flutter waves lie in the third, fibrillation beside it
ATRIAL = [LEADS.index(name) for name in ("I", "II", "aVF", "V1", "V2", "V5")]  # where atrial activity is looked for
TINY = 1e-6


def measure(x: NDArray[np.floating], rate: float) -> Floats:
    """One recording [V, T], as in the shards -> its measurements, always as many, all finite."""
    x = x.astype(np.float32)
    if rate != RATE:
        x = resample(x, rate, RATE).astype(np.float32)
    x = np.nan_to_num(np.pad(x, ((0, 0), (0, max(0, 2 * (BEFORE + AFTER) - x.shape[1])))))
    beats = find_beats(x)
    onset, offset = qrs_limits(beats.median)
    groups = (
        rhythm(beats),
        regularity(beats.slope),
        alikeness(beats),
        waves(beats.median, onset, offset),
        p_waves(beats, onset),
        between_beats(x, beats),
        moments(x),
    )
    return np.nan_to_num(np.concatenate([np.ravel(group) for group in groups]).astype(np.float32))


def rhythm(beats: Beats) -> Sequence[float]:
    """Heart rate, and how irregular the intervals between beats are."""
    rr = np.diff(beats.peaks) / RATE if len(beats.peaks) > 2 else np.ones(2)
    change, typical = np.abs(np.diff(rr)), float(np.median(rr))
    relative = rr / typical
    return [
        len(beats.peaks),
        60 / typical,
        60 / rr.mean(),
        rr.std(),
        rr.std() / rr.mean(),
        np.sqrt((change**2).mean()),
        change.max(),
        np.median(change),
        relative.min(),
        relative.max(),
        (change > 0.05).mean(),
        (np.abs(relative - 1) > 0.1).mean(),
        np.percentile(relative, 10),
        np.percentile(relative, 90),
    ]


def regularity(slope: Floats) -> Sequence[float]:
    """How well the rhythm repeats itself, and after how long: the autocorrelation of the slope [T]."""
    centred = slope - slope.mean()
    spectrum = np.abs(np.fft.rfft(centred, 2 * len(centred))) ** 2
    repeats = np.fft.irfft(spectrum)[:200] / (spectrum.mean() + TINY)
    later = repeats[30:200]
    return [slope.std() / (slope.mean() + TINY), later.max(), later.argmax(), repeats[15:30].max()]


def alikeness(beats: Beats) -> Floats:
    """How much the beats differ from their median: single odd beats (extrasystoles), and at which moment of the beat."""
    model = beats.median.ravel() / (np.linalg.norm(beats.median) + TINY)
    flat = beats.windows.reshape(len(beats.windows), -1)
    cosine = flat @ model / (np.linalg.norm(flat, axis=1) + TINY)
    spread = beats.windows.std(0).mean(0).reshape(18, 5).mean(1)  # [S] in eighteen pieces of 0.05 s
    summary = [cosine.mean(), cosine.min(), cosine.std(), (cosine < 0.8).mean(), np.percentile(cosine, 25)]
    return np.concatenate([summary, spread])


def qrs_limits(median: Floats) -> tuple[int, int]:
    """First and last sample of the QRS complex in the median beat [V, S]: where it is steep, near its peak."""
    steep = _steepness(median)
    near = np.arange(len(steep))[BEFORE - 14 : BEFORE + 15]
    inside = near[steep[near] > 0.15 * steep.max()]
    return (int(inside[0]), int(inside[-1])) if len(inside) else (BEFORE - 5, BEFORE + 5)


def _steepness(median: Floats) -> Floats:
    steep: Floats = np.abs(np.diff(median, axis=1)).sum(0)
    return steep


def waves(median: Floats, onset: int, offset: int) -> Floats:
    """Intervals of the median beat [V, S] over all leads, then of each lead: QRS, J point and ST, T wave, P wave, notches."""
    size = np.sqrt((median**2).sum(0))
    first = max(0, onset - 28)
    p_peak = first + int(size[first : max(onset - 2, first + 1)].argmax())
    t_peak = offset + 6 + int(size[offset + 6 :].argmax())
    steep = _steepness(median)
    intervals = [
        offset - onset,
        t_peak - onset,
        onset - p_peak,
        size[p_peak],
        size[t_peak],
        (steep > 0.15 * steep.max()).sum(),
        size[onset : offset + 1].max(),
    ]
    level = median - np.median(median[:, max(0, onset - 8) : onset - 2], axis=1, keepdims=True)  # from the PR segment
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


def between_beats(x: Floats, beats: Beats) -> Floats:
    """What is left when the median beat is taken away: its spectrum tells flutter and fibrillation; and how quiet each lead is
    before its P waves."""
    rest = x.copy()
    for peak in beats.whole:
        rest[:, peak - BEFORE : peak + AFTER] -= 0.95 * beats.median
    power = np.abs(np.fft.rfft(rest[ATRIAL], axis=1)) ** 2
    hertz = np.fft.rfftfreq(x.shape[1], 1 / RATE)
    total = power[:, (hertz > 1) & (hertz < 30)].sum(1) + TINY
    shares = [power[:, (hertz >= low) & (hertz < high)].sum(1) / total for low, high in BANDS]
    quiet = np.median(beats.windows[:, :, : BEFORE - 15].std(2), 0)
    return np.concatenate([*shares, np.log((rest**2).mean(1) + 1e-3), quiet])


def moments(x: Floats) -> Floats:
    """Per lead: how peaked and how one-sided its values are."""
    centred = x - x.mean(1, keepdims=True)
    return np.concatenate([np.log((centred**4).mean(1) + 1e-3), (centred**3).mean(1)])
