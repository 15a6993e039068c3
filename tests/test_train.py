"""Whole runs on tiny shards: the files of a run, bit-exact resuming, the same result on any number of ranks."""

import json
import math
import os
import shutil
import signal
import subprocess
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from ecgmatch_dist.config import Bank, Config, Evaluate, Optim, Runtime
from ecgmatch_dist.distributed.session import Ranks, session
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.methods.ecgmatch import ECGMatchSettings
from ecgmatch_dist.methods.supervised import SupervisedSettings
from ecgmatch_dist.record.config_file import to_file
from ecgmatch_dist.record.folder import RunFolder
from ecgmatch_dist.record.logger import RunLogger
from ecgmatch_dist.record.starts import find_start
from ecgmatch_dist.recovery.signals import Signals, Stopped
from ecgmatch_dist.train import draws, train_run
from tests.support.ranks import run_processes
from tests.support.training import (
    ENVIRONMENT,
    STEPS,
    assert_near,
    assert_same_bits,
    command,
    final_state,
    run,
    tiny,
    wait_for_step,
)


def test_a_run_writes_its_files(data: Path, tmp_path: Path) -> None:
    folder = run(tiny(data, tmp_path))
    assert folder.name == "within-chapman@0.2.s20.ecgmatch"
    for name in ("config.json", "environment.json", "split.json", "log.txt", "metrics.jsonl", "model_card.md"):
        assert (folder / name).stat().st_size > 0, name
    # All files have the same permissions: safetensors alone would write for the owner only.
    assert len({path.stat().st_mode for path in folder.rglob("*") if path.is_file()}) == 1
    assert list((folder / "tb").glob("events.*"))
    result = json.loads((folder / "result.json").read_text())
    assert result["started_from"] == "within-chapman@0.2.s20.supervised"
    assert result["steps"] == STEPS
    assert 0 <= result["test"]["map"] <= 1
    with np.load(folder / "predictions" / "test.npz") as test:
        split = json.loads((folder / "split.json").read_text())
        assert test["ids"].tolist() == split["parts"]["test"]
        assert test["probabilities"].shape == test["labels"].shape == (len(test["ids"]), 5)
    with np.load(folder / "bank.npz") as bank, np.load(folder / "correlation.npz") as correlation:
        assert bank["features"].shape == (len(split["parts"]["unlabelled"]), 16)
        assert correlation["R_u"].shape == correlation["R_b"].shape == (5, 5)
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    train_records = [r for r in records if r["kind"] == "train"]
    assert [r["step"] for r in train_records] == list(range(2, STEPS + 1, 2))
    assert {"loss", "loss/b", "loss/u", "loss/f", "lr", "bank/age", "time/step"} <= train_records[0].keys()
    assert [r["step"] for r in train_records if r["time/save"]] == [6, 12]  # after the checkpoints of steps 5 and 10
    validation = [r for r in records if r["kind"] == "validation"]
    assert [r["step"] for r in validation] == [4, 8, 12]
    assert {"map", "hidden/pseudo_map", "hidden/own_map", "weight/CD"} <= validation[0].keys()


def test_a_committee_is_trained_once_and_its_members_differ(data: Path, tmp_path: Path) -> None:
    config = tiny(data, tmp_path, ECGMatchSettings(neighbours=3, committee=2, memory=1.0))
    folder = run(config)
    first, second = (tmp_path / f"{folder.name.removesuffix('.ecgmatch')}.supervised{tag}" for tag in ("", ".member2"))
    one, two = (load_file(member / "best.safetensors") for member in (first, second))
    assert not torch.equal(one["stem.weight"], two["stem.weight"])
    result = json.loads((folder / "result.json").read_text())
    assert (result["started_from"], result["committee"]) == (first.name, [second.name])
    before = [(member / "result.json").stat().st_mtime_ns for member in (first, second)]
    run(replace(config, tag="again", method=replace(config.method, lambda_u=0.5)))
    assert [(member / "result.json").stat().st_mtime_ns for member in (first, second)] == before
    assert len(list(tmp_path.glob("*.supervised*"))) == 2


