"""Measurements against signals whose answer is known by construction."""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from ecgmatch_dist.config import OPINION
from ecgmatch_dist.measurements.beats import find_beats
from ecgmatch_dist.measurements.measure import measure
from ecgmatch_dist.measurements.rhythm import alikeness, early_beats, regularity, rhythm
from ecgmatch_dist.measurements.waves import (
    before_qrs,
    p_waves,
    pr_interval,
    qrs_limits,
    qrs_shape,
    relative_to_qrs,
)


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
GOLDEN = Path(__file__).parents[1] / "golden" / "measurements.txt"


def with_p_waves(x: NDArray[np.float32], before: float, rate: int = 100) -> NDArray[np.float32]:
    """With a P wave that many seconds before each beat of `REGULAR`."""
    t = np.arange(x.shape[1]) / rate
    p = sum(0.5 * np.exp(-(((t - at + before) / 0.02) ** 2) / 2) for at in REGULAR)
    return (x + p).astype(np.float32)


def example() -> NDArray[np.float32]:
    """Measurements of one recording with an early beat."""
    times = REGULAR.copy()
    times[5] -= 0.2
    return measure(with_p_waves(pulses(times), 0.18), 100)


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


@pytest.mark.parametrize("inverted", [False, True])
def test_an_early_beat_and_its_shape_are_seen(inverted: bool) -> None:
    times = REGULAR.copy()
    times[5] -= 0.3  # at 4.2 s instead of 4.5 s
    x = pulses(times)
    if inverted:
        x[:, 400:435] *= -1
    early = early_beats(find_beats(x))
    assert early_beats(find_beats(pulses(REGULAR)))[:3] == [0, 0, 0]
    assert early[:3] == ([1, 0, 1] if inverted else [1, 1, 0])  # of the atria, of the ventricles
    assert early[6] == pytest.approx(0.5 / 0.8, abs=0.03)  # after that share of the usual interval
    assert early[9] == pytest.approx((1.1 - 0.5) / 0.8, abs=0.05)  # and a pause follows
    assert (early[10] < 0) == inverted
    assert early[14] == pytest.approx(1, abs=0.3)  # as wide as the others


def test_a_beat_of_the_ventricles_is_wide_and_an_early_one_alone_is_not() -> None:
    times = np.append(REGULAR[:6], REGULAR[7:] - 0.1)  # without the beat at 5.3 s
    beat = 5.0
    t = np.arange(1000) / 100
    x, narrow = pulses(times), pulses(np.sort(np.append(times, beat)))
    x += (12 * np.exp(-(((t - beat) / 0.05) ** 2) / 2)).astype(np.float32)
    normal, wide = early_beats(find_beats(narrow)), early_beats(find_beats(x))
    assert normal[13] < 1.3 < 1.5 < wide[13]  # the widest beat
    assert normal[11] > 0.9  # how alike the earliest one is


def test_artefacts_at_both_ends_leave_measurements() -> None:
    """Peaks, of which none has a whole beat around it."""
    x = np.zeros((12, 1024), np.float32)
    x[:, [5, 35, 990, 1018]] = 50
    beats = find_beats(x)
    assert not np.isin(beats.peaks[1:], beats.whole).any()
    assert np.isfinite(measure(x, 100)).all()


def test_a_few_beats_are_enough() -> None:
    assert early_beats(find_beats(pulses(REGULAR[:2], seconds=3))) == [0] * 6 + [1, 1, 1, 0, 1, 1, 1, 1, 1, 0]


@pytest.mark.parametrize("before", [0.18, 0.23, 0.28])
def test_the_pr_interval(before: float) -> None:
    """P waves of 0.02 s to both sides of their peak at 37 %: from the peak, and from where they rise."""
    x = pulses(REGULAR)
    median = find_beats(with_p_waves(x, before)).median
    onset, _ = qrs_limits(median)
    to_complex = before * 100 - (40 - onset)  # samples from the peak of the P wave to where the complex begins
    peak, begin, peak_by_lead, begin_by_lead, _ = pr_interval(median, onset)
    assert peak == pytest.approx(to_complex, abs=2) == peak_by_lead
    assert peak + 2 <= begin <= peak + 6
    assert begin_by_lead == pytest.approx(begin, abs=2)
    pieces = before_qrs(median, onset)
    assert np.abs(pieces[0].argmax() * 3 + 1 - (36 - to_complex)) <= 3


def test_wide_complexes_are_wide_by_every_rule() -> None:
    narrow, wide = (
        qrs_shape(median, *qrs_limits(median))
        for median in (find_beats(pulses(REGULAR, width=width)).median for width in (0.02, 0.05))
    )
    assert (wide[:15] > narrow[:15]).all()


def test_relative_heights_do_not_depend_on_the_scale_of_a_lead() -> None:
    median = find_beats(pulses(REGULAR)).median
    onset, offset = qrs_limits(median)
    scales = np.linspace(0.2, 3, 12, dtype=np.float32)[:, None]
    once, scaled = (relative_to_qrs(values, onset, offset) for values in (median, median * scales))
    free = [0, 1, 2, 3, 4, 5, 6]  # the T wave of all leads together has its peak where the largest leads have it
    np.testing.assert_allclose(once[free], scaled[free], atol=1e-3)
    assert once[0] == pytest.approx(1, abs=0.1)  # the complexes are R waves
    assert once[2] == pytest.approx(0.2, abs=0.1)  # the T wave has a fifth of their height


def test_the_sampling_rate_does_not_matter() -> None:
    slow, fast = (measure(with_p_waves(pulses(REGULAR, rate=rate), 0.18, rate), rate) for rate in (100, 500))
    assert slow.shape == fast.shape
    assert fast[1] == pytest.approx(slow[1], rel=0.02)
    assert np.corrcoef(slow, fast)[0, 1] > 0.98


def test_measurements_are_those_of_their_version() -> None:
    """Published trees read them by number. After a change: raise OPINION, write the file by `python -m
    tests.measurements.test_measure`, and grow the included model's trees anew."""
    version, *values = GOLDEN.read_text().split()
    assert int(version) == OPINION
    np.testing.assert_allclose(example(), np.array(values, float), rtol=2e-3, atol=2e-4)


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


if __name__ == "__main__":
    GOLDEN.write_text("\n".join([str(OPINION), *(f"{value:.4g}" for value in example())]) + "\n")
