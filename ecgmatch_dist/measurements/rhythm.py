"""The rhythm of a recording: intervals between beats, early beats, how alike the beats are, what lies between them.

Shapes: V = 12 leads, T samples, n beats, S = 90 samples of a beat.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ecgmatch_dist.data.preprocess import LEADS
from ecgmatch_dist.measurements.beats import AFTER, BEFORE, RATE, TINY, Beats, steepness

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
EARLY = 0.87  # of the typical interval: a beat that comes after less is early
COMPLEX = slice(BEFORE - 12, BEFORE + 16)  # of a beat's window: its QRS complex


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


def early_beats(beats: Beats) -> Sequence[float]:
    """How early single beats come, and what they look like. An early beat that looks like the others comes from the atria, one
    of another shape from the ventricles. A pause follows both."""
    rr = np.diff(beats.peaks) / RATE
    if len(rr) < 3:
        return [0.0] * 6 + [1.0, 1.0, 1.0, 0.0] + [1.0] * 5 + [0.0]  # as of a regular rhythm
    typical = np.median(rr)
    early = rr / typical  # the interval before each beat but the first
    after = np.append(early[1:], 1.0)  # and the one after it
    alike, larger, wider = (np.ones(len(rr)) for _ in range(3))  # a beat that is cut off counts as one like the others
    seen, at = np.isin(beats.peaks[1:], beats.whole), np.searchsorted(beats.whole, beats.peaks[1:])
    if seen.any():
        windows, model = beats.windows[at[seen]][:, :, COMPLEX], beats.median[:, COMPLEX]
        sizes, size = (np.linalg.norm(complexes, axis=(-2, -1)) for complexes in (windows, model))
        alike[seen] = (windows * model).sum((1, 2)) / (sizes * size + TINY)
        larger[seen] = sizes / (size + TINY)
        wider[seen] = steep_samples(windows) / (steep_samples(model) + TINY)
    atrial = np.sort(np.where(alike > 0.85, 1 - early, 0))
    by_time, first = np.sort(early), early.argmin()
    return [
        (early < EARLY).sum(),
        ((early < EARLY) & (alike > 0.9)).sum(),
        ((early < EARLY) & (alike < 0.85)).sum(),
        atrial[-1],
        atrial[-2],
        ((1 - alike) * np.clip(1 - early, 0, 1)).max(),
        by_time[0],
        by_time[1],
        by_time[-1],
        (after - early).max(),
        alike.min(),
        alike[first],
        larger.max(),
        wider.max(),
        wider[first],
        ((1 - early) * (after - 1)).max(),
    ]


def steep_samples(beat: Floats) -> NDArray[np.int64]:
    """How many samples are steep: [..., V, S] -> [...]."""
    steep = steepness(beat)
    number: NDArray[np.int64] = (steep > 0.15 * steep.max(-1, keepdims=True)).sum(-1)
    return number


def alikeness(beats: Beats) -> Floats:
    """How much the beats differ from their median: single odd beats (extrasystoles), and at which moment of the beat."""
    model = beats.median.ravel() / (np.linalg.norm(beats.median) + TINY)
    flat = beats.windows.reshape(len(beats.windows), -1)
    cosine = flat @ model / (np.linalg.norm(flat, axis=1) + TINY)
    spread = beats.windows.std(0).mean(0).reshape(18, 5).mean(1)  # [S] in eighteen pieces of 0.05 s
    summary = [cosine.mean(), cosine.min(), cosine.std(), (cosine < 0.8).mean(), np.percentile(cosine, 25)]
    return np.concatenate([summary, spread])


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