@pytest.mark.parametrize("better", [True, False])
def test_a_run_says_if_its_start_was_better(data: Path, tmp_path: Path, better: bool) -> None:
    config = tiny(data, tmp_path)
    start = run(config.start())
    result = json.loads((start / "result.json").read_text())
    result["validation"]["map"] = 1.0 if better else 0.0
    (start / "result.json").write_text(json.dumps(result))
    told = (run(config) / "log.txt").read_text()
    expected = f"warning: the start was better: {start.name} has a validation MAP of 1.0000, this run 0."
    assert (expected in told) == better == ("warning" in told)


@pytest.mark.parametrize("done", ["a", "b"])
def test_of_two_equal_starts_the_finished_one_is_used(data: Path, tmp_path: Path, done: str) -> None:
    """Two points of a grid may each have one. The unfinished one may be running in another job and must not be trained here."""
    config = tiny(data, tmp_path)
    for tag in ("a", "b"):
        start = replace(config.supervised(), tag=tag)
        folder = tmp_path / start.run_name("within-chapman@0.2.s20")
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(to_file(start)))
        if tag == done:
            (folder / "result.json").touch()
    alone = Ranks(0, 1, 0, 1, torch.device("cpu"))
    assert find_start(config, "within-chapman@0.2.s20", alone).tag == done


@pytest.mark.parametrize("name", ["log", "file"])
def test_a_disk_that_fills_up_is_reported_in_one_line(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Closing the file tries to write again: that second error must not hide the first."""
    usual = RunLogger.start

    def start(self: RunLogger, step: int, place: str) -> None:
        usual(self, step, place)
        getattr(self, name).close()
        setattr(self, name, Path("/dev/full").open("w"))  # noqa: SIM115

    monkeypatch.setattr(RunLogger, "start", start)
    with pytest.raises(UserError, match=r"No space left on device.*Make room"):
        run(tiny(data, tmp_path, init="scratch"))
    assert not (tmp_path / "within-chapman@0.2.s20.ecgmatch" / "copies").exists()


def test_a_finished_run_is_not_run_again(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tiny(data, tmp_path, SupervisedSettings()).supervised()
    folder = run(config)
    before = (folder / "result.json").stat().st_mtime_ns
    run(config)
    assert (folder / "result.json").stat().st_mtime_ns == before
    assert "finished already" in capsys.readouterr().out


def test_a_chain_of_runs_tells_which_of_how_many(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny(data, tmp_path, ECGMatchSettings(neighbours=3, committee=2))
    run(config.supervised())
    capsys.readouterr()
    run(config)
    told = [line.partition(":") for line in capsys.readouterr().out.splitlines() if line.startswith("run ")]
    names = ["supervised: finished already", "supervised.member2", "ecgmatch"]
    assert [number for number, _, _ in told] == ["run 1 of 3", "run 2 of 3", "run 3 of 3"]
    for name, (_, _, text) in zip(names, told, strict=True):
        assert text.startswith(f" within-chapman@0.2.s20.{name}")


def _finished_on_rank(rank: int, world: int, config: Config) -> None:
    """The second rank's node does not see the result yet."""
    if rank == 1:
        RunFolder.finished = False  # type: ignore[method-assign, assignment]
    run(config)


def test_a_finished_run_is_left_alone_by_all_ranks_and_without_its_start(data: Path, tmp_path: Path) -> None:
    config = tiny(data, tmp_path)
    folder = run(config)
    shutil.rmtree(tmp_path / "within-chapman@0.2.s20.supervised")
    run_processes(2, _finished_on_rank, config)
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]


def test_a_folder_with_another_configuration_is_refused(data: Path, tmp_path: Path) -> None:
    config = tiny(data, tmp_path, SupervisedSettings()).supervised()
    run(config)
    with pytest.raises(UserError, match=r"optim\.lr was 0\.03, is 0\.05.*--tag"):
        run(replace(config, pretrain=replace(config.pretrain, lr=0.05)).supervised())


@pytest.mark.parametrize("own", [{"tag": "faster"}, {"name": "faster"}])
def test_a_tag_or_name_of_its_own_is_enough_where_the_supervised_run_has_other_settings(
    data: Path, tmp_path: Path, own: dict[str, str]
) -> None:
    config = tiny(data, tmp_path)
    start = config.supervised()
    folder = tmp_path / start.run_name("within-chapman@0.2.s20")
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(to_file(start)))
    other = replace(config, pretrain=replace(config.pretrain, lr=0.05), **own)
    alone = Ranks(0, 1, 0, 1, torch.device("cpu"))
    assert find_start(other, "within-chapman@0.2.s20", alone).tag == "faster"


