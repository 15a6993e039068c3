"""Preprocessing of one recording, all leads at once: resample, pad or crop, band-pass, z-score; and quality flags.

Flags: `nan`, `inf` (some samples are missing or infinite: interpolated), `flat:V1` (a constant lead: zeros), `clipped:V1`
(a lead stays at its extremes), `short` (fills less than half of the length), `cropped`, `resampled`.
"""

from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ecgmatch_dist.data.header_limits import LONGEST, MOST_RATE
from ecgmatch_dist.errors import UserError

Array = NDArray[np.floating]
LEADS = ("I", "II", "III", "aVR", "aVL", "aVF", "V1", "V2", "V3", "V4", "V5", "V6")
MOST_ORDER = 16
"""Of the filter; beyond it 32 bits are too few."""
CLIPPED_SHARE, CLIPPED_RANGE = 0.02, 0.5
"""A lead is clipped when this share of its samples equals its maximum or minimum and it spans at least this range in mV.
Without the range, a lead of low amplitude would count as clipped because of quantisation."""


@dataclass(frozen=True)
class Preprocess:
    """How recordings of any rate and length become arrays [12, length]. The defaults are the paper's."""

    rate: int = 500
    """Samples per second after resampling."""
    length: int = 6144
    """Samples. Shorter recordings are zero-padded at the end, longer ones cropped."""
    low: float = 1.0
    high: float = 47.0
    """Pass band of the zero-phase Butterworth filter, Hz."""
    order: int = 3
    sequence: tuple[str, ...] = ("pad", "filter", "zscore")
    """Order of the steps after resampling; `filter` or `zscore` may be left out."""

    def __post_init__(self) -> None:
        if self.rate < 1 or self.length < 1 or self.order < 1:
            raise UserError(f"rate {self.rate}, length {self.length}, order {self.order}: each must be at least 1")
        if self.rate > MOST_RATE or self.length > LONGEST or self.order > MOST_ORDER:
            raise UserError(
                f"rate {self.rate}, length {self.length}, order {self.order}: at most {MOST_RATE}, {LONGEST} and {MOST_ORDER}"
            )
        if not 0 < self.low < self.high < self.rate / 2:
            raise UserError(
                f"pass band {self.low:g}-{self.high:g} Hz at rate {self.rate}: 0 < low < high < rate / 2 is needed"
            )
        steps = ("pad", "filter", "zscore")
        if "pad" not in self.sequence or any(self.sequence.count(s) > 1 or s not in steps for s in self.sequence):
            raise UserError(f"sequence {self.sequence}: give `pad` once, and `filter` and `zscore` at most once")


_SMALL = Preprocess(rate=100, length=1024)
PRESETS = {
    "paper": Preprocess(),
    "official_code": Preprocess(sequence=("filter", "zscore", "pad")),
    "cpu": _SMALL,
    "few_labels": _SMALL,
    "demo": _SMALL,
}
"""Under the names of the presets to train with: people give the same one to both commands."""


def preprocess(signal: Array, rate: float, settings: Preprocess) -> tuple[NDArray[np.float32], tuple[str, ...]]:
    """Signal [12, n] in mV at `rate` -> float32 [12, length] and the flags. A constant lead becomes zeros."""
    x, flags = _fill_missing(signal)
    used = x[:, : int(np.ceil(settings.length * rate / settings.rate))]
    low, high = used.min(axis=1), used.max(axis=1)
    flat = low == high
    flags += [f"flat:{LEADS[v]}" for v in np.flatnonzero(flat)]
    flags += [f"clipped:{LEADS[v]}" for v in np.flatnonzero(_clipped(used, low, high))]
    if rate != settings.rate:
        x = resample(x, rate, settings.rate)
        flags.append("resampled")
    if x.shape[1] < settings.length / 2:
        flags.append("short")
    if x.shape[1] > settings.length:
        flags.append("cropped")
    for step in settings.sequence:
        if step == "pad":
            x = pad_or_crop(x, settings.length)
        elif step == "filter":
            x = bandpass(x, settings)
        else:
            x = zscore(x)
    x[flat] = 0  # filter and z-score may have amplified rounding errors
    return x.astype(np.float32, copy=False), tuple(flags)


def _fill_missing(x: Array) -> tuple[Array, list[str]]:
    """[12, n] -> NaN and infinities interpolated linearly in time; 0 where a lead has no value at all."""
    finite = np.isfinite(x)
    if finite.all():
        return x, []
    flags = [name for name, bad in (("nan", np.isnan(x)), ("inf", np.isinf(x))) if bad.any()]
    n = x.shape[1]
    t = np.arange(n)
    before = np.maximum.accumulate(np.where(finite, t, -1), axis=1)
    after = np.minimum.accumulate(np.where(finite, t, n)[:, ::-1], axis=1)[:, ::-1]
    left = np.where(before >= 0, before, after).clip(max=n - 1)
    right = np.where(after < n, after, left)
    weight = (t - left) / np.maximum(right - left, 1)
    known = np.where(finite, x, 0)
    between = np.take_along_axis(known, left, 1) * (1 - weight) + np.take_along_axis(known, right, 1) * weight
    return np.where(finite, x, between).astype(x.dtype), flags


