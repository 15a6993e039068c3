"""Sweeps: what a file means, what is refused, what is submitted; a site's sbatch file; status from run folders."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_train import data  # noqa: F401 (a fixture)

from ecgmatch_dist import recipes
from ecgmatch_dist.config import Config
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.launch import job, plan, site, slurm, status, sweep
from ecgmatch_dist.launch.settings import change
from ecgmatch_dist.launch.submissions import folder_of, write_records
from ecgmatch_dist.methods.configs import ECGMatch, FixMatch

RUNS = Path("runs")


def write(folder: Path, text: str) -> str:
    path = folder / "small.toml"
    path.write_text(text)
    return str(path)


def planned(name: str, *changes: str) -> list[plan.Run]:
    loaded = plan.load(name)
    base = plan.base_config(loaded, "", "data/shards", RUNS, changes)
    return plan.plan(loaded, base, Path("splits"), need_splits=False)


@pytest.mark.parametrize(
    ("name", "runs", "starts"),
    [
        ("within", 96, 12),
        ("cross", 96, 12),
        ("mix", 24, 3),
        ("ablation", 48, 12),
        ("similarity", 36, 12),
        ("sensitivity", 84, 12),
        ("search", 100, 4),
        ("neighbours", 108, 12),
        ("augmentation", 36, 36),
        ("label_ratio", 144, 48),
        ("cinc25", 96, 12),
    ],
)
def test_the_papers_sweeps(name: str, runs: int, starts: int) -> None:
    """Methods x settings x seeds, and each supervised start once; 96 + 96 + 24 = 216 runs compare the methods."""
    found = planned(name)
    assert (sum(bool(run.starts) for run in found), sum(not run.starts for run in found)) == (runs, starts)
    names = {run.name for run in found}
    assert len(names) == len(found)
    assert {start for run in found for start in run.starts} <= names


def test_every_file_of_launch_is_a_sweep() -> None:
    assert len(list(recipes.folder("launch").glob("*.toml"))) >= 11
    for path in recipes.folder("launch").glob("*.toml"):
        assert planned(str(path))


def test_a_point_that_changes_nothing_is_the_method_itself() -> None:
    names = {run.name for run in planned("neighbours")}
    assert "cross-g12ec@0.01.s20.ecgmatch" in names  # K = 5
    assert "cross-g12ec@0.01.s20.ecgmatch.neighbours=7" in names
    assert not any("neighbours=5" in name for name in names)


def test_another_start_only_where_it_is_another(tmp_path: Path) -> None:
    starts = {run.name: run.starts[0] for run in planned("augmentation") if "s20.ecgmatch" in run.name}
    assert starts["cross-g12ec@0.01.s20.ecgmatch.pipeline=mild"] == "cross-g12ec@0.01.s20.supervised.pipeline=mild"
    assert starts["cross-g12ec@0.01.s20.ecgmatch"] == "cross-g12ec@0.01.s20.supervised"
    assert {run.starts[0] for run in planned("ablation") if "g12ec@0.01.s20.ecgmatch" in run.name} == {
        "cross-g12ec@0.01.s20.supervised"
    }


def test_settings_reach_the_runs(tmp_path: Path) -> None:
    name = write(tmp_path, 'split = "mix@0.01.s20"\n[grid]\nmethod = ["fixmatch"]\n[settings]\noptim.lr = 1\n')
    run = planned(name, "optim.steps=7", "runtime.device=cpu")[-1]
    assert (run.config.optim.lr, run.config.optim.steps, run.config.runtime.device) == (1.0, 7, "cpu")
    assert isinstance(run.config.method, FixMatch)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('split = "a"\n[grid]\nmethod = ["x"]', r"method = 'x': one of ecgmatch"),
        ('split = "a"\n[grid]\nmethod.threshold = [1]', r"method\.threshold: the method ecgmatch has no `threshold`"),
        ('split = "a"\n[grid]\noptim.l = [1]', r"optim\.l: the configuration has no `l`"),
        ('split = "a"\n[grid]\noptim.lr = ["1"]', r"optim\.lr = '1': it takes a number"),
        ('split = "a"\n[grid]\noptim.steps = [1.5]', r"optim\.steps = 1\.5: it takes a whole number"),
        ('split = "a"\n[grid]\nmethod.refine = [0]', r"method\.refine = 0: it takes true or false"),
        ('split = "a"\n[grid]\naugment.pipeline = ["x"]', r"augment\.pipeline = 'x': it takes 'ecgaugment' or"),
        ('split = "a"\n[grid]\noptim.steps = [0]', r"optim\.steps = 0: at least 1"),
        ('split = "a"\n[grid]\nmodel = [1]', r"setting model: name the part of it"),
        ('split = "a"\n[grid]\nseed.x = [1]', r"seed\.x: `seed` has no parts"),
        ('split = "a"\n[grid]\nseed = 1', r"grid\.seed = 1: a list of different values"),
        ('split = "a"\n[grid]\nseed = [1, 1]', r"grid\.seed = \[1, 1\]: a list of different values"),
        ('split = "a{b}"\n[grid]\nseed = [1]', r"needs grid\.b"),
        ('split = "a"\n[grd]\n', r"unknown key `grd`"),
        ("[grid]\nseed = [1]", r"`split` is missing"),
        ("split = ", r"small\.toml: Invalid value"),
        (
            'split = "a"\n[grid]\nseed = [1]\n[[variants]]\noptim.lr = 0.1\n[[variants]]\noptim.lr = 0.2',
            "give the variants",
        ),
    ],
)
def test_mistakes_fail_before_anything_is_submitted(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        planned(write(tmp_path, text))


def test_values_have_the_fields_types() -> None:
    assert change(Config(), "method.lambda_u", 1) == replace(Config(), method=ECGMatch(lambda_u=1.0))
    assert change(Config(), "bank.shard_group", "node").bank.shard_group == "node"
    assert change(Config(), "bank.shard_group", 4).bank.shard_group == 4
    assert change(Config(), "split", "a.json").split == Path("a.json")
    with pytest.raises(UserError, match=r"takes a whole number, 'auto' or 'world' or 'node'"):
        change(Config(), "bank.shard_group", "all")


def test_values_on_the_command_line() -> None:
    values = [plan.parse_value(text) for text in ("1", "0.5", "true", "cpu", '"a b"', "[1, 2]")]
    assert values == [1, 0.5, True, "cpu", "a b", [1, 2]]
    with pytest.raises(UserError, match="texts with other signs need quotes"):
        plan.parse_value("a b")


def test_sites(tmp_path: Path) -> None:
    for path in recipes.folder("slurm").glob("*.toml"):
        site.load(str(path))
    (tmp_path / "s.toml").write_text("partitions = 'x'")
    with pytest.raises(UserError, match="unknown key `partitions`"):
        site.load(str(tmp_path / "s.toml"))
    (tmp_path / "s.toml").write_text("nodes = '2'")
    with pytest.raises(UserError, match="nodes = '2'"):
        site.load(str(tmp_path / "s.toml"))
    with pytest.raises(UserError, match="less than the time limit"):
        site.Site(minutes=1, warning_seconds=60)
    assert site.Site(gpus_per_node=4).ranks == 4


def crash(tmp_path: Path, code: int, restarts: int = 0, times: int = 1, state: str = "RUNNING") -> str:
    """What the lines behind srun do, with a scontrol that writes down what it was asked."""
    shown = f"JobId=9 JobState={state} Reason=None Requeue=1 Restarts={restarts} BatchFlag=1"
    stub = f'scontrol() {{ [ $1 = requeue ] && echo "$@" >> {tmp_path}/asked || echo "{shown}"; }}'
    lines = "\n".join([stub, f"(exit {code})", *site.requeue_after_a_crash(tmp_path)])
    environment = {"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3", "PATH": "/usr/bin:/bin"}
    for _ in range(times):
        assert subprocess.run(["bash"], input=lines, text=True, env=environment, check=False).returncode == code
    asked = tmp_path / "asked"
    return asked.read_text() if asked.exists() else ""


def test_only_a_crash_is_queued_again(tmp_path: Path) -> None:
    for code in (0, 1, 255):
        assert crash(tmp_path, code) == ""
    assert crash(tmp_path, 137, restarts=1) == ""  # Slurm has started a newer copy: this one is an orphan
    assert crash(tmp_path, 137) == "requeue 7_3\n"


def test_a_run_that_stopped_while_slurm_wants_it_is_queued_again(tmp_path: Path) -> None:
    """A pre-emption is a plain SIGTERM on most clusters, as scancel is."""
    assert crash(tmp_path, 75, state="CANCELLED") == ""
    assert crash(tmp_path, 75, state="PENDING", restarts=1) == ""  # submitit has queued it again
    assert crash(tmp_path, 75) == "requeue 7_3\n"


def test_a_job_that_always_crashes_is_left_alone(tmp_path: Path) -> None:
    assert crash(tmp_path, 134, times=site.CRASHES + 3).count("requeue") == site.CRASHES


def test_a_restarted_job_meets_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    first = job.port("7_3")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert job.port("7_3") != first
    assert all(job.PORTS[0] <= job.port(str(number)) < job.PORTS[1] for number in range(100))


def test_a_controller_that_does_not_answer_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first question hangs, the second is answered."""
    squeue = tmp_path / "squeue"
    squeue.write_text(
        f"#!/bin/bash\n[ -e {tmp_path}/asked ] && echo '7_1|RUNNING|n1|None' && exit\ntouch {tmp_path}/asked\nexec sleep 9"
    )
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(slurm, "ANSWER", 0.5)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    assert slurm.queue() == {"7_1": slurm.Job("7_1", "RUNNING", "n1", "None")}
    squeue.write_text("#!/bin/bash\nexec sleep 9")
    with pytest.raises(UserError, match="squeue --name=x: no answer within"):
        slurm._ask(["squeue", "--name=x"], (0,))


