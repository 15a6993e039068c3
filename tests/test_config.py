"""Configuration: round trip through JSON, early errors that name the field, and what counts as the same run."""

import json
import subprocess
import sys
from dataclasses import Field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_args

import pytest

from ecgmatch_dist.config import (
    Bank,
    Config,
    Data,
    Model,
    Optim,
    Role,
    Runtime,
    first_difference,
    flatten,
    from_json,
    role,
)
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.methods.dst import DSTSettings
from ecgmatch_dist.methods.ecgmatch import ECGMatchSettings
from ecgmatch_dist.methods.supervised import SupervisedSettings
from ecgmatch_dist.presets import PRESETS


@pytest.mark.parametrize("preset", PRESETS)
def test_round_trip(preset: str) -> None:
    config = PRESETS[preset]()
    assert from_json(config.to_json()) == config


def test_round_trip_keeps_the_method() -> None:
    config = Config(method=ECGMatchSettings(neighbours=7, refine=False))
    assert from_json(config.to_json()).method == ECGMatchSettings(neighbours=7, refine=False)
    assert isinstance(from_json(Config(method=SupervisedSettings()).to_json()).method, SupervisedSettings)


def test_unknown_key_is_refused_by_name() -> None:
    value = Config().to_json()
    value["optim"]["learning_rate"] = 1
    with pytest.raises(UserError, match=r"optim\.learning_rate"):
        from_json(value)


def test_unknown_method_is_refused() -> None:
    value = Config().to_json()
    value["method"] = {"name": "bestmatch"}
    with pytest.raises(UserError, match="method = 'bestmatch': one of supervised"):
        from_json(value)


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: Model(width=100), r"model\.width = 100"),
        (lambda: Model(dropout=1.0), r"model\.dropout = 1\.0"),
        (lambda: Optim(lr=0.0), r"optim\.lr"),
        (lambda: Optim(unlabelled_batch=0), r"optim\.unlabelled_batch"),
        (lambda: Bank(shard_group=0), r"bank\.shard_group"),
        (lambda: ECGMatchSettings(neighbours=0), r"method\.neighbours = 0"),
        (lambda: ECGMatchSettings(lambda_u=-3.0), r"method\.lambda_u = -3\.0: 0 or more"),
        (lambda: ECGMatchSettings(lambda_f=-1.0), r"method\.lambda_f = -1\.0"),
        (lambda: DSTSettings(lambda_worst=-1.0), r"method\.lambda_worst = -1\.0"),
    ],
)
def test_impossible_values_name_the_field(make: object, field: str) -> None:
    assert callable(make)
    with pytest.raises(UserError, match=field):
        make()


# --- which settings make another run


EXECUTION = {
    *("split", "shards", "runs", "name", "tag", "data.rate", "data.length", "data.cache", "data.cache_gib"),
    *("bank.shard_group", "bank.backend", "bank.overlap"),
    *("runtime.device", "runtime.compile", "runtime.threads", "runtime.readers"),
    "runtime.deterministic",
    *("runtime.log_every", "runtime.save_every", "runtime.timeout_minutes"),
}
ANOTHER_WAY_TO_EXECUTE = {
    "runs folder": Config(runs=Path("elsewhere")),
    "shards": Config(shards="https://example.org/shards"),
    "tag": Config(tag="x"),
    "cache folder": Config(data=Data(cache="/scratch")),
    "cache size": Config(data=Data(cache_gib=1.0)),
    "search backend": Config(bank=Bank(backend="torch")),
    "shard group": Config(bank=Bank(shard_group=1)),
    "threads": Config(runtime=Runtime(threads=3)),
    "deterministic": Config(runtime=Runtime(deterministic=True)),
    "checkpoints": Config(runtime=Runtime(save_every=7)),
}
ANOTHER_RESULT = {
    "seed": Config(seed=1),
    "method.neighbours": Config(method=ECGMatchSettings(neighbours=6)),
    "data.window": Config(data=Data(window=2)),
    "bank.view": Config(bank=Bank(view="clean")),
    "bank.backend": Config(bank=Bank(backend="faiss-ivf")),
    "optim.lr": Config(optim=Optim(lr=0.01)),
    "pretrain.lr": Config(pretrain=Optim(lr=0.01)),
    "runtime.precision": Config(runtime=Runtime(precision="bf16")),
    "runtime.batchnorm": Config(runtime=Runtime(batchnorm="local")),
}


