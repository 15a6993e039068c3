import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import signal as dsp
from sklearn.preprocessing import StandardScaler

from ecgmatch_dist import presets
from ecgmatch_dist.data.preprocess import PRESETS, Preprocess, bandpass, preprocess, resample
from ecgmatch_dist.errors import UserError
from tests.support.commands import check_command
from tests.support.recordings import make_signal

CPU, PAPER, OFFICIAL = PRESETS["cpu"], PRESETS["paper"], PRESETS["official_code"]


def official_recipe(x: np.ndarray, rate: float, length: int) -> np.ndarray:
    """Slow and obvious: each lead by itself through filtfilt and StandardScaler, then zeros at the end."""
    out = np.zeros((12, length))
    for v in range(12):
        b, a = dsp.butter(3, [1, 47], "bandpass", fs=rate)
        filtered = dsp.filtfilt(b, a, x[v])
        scaled = StandardScaler().fit_transform(filtered.reshape(-1, 1))[:, 0]
        n = min(length, len(scaled))
        out[v, :n] = scaled[:n]
    return out


@pytest.mark.parametrize("n", [5000, 6144, 9000])
def test_official_order_equals_the_official_recipe(n: int) -> None:
    x = make_signal(n=n) + 3
    out, flags = preprocess(x, 500, OFFICIAL)
    assert out.shape == (12, 6144)
    assert out.dtype == np.float32
    np.testing.assert_allclose(out, official_recipe(x, 500, 6144), atol=2e-4)
    assert flags == (("cropped",) if n > 6144 else ())


def test_papers_order_pads_first() -> None:
    x = make_signal(n=5000)
    padded = np.pad(x, ((0, 0), (0, 1144)))
    out, _ = preprocess(x, 500, PAPER)
    np.testing.assert_allclose(out, official_recipe(padded, 500, 6144), atol=2e-4)
    np.testing.assert_allclose(out.mean(axis=1), 0, atol=1e-5)
    np.testing.assert_allclose(out.std(axis=1), 1, atol=1e-4)


@settings(deadline=None, max_examples=60)
@given(
    n=st.integers(2, 700),
    order=st.integers(1, 5),
    band=st.sampled_from([(1, 47), (0.5, 40), (5, 15)]),
    offset=st.floats(-50, 50),
    seed=st.integers(0, 99),
)
def test_block_filter_is_sosfiltfilt(n: int, order: int, band: tuple[float, float], offset: float, seed: int) -> None:
    x = make_signal(seed, n) + offset
    chosen = Preprocess(rate=100, length=n, low=band[0], high=band[1], order=order)
    sections = dsp.butter(order, band, "bandpass", fs=100, output="sos")
    expected = dsp.sosfiltfilt(sections, x, axis=1, padlen=min(3 * (2 * order + 1), n - 1))
    # The reference itself loses digits where sections of high order meet a large offset.
    np.testing.assert_allclose(bandpass(x, chosen), expected, atol=3e-4 * max(1, np.abs(expected).max()))


def test_the_offset_of_an_electrode_costs_no_precision() -> None:
    x = make_signal(n=1000)
    np.testing.assert_allclose(bandpass(x + 300, CPU), bandpass(x, CPU), atol=1e-4)


@pytest.mark.parametrize("rate", [1000, 500, 257, 128.5, 100, 99.97])
def test_any_rate(rate: float) -> None:
    t = np.arange(int(8 * rate)) / rate
    x = np.tile(np.sin(2 * np.pi * 5 * t), (12, 1))
    y = resample(x, rate, 250)
    assert y.shape[1] == pytest.approx(2000, abs=3)
    inner = slice(200, 1700)
    np.testing.assert_allclose(y[0, inner], np.sin(2 * np.pi * 5 * np.arange(y.shape[1]) / 250)[inner], atol=0.02)
    flags = preprocess(x, rate, Preprocess(rate=250, length=2000))[1]
    assert "resampled" in flags


