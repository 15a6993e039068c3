"""The benchmark of networks covers the registry, and compares each with the paper's."""

import json
from pathlib import Path

import pytest

from ecgmatch_dist.bench import backbones
from ecgmatch_dist.config import Model
from ecgmatch_dist.config import backbones as known
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.network.model import build_model


def test_every_network_beside_the_papers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    backbones.main(width=8, length=128, batch=2, repeats=1, json=tmp_path / "costs.json")
    costs = {cost["backbone"]: cost for cost in json.loads((tmp_path / "costs.json").read_text())}
    assert [*costs] == known()
    assert (costs["attention_cnn"]["training_ratio"], costs["attention_cnn"]["prediction_ratio"]) == (1, 1)
    network = build_model(5, Model(8, 8, backbone="resnet1d"), seed=0)
    assert costs["resnet1d"]["parameters"] == sum(p.numel() for p in network.parameters())
    assert all(cost["gflop"] > 0 and cost["training"] > cost["prediction"] > 0 for cost in costs.values())
    told = capsys.readouterr().out
    assert all(name in told for name in known())


def test_networks_of_another_depth(tmp_path: Path) -> None:
    backbones.main(width=8, length=128, batch=2, repeats=1, depth=3, json=tmp_path / "costs.json")
    costs = {cost["backbone"]: cost["parameters"] for cost in json.loads((tmp_path / "costs.json").read_text())}
    for name, parameters in costs.items():
        network = build_model(5, Model(8, 8, backbone=name, depth=3), seed=0)
        assert parameters == sum(p.numel() for p in network.parameters())


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(UserError, match="--batch 1 --repeats 7 --length 1024: at least 2, 1 and 1"):
        backbones.main(batch=1)