def _clipped(x: Array, low: Array, high: Array) -> NDArray[np.bool_]:
    """[12, n] and its extremes [12] -> bool [12]."""
    at_rail = [np.count_nonzero(x == rail[:, None], axis=1) for rail in (low, high)]
    clipped: NDArray[np.bool_] = (np.maximum(*at_rail) >= CLIPPED_SHARE * x.shape[1]) & (high - low >= CLIPPED_RANGE)
    return clipped


def resampling_ratio(rate: float, target: float) -> Fraction:
    """Samples after resampling for one before it."""
    return Fraction(target / rate).limit_denominator(round(1000 * max(1, rate / target)))


def resample(x: Array, rate: float, target: float) -> Array:
    """[12, n] at `rate` -> [12, ceil(n * target / rate)]. The rates need not be integers."""
    from scipy import signal as dsp  # slow to import, and most commands read what was filtered before

    ratio = resampling_ratio(rate, target)
    # padtype="line": with zeros, an offset of the baseline would ring at the ends.
    y: Array = dsp.resample_poly(x, ratio.numerator, ratio.denominator, axis=1, padtype="line")
    return y


def pad_or_crop(x: Array, length: int) -> Array:
    """[12, n] -> [12, length]: zeros at the end, or the first samples."""
    out = np.zeros((x.shape[0], length), x.dtype)
    n = min(length, x.shape[1])
    out[:, :n] = x[:, :n]
    return out


def bandpass(x: Array, settings: Preprocess) -> NDArray[np.float32]:
    """[12, n] -> the same, filtered forwards and backwards: scipy's sosfiltfilt, computed by `_blockwise`."""
    # As filtfilt in the official code: odd extension by three filter lengths, or less if the recording is short.
    edge = min(3 * (2 * settings.order + 1), x.shape[1] - 1)
    first, last = x[:, :1], x[:, -1:]
    x = np.concatenate([2 * first - x[:, edge:0:-1], x, 2 * last - x[:, -2 : -edge - 2 : -1]], axis=1, dtype=np.float32)
    x -= first.astype(np.float32)  # the filter removes an offset anyway, and 32 bits round it badly
    x = _blockwise(_blockwise(x, settings)[:, ::-1], settings)[:, ::-1]
    return np.ascontiguousarray(x[:, edge : x.shape[1] - edge])


BLOCK = 64
"""Samples filtered by one row of a matrix product."""


@lru_cache
def block_filter(settings: Preprocess) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float64], Any]:
    """The Butterworth filter as matrices: from state s [S], a block u [BLOCK] gives y = u A + s B and the next state
    u C + s D. Returns [A C] [BLOCK, BLOCK + S], B [S, BLOCK], D [S, S], the steady state for a constant 1 [S].
    """
    from scipy import signal as dsp  # as in `resample`

    band = (settings.low, settings.high)
    sections = dsp.butter(settings.order, band, "bandpass", fs=settings.rate, output="sos")
    count = len(sections)
    size = 2 * count
    a, c = dsp.sosfilt(sections, np.eye(BLOCK), zi=np.zeros((count, BLOCK, 2)))
    unit_states = np.eye(size).reshape(size, count, 2).transpose(1, 0, 2)
    b, d = dsp.sosfilt(sections, np.zeros((size, BLOCK)), zi=unit_states)
    flat_c, flat_d = (state.transpose(1, 0, 2).reshape(-1, size) for state in (c, d))
    products = np.concatenate([a, flat_c], axis=1).astype(np.float32)
    return products, b.astype(np.float32), flat_d, dsp.sosfilt_zi(sections).reshape(size)


def _blockwise(x: NDArray[np.float32], settings: Preprocess) -> NDArray[np.float32]:
    """[12, n] -> [12, n], filtered forwards from the steady state of the first sample.

    scipy's sosfilt goes sample by sample and lead by lead. Here all blocks of all leads are one matrix product, and the
    states between blocks are a prefix sum in log2 steps: three times as fast, equal up to 32-bit rounding."""
    products, from_state, step, steady = block_filter(settings)
    leads, n = x.shape
    blocks = -(-n // BLOCK)
    padded = np.zeros((leads, blocks * BLOCK), np.float32)
    padded[:, :n] = x
    out = (padded.reshape(-1, BLOCK) @ products).reshape(leads, blocks, -1)
    states = np.empty((blocks, leads, len(step)))
    states[0] = x[:, :1] * steady
    states[1:] = out[:, :-1, BLOCK:].swapaxes(0, 1)
    reach = 1
    while reach < blocks:  # states[k] = sum over j <= k of states[j] step^(k - j)
        states[reach:] += (states[:-reach].reshape(-1, len(step)) @ step).reshape(-1, *states.shape[1:])
        step, reach = step @ step, 2 * reach
    by_lead = states.swapaxes(0, 1).astype(np.float32, order="C").reshape(-1, len(step))
    y = (by_lead @ from_state).reshape(leads, blocks, BLOCK)
    y += out[:, :, :BLOCK]
    return y.reshape(leads, -1)[:, :n]


def zscore(x: Array) -> Array:
    """[12, n] -> each lead with mean 0 and standard deviation 1; a constant lead becomes zeros."""
    x = x - x.mean(axis=1, keepdims=True)
    deviation = np.sqrt(np.einsum("vt,vt->v", x, x) / x.shape[1])
    x *= np.divide(1, deviation, where=deviation > 0, out=np.zeros_like(deviation))[:, None]
    return x
