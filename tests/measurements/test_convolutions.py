"""Random convolutions against plain loops, what the regression learns from them, and that all ranks agree."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sklearn.linear_model import Ridge

from ecgmatch_dist.data.labels import UNKNOWN
from ecgmatch_dist.measurements import convolutions
from ecgmatch_dist.measurements.convolutions import (
    DILATIONS,
    FEATURES,
    LIMIT,
    PENALTY,
    Kernels,
    RandomConvolutions,
    draw,
    features,
    find_thresholds,
    fit_convolutions,
    regress,
)
from ecgmatch_dist.measurements.opinion import fit_advisers
from ecgmatch_dist.methods.ecgmatch import ECGMatchSettings
from tests.support.ranks import run_threads
from tests.support.waves import Shards, recordings


def fitted(x: NDArray[np.float32], y: NDArray[np.uint8], seed: int = 0) -> RandomConvolutions:
    return fit_convolutions(Shards(x), np.arange(len(x)), y, seed)  # type: ignore[arg-type]


def test_a_feature_is_the_share_of_samples_above_a_threshold() -> None:
    """The slow, obvious way: each sample is the sum over leads and taps, with zeros beside the recording."""
    x = np.random.default_rng(0).standard_normal((12, 60)).astype(np.float32)
    weights = draw(0)[:, :2]
    thresholds = find_thresholds([x, x[::-1].copy()], weights)
    found = features(x, Kernels(weights, thresholds)).reshape(thresholds.shape)
    for d, dilation in enumerate(DILATIONS):
        for n in range(2):
            said = [
                sum(
                    float(weights[d, n, v, tap]) * x[v, t + (tap - 4) * dilation]
                    for v in range(12)
                    for tap in range(9)
                    if 0 <= t + (tap - 4) * dilation < 60
                )
                for t in range(60)
            ]
            for q in range(thresholds.shape[2]):
                share = np.mean(np.array(said) > float(thresholds[d, n, q]))
                assert float(found[d, n, q]) == pytest.approx(share, abs=1.01 / 60)  # a sample may lie on the threshold


def test_kernels_see_no_constant_and_one_lead_as_often_as_many() -> None:
    weights = draw(3)
    assert weights.shape[0] * weights.shape[1] * len(convolutions.QUANTILES) == FEATURES
    assert torch.equal(weights.sum(3), torch.zeros(weights.shape[:3]))
    leads = (weights != 0).any(3).sum(2).flatten()
    assert leads.min() >= 1
    assert 0.15 < (leads == 1).float().mean() < 0.4
    assert 0.15 < (leads > 7).float().mean() < 0.4
    assert torch.equal(weights, draw(3))
    assert not torch.equal(weights, draw(4))


def test_the_regression_is_scikit_learns() -> None:
    rng = np.random.default_rng(0)
    rows, new, y = rng.random((30, 40)), rng.random((5, 40)), rng.integers(0, 2, (30, 2)).astype(np.uint8)
    new[0, 0] = 1e6  # a feature far outside of what was seen is bounded
    linear = regress(torch.from_numpy(rows), y)
    z = (np.stack([*rows, *new]) - rows.mean(0)) / (rows.std(0) + 1e-6)
    expected = Ridge(PENALTY).fit(z[:30], y).predict(z[30:].clip(-LIMIT, LIMIT))
    found = convolutions.standard(torch.from_numpy(new), linear.mean, linear.deviation) @ linear.weights.T
    np.testing.assert_allclose(found + linear.intercept, expected, rtol=1e-9)


def test_it_learns_a_wave_and_predicts_each_recording_alone() -> None:
    (x, y), (new, truth) = recordings(60, 0), recordings(40, 1)
    model = fitted(x, y)
    p = model.predict(new)
    assert p.shape == truth.shape
    assert p.min() >= 0
    assert p.max() <= 1
    positive = truth[:, 0] == 1
    assert p[positive, 0].min() > p[~positive, 0].max()
    assert np.array_equal(p[7:9], model.predict(new[7:9]))
    assert model.predict(new[:0]).shape == (0, 2)


def test_a_recording_with_holes_gets_an_answer() -> None:
    x, y = recordings(20, 0)
    x[:, 3, 50:100] = np.nan
    assert np.isfinite(fitted(x, y).predict(x)).all()


def test_an_unknown_label_is_no_negative() -> None:
    (x, y), (new, _) = recordings(60, 0), recordings(10, 1)
    seen = np.flatnonzero(y[:, 1] == 1)
    hidden = y.copy()
    hidden[seen[::2], 0] = UNKNOWN
    left = hidden[:, 0] != UNKNOWN
    kept = regress(torch.arange(60.0)[:, None] * torch.ones(1, 5), hidden)
    z = (np.arange(60.0) - 29.5) / (np.arange(60.0).std() + 1e-6)
    expected = Ridge(PENALTY).fit(np.tile(z[left, None], 5), y[left, 0]).intercept_
    assert float(kept.intercept[0]) == pytest.approx(float(expected))
    nobody = np.full_like(y, UNKNOWN)
    assert fitted(x, nobody).predict(new) == pytest.approx(0.5)


@pytest.mark.parametrize(("world", "n"), [(2, 41), (3, 2)])
def test_all_ranks_have_the_model_of_rank_0(world: int, n: int) -> None:
    """One rank computes what several do, even where there are fewer recordings than ranks."""
    (x, y), (new, _) = recordings(n, 0), recordings(6, 1)

    def fit(rank: int, world: int) -> NDArray[np.float64]:
        return fitted(x, y).predict(new)

    alone = fitted(x, y).predict(new)
    first, *others = run_threads(world, fit)
    assert np.array_equal(first, alone)
    assert all(np.array_equal(first, other) for other in others)


def test_the_convolutions_have_one_of_three_votes_and_alone_all() -> None:
    (x, y), (new, _) = recordings(30, 0), recordings(5, 1)
    both, trees, alone = (
        fit_advisers(settings.advisers, Shards(x), np.arange(30), y, 0)  # type: ignore[arg-type]
        for settings in (
            ECGMatchSettings(measurements=True, convolutions=True),
            ECGMatchSettings(measurements=True),
            ECGMatchSettings(convolutions=True),
        )
    )
    assert str(both) == "trees on measurements and random convolutions"
    np.testing.assert_allclose(both.predict(new), trees.predict(new) * 2 / 3 + alone.predict(new) / 3)
    assert np.array_equal(alone.predict(new), fitted(x, y).predict(new))