@pytest.mark.parametrize("other", ANOTHER_WAY_TO_EXECUTE.values(), ids=ANOTHER_WAY_TO_EXECUTE.keys())
def test_execution_does_not_change_the_fingerprint(other: Config) -> None:
    assert other != Config()
    assert other.fingerprint() == Config().fingerprint()
    assert first_difference(Config().to_json(), other.to_json()) == ""


@pytest.mark.parametrize(("key", "other"), ANOTHER_RESULT.items(), ids=ANOTHER_RESULT.keys())
def test_what_decides_the_result_changes_the_fingerprint(key: str, other: Config) -> None:
    assert other.fingerprint() != Config().fingerprint()
    assert first_difference(Config().to_json(), other.to_json()).startswith(f"{key} was ")


def test_fingerprints_are_those_of_the_first_release() -> None:
    """Run folders of the first release must still resume: nothing may change what is hashed, or how."""
    assert Config().fingerprint() == "25363710aa10a532"
    assert Config().supervised().fingerprint() == "a8500c9942aeb0a0"


def test_the_first_difference_names_the_setting_that_decides_the_result() -> None:
    old = Config()
    new = replace(old, data=Data(cache="/scratch"), optim=Optim(lr=0.05), runtime=Runtime(threads=3))
    assert first_difference(old.to_json(), new.to_json()) == "optim.lr was 0.03, is 0.05"
    assert first_difference({"method": {"old_switch": 1}}, {}) == "method.old_switch was 1, is None"


def test_every_field_has_a_role() -> None:
    keys = {f"{section.name}.{inner.name}" for section in fields(Config) for inner in _fields(section.name)}
    keys |= {f.name for f in fields(Config) if not _fields(f.name)}
    roles = {key: role(key) for key in keys}
    assert {key for key, found in roles.items() if found == "execution"} == EXECUTION
    assert {key for key, found in roles.items() if found == "draw"} == {"seed"}
    assert set(roles.values()) == set(get_args(Role))
    assert keys == flatten(Config().to_json()).keys() - {"method.name"}
    assert role("optim.of_another_version") == "result"


def _fields(name: str) -> tuple[Field[Any], ...]:
    """The fields of a section of the configuration; of a plain setting, none."""
    value = getattr(Config(), name)
    return fields(value) if is_dataclass(value) else ()


# --- derived configurations


@pytest.mark.parametrize(
    ("preset", "fingerprint"),
    [("paper", "25363710aa10a532"), ("official_code", "fc2b3cf9de2c04cf"), ("cpu", "052df1395a3f6de8")],
)
def test_fields_that_were_added_later_leave_the_fingerprints_of_older_runs(preset: str, fingerprint: str) -> None:
    """Those of the version before `added` was needed: finished runs are still found by them."""
    config = PRESETS[preset]()
    assert config.fingerprint() == fingerprint
    assert replace(config, model=replace(config.model, depth=4)).fingerprint() != fingerprint


def test_a_setting_that_an_older_version_did_not_know_had_its_default() -> None:
    old, new = Config().to_json(), Config(optim=Optim(lr=0.5)).to_json()
    del old["model"]["backbone"]
    assert first_difference(old, new) == "optim.lr was 0.03, is 0.5"
    new = Config(model=Model(backbone="resnet1d")).to_json()
    assert first_difference(old, new) == "model.backbone was 'attention_cnn', is 'resnet1d'"


def test_the_supervised_start_is_the_same_for_all_methods() -> None:
    config = Config(method=ECGMatchSettings(neighbours=9), optim=Optim(lr=0.5), bank=Bank(view="clean"))
    assert config.supervised().fingerprint() == Config().supervised().fingerprint()
    assert config.supervised().supervised() == config.supervised()
    assert Config(tag="k7").supervised().run_name("x") == "x.supervised"


def test_run_names() -> None:
    assert Config().run_name("cross-g12ec@0.01.s20") == "cross-g12ec@0.01.s20.ecgmatch"
    assert Config(tag="k7").run_name("mix@0.01.s19") == "mix@0.01.s19.ecgmatch.k7"
    assert Config(name="mine").run_name("mix@0.01.s19") == "mine"


def test_reading_a_configuration_needs_no_torch() -> None:
    code = "import sys, ecgmatch_dist.config; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_whole_number_for_a_fraction_is_the_same_setting() -> None:
    """A preset says 100 passes, a sweep's job reads 100.0 from its file: both must find the same start."""
    for make in PRESETS.values():
        config = make()
        assert from_json(json.loads(json.dumps(config.to_json()))).fingerprint() == config.fingerprint()
    config = Config(method=ECGMatchSettings(lambda_u=1))
    assert config.fingerprint() == Config(method=ECGMatchSettings(lambda_u=1.0)).fingerprint()
