"""Measurements against signals whose answer is known by construction."""

import numpy as np
import pytest
from numpy.typing import NDArray

from ecgmatch_dist.measurements.beats import find_beats
from ecgmatch_dist.measurements.measure import alikeness, measure, p_waves, qrs_limits, regularity, rhythm


def pulses(
    times: NDArray[np.floating], seconds: float = 10.0, rate: int = 100, width: float = 0.02
) -> NDArray[np.float32]:
    """A recording whose QRS complexes are Gaussians at `times`, each followed by a low T wave; z-scored per lead."""
    t = np.arange(int(seconds * rate)) / rate
    one = sum(
        np.exp(-(((t - at) / width) ** 2) / 2) + 0.2 * np.exp(-(((t - at - 0.25) / 0.04) ** 2) / 2) for at in times
    )
    rng = np.random.default_rng(0)
    x = np.stack([one * gain + 0.005 * rng.standard_normal(len(t)) for gain in np.linspace(0.5, 2, 12)])
    x = (x - x.mean(1, keepdims=True)) / x.std(1, keepdims=True)
    return x.astype(np.float32)


REGULAR = np.arange(0.5, 10, 0.8)  # 75 a minute


def test_beats_are_found_where_they_are() -> None:
    beats = find_beats(pulses(REGULAR))
    assert np.abs(beats.peaks / 100 - REGULAR).max() <= 0.02
    assert len(beats.windows) == len(beats.whole) >= len(REGULAR) - 2


@pytest.mark.parametrize("rate", [60, 75, 120, 150])
def test_the_heart_rate(rate: int) -> None:
    beats = find_beats(pulses(np.arange(0.5, 9.8, 60 / rate)))
    assert rhythm(beats)[1] == pytest.approx(rate, rel=0.03)


def test_an_irregular_rhythm_is_told_from_a_regular_one() -> None:
    rng = np.random.default_rng(1)
    irregular = np.cumsum(rng.uniform(0.5, 1.1, 11))
    even, uneven = (find_beats(pulses(times)) for times in (REGULAR, irregular))
    assert rhythm(even)[4] < 0.03 < 0.1 < rhythm(uneven)[4]  # spread of the intervals
    assert regularity(even.slope)[1] > regularity(uneven.slope)[1]


def test_an_odd_beat_is_seen() -> None:
    x = pulses(REGULAR)
    odd = x.copy()
    odd[:, 430:460] *= -1  # the beat at 4.5 s upside down
    same, other = (alikeness(find_beats(signal)) for signal in (x, odd))
    assert other[1] < 0 < 0.9 < same[1]


def test_a_p_wave_before_every_beat_is_told_from_noise() -> None:
    x = pulses(REGULAR)
    noise = np.random.default_rng(2).standard_normal(x.shape).astype(np.float32)
    t = np.arange(x.shape[1]) / 100
    waves = sum(0.5 * np.exp(-(((t - at + 0.16) / 0.03) ** 2) / 2) for at in REGULAR)
    steady, none = (
        p_waves(beats, qrs_limits(beats.median)[0])
        for beats in (find_beats((x + waves).astype(np.float32)), find_beats(x + 0.2 * noise))
    )
    assert none[0] < 0.5 < 0.9 < steady[0]  # the mean correlation with the median P wave
    assert (steady[3:] > none[3:]).all()


def test_a_wide_qrs_complex_is_wider() -> None:
    widths = []
    for width in (0.02, 0.05):
        onset, offset = qrs_limits(find_beats(pulses(REGULAR, width=width)).median)
        widths.append(offset - onset)
    assert widths[1] > 1.5 * widths[0]


def test_the_sampling_rate_does_not_matter() -> None:
    slow, fast = measure(pulses(REGULAR), 100), measure(pulses(REGULAR, rate=500), 500)
    assert slow.shape == fast.shape
    assert fast[1] == pytest.approx(slow[1], rel=0.02)
    assert np.corrcoef(slow, fast)[0, 1] > 0.98


@pytest.mark.parametrize("samples", [1, 50, 150, 1024])
@pytest.mark.parametrize("kind", ["zero", "noise", "nan", "step"])
def test_there_are_always_as_many_and_all_are_finite(kind: str, samples: int) -> None:
    x = np.zeros((12, samples), np.float16)
    if kind == "noise":
        x = np.random.default_rng(0).standard_normal(x.shape).astype(np.float16)
    if kind == "nan":
        x[3] = np.nan
    if kind == "step":
        x[:, samples // 2 :] = 1
    values = measure(x, 100)
    assert values.shape == measure(pulses(REGULAR), 100).shape
    assert np.isfinite(values).all()
