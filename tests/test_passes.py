"""Passes, not steps: one setting for few labels and many, the same fingerprint, and as many steps as it comes to."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ecgmatch_dist.config import Config, Evaluate, Optim, fitted
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.methods.contrastive import ContrastiveSettings
from ecgmatch_dist.methods.ecgmatch import ECGMatchSettings
from ecgmatch_dist.methods.supervised import FullySupervisedSettings, SupervisedSettings
from ecgmatch_dist.presets import few_labels
from tests.support.training import run, tiny

OPTIM = Optim(passes=40, steps=4000, labelled_batch=64, unlabelled_batch=200)


@pytest.mark.parametrize(
    ("labelled", "batch", "steps"),
    [(20, 8, 400), (152, 16, 400), (388, 64, 400), (785, 64, 491), (3000, 64, 1875), (20_000, 64, 4000)],
)
def test_batch_and_steps_follow_the_labels(labelled: int, batch: int, steps: int) -> None:
    found = fitted(Config(optim=OPTIM, method=SupervisedSettings()), labelled, 10 * labelled)
    assert (found.optim.labelled_batch, found.optim.steps) == (batch, steps)
    assert found.evaluate.every == steps // 25
    assert fitted(found, labelled, 10 * labelled) == found


def test_whose_recordings_are_counted() -> None:
    assert fitted(Config(optim=OPTIM, method=FullySupervisedSettings()), 100, 1900).optim.steps == 40 * 2000 // 64
    found = fitted(Config(optim=OPTIM, method=ContrastiveSettings()), 100, 1900).optim
    assert (found.steps, found.unlabelled_batch) == (400, 200)
    found = fitted(Config(optim=OPTIM, method=ECGMatchSettings()), 20, 4000).optim
    assert (found.steps, found.labelled_batch, found.unlabelled_batch) == (40 * 4000 // 200, 64, 200), "the unlabelled"


def test_a_method_that_knows_all_labels_does_not_count_what_nobody_knows() -> None:
    config = Config(optim=OPTIM, method=FullySupervisedSettings())
    assert fitted(config, 100, 1900, hidden=900).optim.steps == 40 * 1000 // 64
    config = Config(optim=OPTIM, method=SupervisedSettings())
    assert fitted(config, 785, 1900, hidden=0).optim.steps == 491, "others do not count them anyway"


@pytest.mark.parametrize(
    ("unlabelled", "steps", "every"),
    [(1000, 600, 50), (3600, 600, 50), (6100, 1017, 50), (10_000, 1667, 66), (10**6, 6000, 240)],
)
def test_the_last_stage_of_few_labels_follows_the_unlabelled_recordings(
    unlabelled: int, steps: int, every: int
) -> None:
    found = fitted(few_labels(), 150, unlabelled)
    assert (found.optim.steps, found.evaluate.every, found.optim.labelled_batch) == (steps, every, 32)


def test_without_passes_everything_stays() -> None:
    config = Config(optim=Optim(labelled_batch=64, steps=9), evaluate=Evaluate(every=7))
    assert fitted(config, 10, 10) is config


def test_a_batch_that_cannot_be_halved_stays() -> None:
    config = Config(optim=replace(OPTIM, labelled_batch=36), method=SupervisedSettings())
    assert fitted(config, 20, 0).optim.labelled_batch == 9
    with pytest.raises(UserError, match=r"optim\.passes = -1"):
        Optim(passes=-1)


def test_a_run_takes_its_passes_and_is_found_by_what_was_asked_for(data: Path, tmp_path: Path) -> None:
    """About 32 labelled recordings, 8 per step, 5 passes: about 20 steps, validated after each."""
    config = tiny(
        data, tmp_path, SupervisedSettings(), pretrain=Optim(passes=5, steps=100, labelled_batch=16)
    ).settled()
    folder = run(config)
    result = json.loads((folder / "result.json").read_text())
    labelled = len(json.loads((folder / "split.json").read_text())["parts"]["labelled"])
    assert result["steps"] == round(5 * labelled / 8)
    assert result["fingerprint"] == config.fingerprint()
    assert json.loads((folder / "config.json").read_text())["optim"]["passes"] == 5
    before = (folder / "result.json").stat().st_mtime_ns
    run(config)
    assert (folder / "result.json").stat().st_mtime_ns == before
