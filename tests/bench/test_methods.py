"""The benchmark of methods: it covers all of them, and counts the rows that really pass through the networks."""

import json
from pathlib import Path

import pytest

from ecgmatch_dist import config
from ecgmatch_dist.bench import methods
from ecgmatch_dist.errors import UserError

B, U = 4, 8


@pytest.mark.slow
def test_every_method_at_a_tiny_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    methods.main(
        unlabelled=40,
        length=128,
        width=8,
        labelled_batch=B,
        unlabelled_batch=U,
        repeats=1,
        json=tmp_path / "methods.json",
    )
    costs = {cost["method"]: cost for cost in json.loads((tmp_path / "methods.json").read_text())["costs"]}
    assert {method.name for method in config.methods().values()} - {"fixmatch"} <= costs.keys()
    assert "per forward pass" in capsys.readouterr().out
    passes = {name: (cost["rows"], cost["no_grad_rows"]) for name, cost in costs.items()}
    assert passes["fixmatch, against itself"] == passes["flexmatch"] == passes["dst"] == (B + 2 * U, 0)
    assert passes["ecgmatch"] == passes["mixmatch"] == passes["mixed_mean_teacher"] == (B + 2 * U, 2 * U)
    assert passes["supervised"] == passes["msdnn after its contrast"] == (B, 0)
    assert passes["msdnn"] == (U, U)
    assert passes["ups"] == (B + U, 0)
    assert passes["ups online"] == (B + U, 10 * U)
    for cost in costs.values():
        assert cost["milliseconds"] > 0
        share = json.loads((tmp_path / "methods.json").read_text())["cost of a row without gradient"]
        expected = cost["ratio"] * (B + 2 * U) / (cost["rows"] + share * cost["no_grad_rows"])
        assert cost["normalised"] == pytest.approx(expected)


def test_mistakes_are_refused() -> None:
    with pytest.raises(UserError, match="--unlabelled 3"):
        methods.main(unlabelled=3)