def make_run(folder: Path, steps: int, done: bool = False) -> None:
    (folder / "checkpoints" / "step-000004.1").mkdir(parents=True)
    (folder / "generations").mkdir()
    for number in (1, 2):
        (folder / "generations" / f"{number:06d}.jsonl").touch()
    lines = [{"step": s, "kind": "train", "time/step": 0.5} for s in range(1, steps + 1)]
    lines.insert(4, {"step": 4, "kind": "validation", "map": 0.7})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 99, "ki')
    counters = {"best": {"map": 0.75}}
    (folder / "checkpoints" / "step-000004.1" / "state.json").write_text(json.dumps({"counters": counters}))
    if done:
        (folder / "result.json").write_text(json.dumps({"validation": {"map": 0.8}}))


@pytest.fixture
def submitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A sweep of four runs: finished, running, failed and waiting, as Slurm would tell it."""
    names = ["a", "b", "c", "d"]
    config = Config().to_json() | {"optim": {"steps": 10}}
    folder = folder_of(tmp_path, "small")
    for number, name in enumerate(names):
        record = {"run": name, "cluster": "slurm", "job": f"7_{number}", "folder": str(folder), "time": 1.0}
        write_records(folder, [record])
    (folder / "plan.json").write_text(json.dumps([{"run": name, "starts": [], "config": config} for name in names]))
    make_run(tmp_path / "a", 10, done=True)
    make_run(tmp_path / "b", 6)
    make_run(tmp_path / "c", 2)
    (folder / "7_2_0_log.err").write_text(
        "ecgmatch: no space left\nc: step 2: validation MAP 0.3 (kept)\nsrun: error: n1: task 0\n\n"
    )
    live = {"7_1": slurm.Job("7_1", "RUNNING", "n2", "None"), "7_3": slurm.Job("7_3", "PENDING", "", "Priority")}
    monkeypatch.setattr(slurm, "available", lambda: True)
    monkeypatch.setattr(slurm, "queue", lambda: live)
    monkeypatch.setattr(slurm, "living", lambda ids: {name: live[name] for name in ids if name in live})
    monkeypatch.setattr(slurm, "accounted", lambda ids: {"7_2": slurm.Job("7_2", "FAILED", "n1")})
    return tmp_path


def test_status(submitted: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b, c, d = status.collect("small", submitted)
    assert (a.state, a.best, a.restarts) == ("finished", 0.75, 1)
    assert (b.state, b.node, b.step, b.left) == ("running", "n2", 6, 2.0)
    assert (c.state, c.error) == ("failed (failed)", "ecgmatch: no space left")
    assert (d.state, d.step, d.best) == ("pending (Priority)", 0, None)
    status.main("launch/small.toml", runs=submitted)
    assert "1 failed, 1 finished, 1 pending, 1 running" in capsys.readouterr().out
    with pytest.raises(UserError, match="no sweep `large` was submitted here; known are small"):
        status.collect("large", submitted)


def test_status_of_a_checkpoint_that_is_damaged_or_just_removed(submitted: Path) -> None:
    states = [submitted / "b" / "checkpoints" / f"step-00000{step}.1" / "state.json" for step in (5, 6)]
    for state in states:
        state.parent.mkdir()
    states[0].write_text('{"coun')
    states[1].symlink_to("gone")
    assert status.collect("small", submitted)[1].best == 0.75


def test_only_what_is_neither_finished_nor_at_work_is_submitted(submitted: Path) -> None:
    runs = [plan.Run(name, Config(), None) for name in ("a", "b", "c", "d", "e")]
    wanted, said = sweep.to_do(runs, submitted)
    assert [run.name for run in wanted] == ["c", "e"]
    assert said == {
        "a": "finished",
        "b": "running as job 7_1",
        "c": "again",
        "d": "pending as job 7_3",
        "e": "new",
    }


def test_what_a_user_holds_is_said_to_be_held(submitted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = slurm.Job("7_3", "PENDING", "", slurm.HELD)
    monkeypatch.setattr(slurm, "living", lambda ids: {"7_3": held})
    _, said = sweep.to_do([plan.Run("d", Config(), ())], submitted)
    assert said == {"d": "held (scontrol release 7_3) as job 7_3"}


def test_what_is_at_work_on_this_machine_is_not_begun_again(submitted: Path) -> None:
    """Nor is it when another process has the number of one that has ended."""
    folder = folder_of(submitted, "small") / "jobs" / "0"
    command, pipe = [sys.executable, "-uc", "print(); input()", str(folder)], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        process.stdout.readline()  # before, it might not have its name yet
        record = {"run": "e", "cluster": "local", "job": str(process.pid), "folder": str(folder), "time": 2.0}
        write_records(folder_of(submitted, "small"), [record, record | {"run": "f", "folder": f"{folder}/other"}])
        wanted, said = sweep.to_do([plan.Run(name, Config(), ()) for name in ("e", "f")], submitted)
        process.communicate(b"\n")
    assert [run.name for run in wanted] == ["f"]
    assert said == {"e": f"running here as process {process.pid}", "f": "new"}


def test_a_killed_submission_does_not_stand_in_the_way(tmp_path: Path) -> None:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    note = tmp_path / "sweeps" / "submitting"
    note.parent.mkdir()
    note.write_text(f"{socket.gethostname()}, process {process.pid}, today")
    with sweep.submitting(tmp_path):
        assert sweep.ended(note.read_text()) is False
    note.write_text(f"elsewhere, process {process.pid}, today")
    with pytest.raises(UserError, match="elsewhere"), sweep.submitting(tmp_path):
        pass


def test_one_submission_at_a_time(tmp_path: Path) -> None:
    refused = pytest.raises(UserError, match="another sweep is being submitted")
    with sweep.submitting(tmp_path), refused, sweep.submitting(tmp_path):
        pass
    with sweep.submitting(tmp_path):
        pass


def test_logs(submitted: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status.logs("c", runs=submitted)
    assert "no space left" in capsys.readouterr().out
    with pytest.raises(UserError, match="no run `z`"):
        status.logs("z", runs=submitted)


def test_logs_are_followed_across_a_restart(submitted: Path) -> None:
    log = submitted / "c" / "log.txt"
    log.write_text("before\n")
    command = [sys.executable, "-u", "-m", "ecgmatch_dist", "logs", "c", "--runs", str(submitted), "--follow"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        try:
            lines = iter(process.stdout.readline, "")
            assert any("before" in line for line in lines)
            (submitted / "c" / "new").write_text("before\nresumed at step 2\n")
            (submitted / "c" / "new").replace(log)
            assert any("resumed at step 2" in line for line in lines)
        finally:
            os.killpg(process.pid, signal.SIGINT)
    assert process.returncode == 0


def test_choose_looks_at_validation(submitted: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status.choose("small", runs=submitted)
    out = capsys.readouterr().out
    assert re.search(r"ecgmatch.*0\.8000", out)
    assert "3 runs are not finished" in out


def test_the_members_of_a_committee_are_starts_too(tmp_path: Path) -> None:
    text = 'preset = "tuned"\nsplit = "within-chapman@0.05.s{seed}"\n[grid]\nseed = [20]\nmethod = ["fixmatch", "ecgmatch"]\n'
    found = planned(write(tmp_path, text))
    start = "within-chapman@0.05.s20.supervised"
    committee = (start, *(f"{start}.member{number}" for number in (2, 3, 4)))
    assert {run.name.rpartition(".")[2]: run.starts for run in found if run.starts} == {
        "fixmatch": (start,),
        "ecgmatch": committee,
    }
    assert [run.name for run in found if not run.starts] == list(committee)
    assert len({run.config.meaning() for run in found}) == len(found)


def test_a_run_waits_for_its_start_as_long_as_that_is_at_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(Config(), runs=tmp_path)
    answers = iter([True, True, False])
    monkeypatch.setattr(slurm, "alive", lambda name: name == "7_0" and next(answers))
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    train = job.TrainJob("b", config.to_json(), ("a",))
    record = {"run": "b", "starts": {"a": "7_0"}, "cluster": "slurm", "job": "7_1", "folder": "", "time": 1.0}
    write_records(folder_of(tmp_path, "small"), [record])
    with pytest.raises(UserError, match="a did not finish, and b starts from it"):
        train.await_starts(config)
    make_run(tmp_path / "a", 3, done=True)
    train.await_starts(config)


@pytest.mark.parametrize("cluster", ["local", "debug"])
def test_on_this_machine(data: Path, tmp_path: Path, cluster: Any, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    """One supervised run, on two ranks through submitit's local executor, or in this process."""
    (data / "splits").mkdir(exist_ok=True)
    (data / "splits" / "one.json").write_text((data / "split.json").read_text())
    (tmp_path / "site.toml").write_text("ranks_per_node = 2\nsetup = ['export OMP_NUM_THREADS=1']\n")
    name = write(tmp_path, 'split = "one"\n[grid]\nmethod = ["supervised"]\n')
    small = ("model.width=16", "model.heads=2", "pretrain.steps=3", "pretrain.labelled_batch=8", "runtime.device=cpu")
    place = {"site": str(tmp_path / "site.toml"), "shards": str(data / "shards"), "splits": data / "splits"}
    for _ in range(2):
        sweep.main(name, cluster, **place, runs=tmp_path / "runs", set=(*small, "runtime.log_every=1"))  # type: ignore[arg-type]
    assert "nothing to submit" in capsys.readouterr().out
    (row,) = status.collect("small", tmp_path / "runs")
    assert (row.name, row.state, row.step) == ("within-chapman@0.2.s20.supervised", "finished", 3)
    result = json.loads((tmp_path / "runs" / row.name / "result.json").read_text())
    assert result["world_size"] == (2 if cluster == "local" else 1)


def test_a_run_that_fails_on_this_machine_is_told_and_is_an_error(
    data: Path,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (data / "splits").mkdir(exist_ok=True)
    (data / "splits" / "one.json").write_text((data / "split.json").read_text())
    name = write(tmp_path, 'split = "one"\n[grid]\nmethod = ["supervised"]\n')
    where: dict[str, Any] = {"shards": str(tmp_path / "nowhere"), "splits": data / "splits", "runs": tmp_path / "runs"}
    with pytest.raises(UserError, match="1 of 1 runs failed: `ecgmatch logs within-chapman"):
        sweep.main(name, "local", **where, set=("runtime.device=cpu",))
    assert re.search("failed: .*nowhere", capsys.readouterr().out)


def test_dry_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    sweep.main("mix", cluster="slurm", site="gpu", splits=tmp_path, runs=tmp_path, dry_run=True)
    out = capsys.readouterr().out
    assert "mix: 27 runs" in out
    assert "#SBATCH --array=0-26%27" in out
    assert "scontrol update jobid=ARRAY_[3-10] dependency=afterany:ARRAY_0\n" in out
    assert "scontrol release ARRAY_[0-26]\n" in out
    assert not (tmp_path / "sweeps").exists()
