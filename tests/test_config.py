"""Configuration: round trip, early failure with the field's name, and what counts as the same run."""

from dataclasses import replace
from pathlib import Path

import pytest

from ecgmatch_dist.config import Bank, Config, Model, Optim, Runtime, from_json
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.methods.configs import ECGMatch, Supervised
from ecgmatch_dist.presets import PRESETS


@pytest.mark.parametrize("preset", PRESETS)
def test_round_trip(preset: str) -> None:
    config = PRESETS[preset]()
    assert from_json(config.to_json()) == config


def test_round_trip_keeps_the_method() -> None:
    config = Config(method=ECGMatch(neighbours=7, refine=False))
    assert from_json(config.to_json()).method == ECGMatch(neighbours=7, refine=False)
    assert isinstance(from_json(Config(method=Supervised()).to_json()).method, Supervised)


def test_unknown_key_is_refused_by_name() -> None:
    value = Config().to_json()
    value["optim"]["learning_rate"] = 1
    with pytest.raises(UserError, match=r"optim\.learning_rate"):
        from_json(value)


def test_unknown_method_is_refused() -> None:
    value = Config().to_json()
    value["method"] = {"name": "bestmatch"}
    with pytest.raises(UserError, match=r"method\.name = 'bestmatch': one of ecgmatch"):
        from_json(value)


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: Model(width=100), r"model\.width = 100"),
        (lambda: Model(dropout=1.0), r"model\.dropout = 1\.0"),
        (lambda: Optim(lr=0.0), r"optim\.lr"),
        (lambda: Optim(unlabelled_batch=0), r"optim\.unlabelled_batch"),
        (lambda: Bank(shard_group=0), r"bank\.shard_group"),
    ],
)
def test_impossible_values_name_the_field(make: object, field: str) -> None:
    assert callable(make)
    with pytest.raises(UserError, match=field):
        make()


def test_meaning_ignores_folders_and_execution_only() -> None:
    config = Config()
    same = replace(config, runs=Path("elsewhere"), tag="x", runtime=Runtime(threads=3), bank=Bank(backend="torch"))
    assert same.meaning() == config.meaning()
    for other in (
        replace(config, seed=1),
        replace(config, method=ECGMatch(neighbours=6)),
        replace(config, bank=Bank(view="clean")),
        replace(config, runtime=Runtime(batchnorm="local")),
    ):
        assert other.meaning() != config.meaning()


def test_the_supervised_start_is_the_same_for_all_methods() -> None:
    config = Config(method=ECGMatch(neighbours=9), optim=Optim(lr=0.5), bank=Bank(view="clean"))
    assert config.supervised().meaning() == Config().supervised().meaning()
    assert config.supervised().supervised() == config.supervised()
    assert Config(tag="k7").supervised().run_name("x") == "x.supervised"


def test_run_names() -> None:
    assert Config().run_name("cross-g12ec@0.01.s20") == "cross-g12ec@0.01.s20.ecgmatch"
    assert Config(tag="k7").run_name("mix@0.01.s19") == "mix@0.01.s19.ecgmatch.k7"
    assert Config(name="mine").run_name("mix@0.01.s19") == "mine"
