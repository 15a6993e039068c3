"""Known cases: whitened, so that a similarity means something."""

from pathlib import Path

import numpy as np
import pytest

from ecgmatch_dist.errors import UserError
from ecgmatch_dist.predict.cases import KnownCases
from tests.support.prediction import CLASSES, write_model


def test_a_known_case_finds_itself_and_the_others_are_unlike(tmp_path: Path) -> None:
    """The raw features are independent numbers with a large common mean: their cosines are all above 0.95."""
    run = write_model(tmp_path / "run", cases=300)
    cases = KnownCases.of_run(run, list(CLASSES))
    raw = np.load(run / "predictions" / "labelled.npz")
    unit = raw["features"] / np.linalg.norm(raw["features"], axis=1, keepdims=True)
    assert (unit @ unit.T).min() > 0.95
    for i in (0, 7, 25):
        ((case, second),) = cases.nearest(raw["features"][[i]], 2)
        assert case.id == raw["ids"][i]
        assert case.similarity == pytest.approx(1, abs=1e-5)
        assert case.classes == (CLASSES[i % 5],)
        assert second.similarity < 0.9
    others = cases.features @ cases.features.T
    assert abs(np.mean(others[~np.eye(len(others), dtype=bool)])) < 0.02
    assert 0 < cases.rare < cases.usual < 0.9


def test_few_cases_are_enough(tmp_path: Path) -> None:
    cases = KnownCases.of_run(write_model(tmp_path / "run", cases=2), list(CLASSES))
    assert len(cases.nearest(np.zeros((1, 16)), 3)[0]) == 3


def test_a_run_that_has_not_finished(tmp_path: Path) -> None:
    run = write_model(tmp_path / "run")
    (run / "predictions" / "labelled.npz").unlink()
    with pytest.raises(UserError, match=r"labelled\.npz.*has not finished"):
        KnownCases.of_run(run, list(CLASSES))
