"""Calibration: probabilities become frequencies, the order stays, and extreme validation parts do no harm."""

import json
from pathlib import Path

import numpy as np
import pytest
from scipy.special import expit, logit

from ecgmatch_dist.data.labels import UNKNOWN
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.record.calibration import fit_calibration, read_calibration, to_file
from tests.support.prediction import write_model


def overconfident(n: int = 20_000) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """True probabilities [n], labels [n, 1], and outputs [n, 1] of a network whose logits are twice as large, and shifted."""
    rng = np.random.default_rng(0)
    truth = rng.uniform(0.02, 0.98, n)
    return truth, (rng.random(n) < truth).astype(np.uint8)[:, None], expit(2 * logit(truth) + 1)[:, None]


def test_probabilities_become_frequencies() -> None:
    truth, y, p = overconfident()
    calibration = fit_calibration(y, p)
    assert calibration.slope[0] == pytest.approx(0.5, abs=0.03)
    assert calibration.shift[0] == pytest.approx(-0.5, abs=0.05)
    assert np.abs(calibration.of_probabilities(p)[:, 0] - truth).max() < 0.03


def test_unknown_labels_do_not_count() -> None:
    _, y, p = overconfident(2000)
    unknown = np.concatenate([y, np.full_like(y, UNKNOWN)])
    both = fit_calibration(unknown, np.concatenate([p, np.full_like(p, 0.99)]))
    assert both.slope == pytest.approx(fit_calibration(y, p).slope)


def test_separated_and_absent_classes_stay_finite() -> None:
    y = np.array([[0, 0], [0, 0], [1, 0], [1, 0]], np.uint8)
    p = np.array([[0.0, 0.1], [0.2, 0.2], [0.9, 0.3], [1.0, 0.4]], np.float32)
    calibration = fit_calibration(y, p)
    found = calibration.of_probabilities(p)
    assert np.isfinite(found).all()
    assert (np.diff(found[:, 0]) > 0).all()
    assert 0.5 < found[3, 0] < 1
    assert (calibration.slope[1], calibration.shift[1]) == (1, 0)


def test_the_file_and_older_runs(tmp_path: Path) -> None:
    run = write_model(tmp_path / "run")
    computed = read_calibration(run, 5)
    (run / "calibration.json").write_text(json.dumps(to_file(computed)))
    assert read_calibration(run, 5) == computed
    with pytest.raises(UserError, match="each of the 4 classes"):
        read_calibration(run, 4)
