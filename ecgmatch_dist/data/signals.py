"""Preprocessing of one recording, all leads at once: resample, pad or crop, band-pass, z-score; and quality flags.

Flags, one word each: `nan`, `inf` (samples missing or infinite: interpolated), `flat:V1` (that lead is constant: zeros),
`clipped:V1` (that lead sticks to its extremes), `short` (fills less than half of the length), `cropped`, `resampled`."""

from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy import signal as dsp

from ecgmatch_dist.errors import UserError

LEADS = ("I", "II", "III", "aVR", "aVL", "aVF", "V1", "V2", "V3", "V4", "V5", "V6")
CLIPPED_SHARE, CLIPPED_RANGE = 0.01, 0.5
"""A lead counts as clipped when this share of its samples equals its maximum (or minimum) and it spans at least so many mV:
quantisation alone makes a quiet lead visit its extremes often."""


@dataclass(frozen=True)
class Preprocess:
    """From recordings of any rate and length to arrays [12, length]; the defaults are the paper's."""

    rate: int = 500
    """Samples per second after resampling."""
    length: int = 6144
    """Samples: shorter recordings are zero-padded at the end, longer ones cropped."""
    low: float = 1.0
    high: float = 47.0
    """Pass band of the zero-phase Butterworth filter, Hz."""
    order: int = 3
    sequence: tuple[str, ...] = ("pad", "filter", "zscore")
    """Order of the steps after resampling; `filter` or `zscore` may be left out."""

    def __post_init__(self) -> None:
        if self.rate < 1 or self.length < 1 or self.order < 1:
            raise UserError(f"rate {self.rate}, length {self.length}, order {self.order}: each must be at least 1")
        if not 0 < self.low < self.high < self.rate / 2:
            raise UserError(
                f"pass band {self.low:g}-{self.high:g} Hz at rate {self.rate}: 0 < low < high < rate / 2 is needed"
            )
        steps = ("pad", "filter", "zscore")
        if "pad" not in self.sequence or any(self.sequence.count(s) > 1 or s not in steps for s in self.sequence):
            raise UserError(f"sequence {self.sequence}: `pad`, and at most once each `filter` and `zscore`")


PRESETS = {
    "paper": Preprocess(),
    "official_code": Preprocess(sequence=("filter", "zscore", "pad")),
    "cpu": Preprocess(rate=100, length=1024),
}


def preprocess(
    signal: NDArray[np.floating], rate: float, settings: Preprocess
) -> tuple[NDArray[np.float32], tuple[str, ...]]:
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
    x[flat] = 0  # whatever filter and z-score made of rounding errors
    return x.astype(np.float32, copy=False), tuple(flags)


def _fill_missing(x: NDArray[np.floating]) -> tuple[NDArray[np.floating], list[str]]:
    """[12, n] -> the same without NaN and infinities: linear between the neighbours in time, zeros where a lead has none."""
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


def _clipped(x: NDArray[np.floating], low: NDArray[np.floating], high: NDArray[np.floating]) -> NDArray[np.bool_]:
    """[12, n] and its extremes [12] -> bool [12]."""
    at_rail = np.maximum((x == low[:, None]).mean(axis=1), (x == high[:, None]).mean(axis=1))
    return (at_rail >= CLIPPED_SHARE) & (high - low >= CLIPPED_RANGE)


def resample(x: NDArray[np.floating], rate: float, target: float) -> NDArray[np.floating]:
    """[12, n] at `rate` -> [12, ceil(n * target / rate)]; also between rates that are no integers."""
    ratio = Fraction(target / rate).limit_denominator(1000)
    # padtype="line": an offset of the baseline must not ring at the ends, as it would against zeros.
    return dsp.resample_poly(x, ratio.numerator, ratio.denominator, axis=1, padtype="line")


def pad_or_crop(x: NDArray[np.floating], length: int) -> NDArray[np.floating]:
    """[12, n] -> [12, length]: zeros at the end, or the first samples."""
    out = np.zeros((x.shape[0], length), x.dtype)
    n = min(length, x.shape[1])
    out[:, :n] = x[:, :n]
    return out


@lru_cache
def _sections(settings: Preprocess) -> NDArray[np.float64]:
    return dsp.butter(settings.order, (settings.low, settings.high), "bandpass", fs=settings.rate, output="sos")


def bandpass(x: NDArray[np.floating], settings: Preprocess) -> NDArray[np.floating]:
    """[12, n] -> the same, filtered forwards and backwards."""
    sections = _sections(settings)
    # As filtfilt does in the official code: three filter lengths of odd extension, where the recording is long enough.
    return dsp.sosfiltfilt(sections, x, axis=1, padlen=min(3 * (2 * settings.order + 1), x.shape[1] - 1))


def zscore(x: NDArray[np.floating]) -> NDArray[np.floating]:
    """[12, n] -> each lead with mean 0 and standard deviation 1; a constant lead becomes zeros."""
    x = x - x.mean(axis=1, keepdims=True)
    std = np.sqrt(np.einsum("vt,vt->v", x, x) / x.shape[1])
    x *= np.where(std > 0, 1 / np.where(std > 0, std, 1), 0)[:, None]
    return x
