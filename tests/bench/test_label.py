"""`ecgmatch bench label`: simulated readers, and the labels that they need."""

from pathlib import Path

import numpy as np
import pytest

from ecgmatch_dist.bench.label import Database, draw, main, needed, ratio, show, simulate
from ecgmatch_dist.errors import UserError


def test_the_labels_that_a_curve_needs() -> None:
    curve = {20: 0.5, 40: 0.6, 60: 0.55, 80: 0.7}
    assert [needed(curve, aim) for aim in (0.4, 0.55, 0.65)] == [20, pytest.approx(30), pytest.approx(60 + 20 * 2 / 3)]
    assert needed(curve, 0.8) == float("inf")
    found = {"random": [{"20": 0.5, "40": 0.6, "cv": 0.1}], "bank": [{"20": 0.6, "40": 0.8, "cv": 0.1}]}
    assert ratio(found, 40, np.array([0])) == 0.5


def test_simulated_readers_learn_and_never_ask_about_the_test(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((160, 6)).astype(np.float32)
    y = (x[:, :2] > 0.8).astype(np.uint8)
    database = Database("made_up", x, y, np.arange(160) // 2)
    curves = {way: [simulate(database, way, 1, 40)] for way in ("random", "bank")}  # type: ignore[arg-type]
    assert all(curve["40"] > 0.5 for (curve,) in curves.values())
    linear = simulate(database, "bank", 1, 40, ("linear head", "forest"))
    assert linear["20"] != curves["bank"][0]["20"]
    show({"made_up": curves}, 40, 1)
    assert "made_up: the bank needs" in capsys.readouterr().out
    draw({"made_up": curves}, 40, tmp_path / "x.svg")
    assert (tmp_path / "x.svg").stat().st_size > 1000
    with pytest.raises(UserError, match="only 60 recordings to ask about"):
        simulate(Database("few", x[:80], y[:80], np.arange(80)), "bank", 1, 80)
    with pytest.raises(UserError, match="a multiple of 20"):
        main(labels=50)
