"""The forecast of a learning curve: it finds the curve behind scores, and its intervals hold the truth as often as they say."""

import numpy as np
import pytest

from ecgmatch_dist.forecast import forecast, sentence

SIZES = [20, 40, 60, 80, 100, 120, 140, 160]


def curve(n: np.ndarray | float, a: float = 0.5, top: float = 0.85, factor: float = 1.5) -> np.ndarray:
    return np.asarray(top - factor * np.asarray(n, float) ** -a)


def test_scores_without_noise_give_the_curve_back() -> None:
    fit = forecast(SIZES, curve(np.array(SIZES)).tolist())
    assert fit is not None
    assert fit.score(160).value == pytest.approx(float(curve(160)), abs=0.004)
    assert fit.gain(160, 50).value == pytest.approx(float(curve(210) - curve(160)), abs=0.003)
    assert fit.gain(160, 50).low <= fit.gain(160, 50).value <= fit.gain(160, 50).high


@pytest.mark.parametrize("a", [0.35, 0.7, 1.2])
def test_nine_of_ten_intervals_hold_the_truth(a: float) -> None:
    rng = np.random.default_rng(3)
    truth = float(curve(210, a) - curve(160, a))
    hits = 0
    for _ in range(40):
        fit = forecast(SIZES, (curve(np.array(SIZES), a) + 0.012 * rng.standard_normal(len(SIZES))).tolist())
        assert fit is not None
        hits += fit.gain(160, 50).low <= truth <= fit.gain(160, 50).high
    assert hits >= 33


def test_words_and_the_end() -> None:
    rising, flat = forecast(SIZES, curve(np.array(SIZES)).tolist()), forecast(SIZES, [0.8] * 8)
    assert rising is not None
    assert not rising.flat(160, 50)
    assert sentence(rising, 160).startswith("50 more labels: about +0.0")
    assert flat is not None
    assert flat.flat(160, 50)
    assert "You may stop" in sentence(flat, 160)
    assert not flat.flat(60, 50)
    assert sentence(flat, 60) == "The curve does not rise yet. 60 labels are too few to say that it will not: go on."
    assert forecast([20, 40, 60], [0.4, 0.5, 0.6]) is None
    assert "Too early" in sentence(None, 60)


def test_falling_scores_and_hopeless_ones_give_no_nonsense() -> None:
    fit = forecast(SIZES, np.linspace(0.8, 0.6, 8).tolist())
    assert fit is None or 0 <= fit.gain(160, 50).value < 0.02
    fit = forecast(SIZES, [0.1, 0.9] * 4)
    assert fit is None or fit.limit().high <= 1