def test_it_learns(data: Path, tmp_path: Path) -> None:
    optim = Optim(optimizer="adamw", lr=3e-3, encoder_lr_scale=1.0, steps=60, labelled_batch=32, unlabelled_batch=32)
    config = tiny(
        data, tmp_path, SupervisedSettings(), pretrain=optim, evaluate=Evaluate(every=20, batch=64)
    ).supervised()
    result = json.loads((run(config) / "result.json").read_text())
    prevalence = np.mean([values["prevalence"] for values in result["test"]["per_class"].values()])
    assert result["test"]["map"] > prevalence + 0.2


@pytest.fixture(scope="session")
def untouched(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Config:
    """An uninterrupted run in a process of its own."""
    optim = Optim(steps=40, labelled_batch=8, unlabelled_batch=16)
    config = tiny(data, tmp_path_factory.mktemp("untouched"), optim=optim)
    subprocess.run(command(config), check=True, env=ENVIRONMENT, capture_output=True)
    return config


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, *(pytest.param(n, marks=pytest.mark.slow) for n in (signal.SIGTERM, signal.SIGINT))]
)
def test_a_killed_run_resumes_to_the_bit(untouched: Config, tmp_path: Path, number: signal.Signals) -> None:
    killed = replace(untouched, runs=tmp_path)
    folder = killed.runs / "within-chapman@0.2.s20.ecgmatch"
    process = subprocess.Popen(command(killed), env=ENVIRONMENT, stderr=subprocess.DEVNULL)
    wait_for_step(folder, 13, process)
    process.send_signal(number)
    assert process.wait(60) == (-signal.SIGKILL if number == signal.SIGKILL else 75)
    subprocess.run(command(killed), check=True, env=ENVIRONMENT, capture_output=True)
    assert "resumed at step" in (folder / "log.txt").read_text()
    assert_same_bits(final_state(untouched.runs / folder.name), final_state(folder))
    steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(steps)  # one curve across the restart


def test_a_run_that_was_killed_before_its_first_checkpoint_says_that_it_begins_again(
    data: Path, tmp_path: Path
) -> None:
    folder = run(tiny(data, tmp_path, init="scratch"))
    assert "begins again" not in (folder / "log.txt").read_text()
    (folder / "result.json").unlink()
    shutil.rmtree(folder / "checkpoints")
    run(tiny(data, tmp_path, init="scratch"))
    assert "has no checkpoint: begins again at step 0" in (folder / "log.txt").read_text()


def test_one_flipped_bit_in_the_latest_checkpoint_changes_nothing(data: Path, tmp_path: Path) -> None:
    folder = run(tiny(data, tmp_path, init="scratch"))
    expected = {name: tensor.clone() for name, tensor in final_state(folder).items()}  # not views of the file
    (folder / "result.json").unlink()
    victim = folder / "checkpoints" / "step-000012.1" / "state" / "rank-00000.safetensors"
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    run(tiny(data, tmp_path, init="scratch"))
    log = (folder / "log.txt").read_text()
    assert "step-000012.1 is damaged (state/rank-00000.safetensors has the wrong checksum)" in log
    assert "resumed at step 10" in log
    assert_same_bits(expected, final_state(folder))
    assert not (folder / "copies").exists()


def test_a_checkpoint_restores_its_own_best_model(data: Path, tmp_path: Path) -> None:
    """The run was killed after its last checkpoint and after a better model had been kept."""
    folder = run(tiny(data, tmp_path, init="scratch"))
    expected = final_state(folder)
    result = json.loads((folder / "result.json").read_text())
    (folder / "result.json").unlink()
    later = {name: tensor + 1 for name, tensor in load_file(folder / "best.safetensors").items()}
    save_file(later, folder / "best.safetensors")
    run(tiny(data, tmp_path, init="scratch"))
    assert_same_bits(expected, final_state(folder))
    assert json.loads((folder / "result.json").read_text())["test"] == result["test"]


