"""The benchmark of methods: it covers all of them, and counts the rows that really pass through the networks."""

import json
from pathlib import Path
from typing import get_args

import pytest

from ecgmatch_dist.bench import methods
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.methods.configs import MethodConfig

B, U = 4, 8


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
    assert {method.name for method in get_args(MethodConfig)} - {"fixmatch"} <= costs.keys()
    assert "a forward pass" in capsys.readouterr().out
    passes = {name: (cost["rows"], cost["looks"]) for name, cost in costs.items()}
    assert passes["fixmatch, against itself"] == passes["flexmatch"] == passes["dst"] == (B + 2 * U, 0)
    assert passes["ecgmatch"] == passes["mixmatch"] == passes["mixed_mean_teacher"] == (B + 2 * U, 2 * U)
    assert passes["supervised"] == passes["msdnn after its contrast"] == (B, 0)
    assert passes["msdnn"] == (U, U)
    assert passes["ups"] == (B + U, 0)
    assert passes["ups online"] == (B + U, 10 * U)
    for cost in costs.values():
        assert cost["milliseconds"] > 0
        share = json.loads((tmp_path / "methods.json").read_text())["share of a look"]
        expected = cost["ratio"] * (B + 2 * U) / (cost["rows"] + share * cost["looks"])
        assert cost["normalised"] == pytest.approx(expected)


def test_mistakes_are_refused() -> None:
    with pytest.raises(UserError, match="--unlabelled 3"):
        methods.main(unlabelled=3)
