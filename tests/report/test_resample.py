"""The bootstrap against repeated recordings, calibration and decision curves against scikit-learn and plain loops."""

from dataclasses import asdict

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn import metrics as sk

from ecgmatch_dist.data.labels import UNKNOWN
from ecgmatch_dist.metrics import compute_metrics
from ecgmatch_dist.report import calibration as cal
from ecgmatch_dist.report import resample as rs

THRESHOLDS = np.array([0.3, 0.5, 0.6])
NAMES = ["a", "b", "c"]


def some_predictions(n: int, seed: int, digits: int = 7) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    rng = np.random.default_rng(seed)
    labels = (rng.random((n, 3)) < [0.1, 0.5, 0.3]).astype(np.uint8)
    return labels, np.clip(0.3 * labels + 0.7 * rng.random((n, 3)), 0, 1).round(digits).astype(np.float32)


def exact(labels: NDArray[np.uint8], p: NDArray[np.float32]) -> dict[str, float]:
    names = ("map", "macro_auc", "macro_gbeta", "ranking_loss", "hamming_loss", "coverage")
    measured = asdict(compute_metrics(labels, p, THRESHOLDS, NAMES))
    return {name: measured[name] for name in names}


@pytest.mark.parametrize(("n", "digits"), [(40, 7), (700, 1), (2000, 7)])
def test_the_quick_metrics_are_those_of_the_training(n: int, digits: int) -> None:
    labels, p = some_predictions(n, seed=n, digits=digits)
    labels[n // 3 :, 1] = UNKNOWN
    labels[:, 0] = UNKNOWN if digits == 1 else 0  # a class that nobody has looked for; one without positives
    drawn = rs.resample(labels, p, THRESHOLDS, rs.counts(n, 2, seed=1))
    assert {name: values[0] for name, values in drawn.items()} == pytest.approx(exact(labels, p), abs=1e-6)


def test_a_resample_with_labels_that_nobody_has_given() -> None:
    labels, p = some_predictions(300, seed=3)
    labels[100:, 1] = UNKNOWN
    labels[200:, 2] = UNKNOWN
    weights = rs.counts(300, 3, seed=1)
    drawn = rs.resample(labels, p, THRESHOLDS, weights)
    for r in range(3):
        rows = np.repeat(np.arange(300), weights[:, r + 1].astype(int))
        for name, value in exact(labels[rows], p[rows]).items():
            assert drawn[name][r + 1] == pytest.approx(value, abs=1e-6), name


@pytest.mark.parametrize(("n", "digits", "tolerance"), [(300, 7, 1e-6), (400, 1, 1e-6), (3000, 7, 1e-3)])
def test_a_resample_is_the_metric_of_repeated_recordings(n: int, digits: int, tolerance: float) -> None:
    labels, p = some_predictions(n, seed=n, digits=digits)  # one digit: many equal scores
    weights = rs.counts(n, 3, seed=1)
    drawn = rs.resample(labels, p, THRESHOLDS, weights)
    for r in range(3):
        rows = np.repeat(np.arange(n), weights[:, r + 1].astype(int))
        for name, value in exact(labels[rows], p[rows]).items():
            assert drawn[name][r + 1] == pytest.approx(value, abs=tolerance), name


def test_a_class_that_a_resample_misses_is_left_out_of_its_means() -> None:
    labels, p = some_predictions(50, seed=3)
    labels[:, 0] = 0
    labels[7, 0] = 1
    weights = rs.counts(50, 40, seed=0)
    without = int(np.flatnonzero(weights[7, 1:] == 0)[0])
    drawn = rs.resample(labels, p, THRESHOLDS, weights)
    rows = np.repeat(np.arange(50), weights[:, without + 1].astype(int))
    assert drawn["map"][without + 1] == pytest.approx(exact(labels[rows], p[rows])["map"], abs=1e-6)
    assert np.isfinite(drawn["map"]).all()


def test_per_recording_metrics_are_scikit_learns() -> None:
    labels, p = some_predictions(500, seed=5, digits=1)
    rows = rs.per_recording(labels, p, THRESHOLDS)
    assert rows["ranking_loss"].mean() == pytest.approx(sk.label_ranking_loss(labels, p))
    assert rows["coverage"].mean() == pytest.approx(sk.coverage_error(labels, p))
    assert rows["hamming_loss"].mean() == pytest.approx(sk.hamming_loss(labels, p >= THRESHOLDS))


def test_counts_are_draws_with_replacement_and_repeatable() -> None:
    weights = rs.counts(100, 20, seed=4)
    assert np.all(weights[:, 0] == 1)
    assert np.all(weights.sum(axis=0) == 100)
    assert weights[:, 1:].max() > 1
    assert np.array_equal(weights, rs.counts(100, 20, seed=4))
    assert not np.array_equal(weights, rs.counts(100, 20, seed=5))


def test_the_interval_of_a_share_is_the_binomials() -> None:
    labels, p = np.zeros((400, 3), np.uint8), np.zeros((400, 3), np.float32)
    labels[::2], labels[::5, 0], p[:, 1] = 1, 0, 0.9
    drawn = rs.resample(labels, p, THRESHOLDS, rs.counts(400, 2000, seed=0))
    low, high = rs.interval(drawn["hamming_loss"][1:])
    rows = rs.per_recording(labels, p, THRESHOLDS)["hamming_loss"]
    spread = 1.96 * rows.std() / 20
    assert (low, high) == pytest.approx((rows.mean() - spread, rows.mean() + spread), abs=0.1 * spread)


def test_calibration_error_by_hand() -> None:
    truth, p = np.array([0, 0, 1, 1], np.uint8), np.array([0.1, 0.1, 0.9, 0.5], np.float32)
    found = cal.reliability(truth, p, bins=10)
    assert found.count.tolist() == [2, 1, 1]
    assert found.frequency.tolist() == [0, 1, 1]
    assert found.ece == pytest.approx((2 * 0.1 + 0.5 + 0.1) / 4, abs=1e-6)
    assert cal.reliability(np.array([1], np.uint8), np.array([1.0], np.float32)).ece == 0  # 1 is in the last bin


def test_a_calibrated_model_has_hardly_an_error() -> None:
    rng = np.random.default_rng(0)
    p = rng.random(200_000).astype(np.float32)
    assert cal.reliability((rng.random(len(p)) < p).astype(np.uint8), p).ece < 0.01


def test_brier_is_scikit_learns() -> None:
    labels, p = some_predictions(300, seed=1)
    assert cal.brier(labels[:, 1], p[:, 1]) == pytest.approx(sk.brier_score_loss(labels[:, 1], p[:, 1]))


def test_net_benefit_by_counting() -> None:
    labels, p = some_predictions(200, seed=2, digits=2)
    at = np.linspace(0.05, 0.95, 19)
    found = cal.net_benefit(labels[:, 1], p[:, 1], at)
    for t, value in zip(at, found, strict=True):
        acted = p[:, 1] >= np.float32(t)
        tp, fp = (acted & (labels[:, 1] == 1)).sum(), (acted & (labels[:, 1] == 0)).sum()
        assert value == pytest.approx(tp / 200 - fp / 200 * t / (1 - t))
    everyone = cal.net_benefit(labels[:, 1], np.ones(200, np.float32), at)
    assert everyone == pytest.approx(cal.treat_all(float(labels[:, 1].mean()), at))