@pytest.mark.parametrize("name", ["labelled_batch", "unlabelled_batch"])
def test_a_batch_that_the_ranks_cannot_share_is_refused_before_the_supervised_run(
    data: Path, tmp_path: Path, name: str
) -> None:
    config = tiny(data, tmp_path / "runs")
    config = replace(config, optim=replace(config.optim, **{name: 15}))
    with session("cpu") as ranks, pytest.raises(UserError, match=f"optim.{name} = 15: make it a multiple of 2"):
        train_run(config, replace(ranks, world=2), Signals())
    assert not config.runs.exists()
    with pytest.raises(UserError, match=r"pretrain\.labelled_batch = 8"):
        tiny(data, tmp_path).supervised().check_shares(3)


def test_more_neighbours_than_the_bank_has_rows_are_refused_before_the_supervised_run(
    data: Path, tmp_path: Path
) -> None:
    config = tiny(data, tmp_path / "runs", ECGMatchSettings(neighbours=1000))
    with pytest.raises(UserError, match=r"method\.neighbours = 1000: at most the \d+ unlabelled recordings"):
        run(config)
    assert not config.runs.exists()


def _train_on_rank(rank: int, world: int, config: Config) -> None:
    torch.set_num_threads(1)
    run(config)


@pytest.mark.parametrize("shard_group", ["world", 1])
def test_two_ranks_are_one(data: Path, tmp_path: Path, shard_group: Any) -> None:
    runtime = Runtime(device="cpu", precision="fp64", log_every=1, save_every=0)
    one = tiny(data, tmp_path / "one", runtime=runtime)
    two = replace(one, runs=tmp_path / "two", bank=Bank(shard_group=shard_group))
    run(one)
    run_processes(2, _train_on_rank, two)
    name = "within-chapman@0.2.s20.ecgmatch"
    assert_near(final_state(one.runs / name), final_state(two.runs / name))
    results = [json.loads((runs / name / "result.json").read_text()) for runs in (one.runs, two.runs)]
    assert results[0]["test"]["map"] == pytest.approx(results[1]["test"]["map"], abs=1e-12)


def _train_a_little_on_rank(rank: int, world: int, config: Config, until: float) -> None:
    torch.set_num_threads(1)
    os.environ["ECGMATCH_STOP_AT"] = str(until)
    with suppress(Stopped):
        run(config)


@pytest.mark.slow
def test_another_number_of_ranks_resumes_with_the_same_order_and_banks(data: Path, tmp_path: Path) -> None:
    """Two ranks, then four with two copies of the banks, then one: the same result as one rank throughout."""
    runtime = Runtime(device="cpu", precision="fp64", log_every=1, save_every=0)
    one = tiny(data, tmp_path / "one", runtime=runtime, init="scratch")
    moved = replace(one, runs=tmp_path / "moved")
    run(one)
    for world, shard_group in ((2, 2), (4, 2)):  # each stops itself after a step or two
        run_processes(world, _train_a_little_on_rank, replace(moved, bank=Bank(shard_group=shard_group)), 1.0)
    run_processes(1, _train_a_little_on_rank, replace(moved, bank=Bank(shard_group=1)), math.inf)
    name = "within-chapman@0.2.s20.ecgmatch"
    log = (moved.runs / name / "log.txt").read_text()
    assert log.count("asked to stop: saved at step") == log.count("resumed at step") == 2
    assert_near(final_state(one.runs / name), final_state(moved.runs / name))
    results = [json.loads((runs / name / "result.json").read_text()) for runs in (one.runs, moved.runs)]
    assert results[0]["test"]["map"] == pytest.approx(results[1]["test"]["map"], abs=1e-12)
    lines = [(runs / name / "metrics.jsonl").read_text().splitlines() for runs in (one.runs, moved.runs)]
    assert len(lines[0]) == len(lines[1])
    for a, b in zip(*(map(json.loads, text) for text in lines), strict=True):
        assert (a["step"], a["kind"]) == (b["step"], b["kind"])
        number = "loss" if a["kind"] == "train" else "map"
        assert a[number] == pytest.approx(b[number], rel=1e-9)


def test_few_validations_draw() -> None:
    assert [step for step in range(50, 801, 50) if draws(step, 50, 800)] == [50, 250, 500, 750, 800]
    assert [step for step in range(1, 9) if draws(step, 0, 8)] == [8]  # only the last step is validated