def test_a_rate_far_above_the_target() -> None:
    np.testing.assert_allclose(resample(np.full((12, 9000), 7.0), 1e6, 250), np.full((12, 3), 7.0), atol=1e-6)


def test_a_single_sample_is_not_too_short() -> None:
    out, flags = preprocess(np.ones((12, 1)), 500, OFFICIAL)
    assert not out.any()
    assert "short" in flags


def test_offset_does_not_ring_when_resampled() -> None:
    np.testing.assert_allclose(resample(np.full((12, 500), 7.0), 500, 100), 7, atol=1e-6)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("value", [0.0, 0.5, -3.1])
def test_constant_lead_becomes_zeros(name: str, value: float) -> None:
    x = make_signal(n=1000)
    x[[6, 8]] = value
    out, flags = preprocess(x, 100, PRESETS[name])
    assert not out[[6, 8]].any()
    assert np.abs(out[[0, 7]]).max() > 1
    assert {"flat:V1", "flat:V3"} == {flag for flag in flags if flag.startswith("flat")}


def test_lead_that_is_constant_in_the_part_that_is_kept() -> None:
    x = make_signal(n=3000)
    x[0, :1024] = 1.0
    out, flags = preprocess(x, 100, CPU)
    assert not out[0].any()
    assert flags == ("flat:I", "cropped")


def test_missing_samples_are_interpolated_and_flagged() -> None:
    x = make_signal(n=1000)
    broken = x.copy()
    broken[2, 100:104] = np.nan
    broken[3, :5] = np.inf
    broken[4, -5:] = -np.inf
    broken[5] = np.nan
    out, flags = preprocess(broken, 100, CPU)
    assert flags == ("nan", "inf", "flat:aVF")
    assert np.isfinite(out).all()
    assert not out[5].any()
    mended = x.copy()
    mended[2, 100:104] = np.interp(range(100, 104), [99, 104], x[2, [99, 104]])
    mended[3, :5], mended[4, -5:], mended[5] = x[3, 5], x[4, -6], 0
    np.testing.assert_allclose(out, preprocess(mended, 100, CPU)[0], atol=1e-6)
    assert np.isnan(broken[2, 100]), "the input is not changed"


def test_clipped_leads_are_flagged() -> None:
    x = make_signal(n=1000)
    x[1] = np.clip(3 * x[1], -0.6, 0.6)
    assert preprocess(x, 100, CPU)[1] == ("clipped:II",)
    assert preprocess(make_signal(n=1000), 100, CPU)[1] == ()


@pytest.mark.parametrize(("n", "flags"), [(511, ("short",)), (512, ()), (1024, ()), (1025, ("cropped",))])
def test_lengths(n: int, flags: tuple[str, ...]) -> None:
    out, found = preprocess(make_signal(n=n), 100, CPU)
    assert out.shape == (12, 1024)
    assert found == flags


def test_steps_can_be_left_out() -> None:
    x = make_signal(n=1000).astype(np.float32)
    out, _ = preprocess(x, 100, Preprocess(rate=100, length=1024, sequence=("pad",)))
    assert np.array_equal(out[:, :1000], x)
    assert not out[:, 1000:].any()


@pytest.mark.parametrize(
    "wrong",
    [{"rate": 0}, {"length": 0}, {"rate": 90}, {"low": 0.0}, {"low": 50.0}, {"sequence": ("filter",)},
     {"sequence": ("pad", "pad")}, {"sequence": ("pad", "whiten")}],
)  # fmt: skip
def test_impossible_settings_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(UserError):
        Preprocess(**wrong)  # type: ignore[arg-type]


def test_a_preset_to_train_with_names_the_shards_to_build() -> None:
    assert {*PRESETS} == {*presets.PRESETS}
    for name, make in presets.PRESETS.items():
        assert (PRESETS[name].rate, PRESETS[name].length) == (make().data.rate, make().data.length), name
    check_command("ecgmatch shards build mine.toml --raw archive --out data/shards --preset few_labels")
