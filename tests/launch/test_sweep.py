"""Sites; what is submitted; status from run folders; sweeps on this machine."""

import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ecgmatch_dist import resources
from ecgmatch_dist.config import Config
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.launch import choose, expand, site, slurm, status, sweep, train_job
from ecgmatch_dist.launch.overrides import change
from ecgmatch_dist.launch.select import select_runs
from ecgmatch_dist.launch.submission_lock import owner_is_dead, submission_lock
from ecgmatch_dist.launch.submissions import Submission, append_submissions, sweep_folder
from ecgmatch_dist.launch.sweep_plan import read_plan, write_plan
from tests.support.commands import check_command
from tests.support.run_factory import example_result


def write(folder: Path, text: str) -> str:
    path = folder / "small.toml"
    path.write_text(text)
    return str(path)


def test_sites(tmp_path: Path) -> None:
    for path in resources.folder("slurm").glob("*.toml"):
        site.load_site(str(path))
    (tmp_path / "s.toml").write_text("partitions = 'x'")
    with pytest.raises(UserError, match="unknown key `partitions`"):
        site.load_site(str(tmp_path / "s.toml"))
    (tmp_path / "s.toml").write_text("nodes = '2'")
    with pytest.raises(UserError, match=r"s\.toml: nodes = '2': it takes a whole number"):
        site.load_site(str(tmp_path / "s.toml"))
    with pytest.raises(UserError, match="less than the time limit"):
        site.Site(minutes=1, warning_seconds=60)
    assert site.Site(gpus_per_node=4).ranks == 4


def crash(tmp_path: Path, code: int, restarts: int = 0, times: int = 1, state: str = "RUNNING") -> str:
    """The calls of `scontrol requeue` in the lines after srun."""
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
    first = train_job.port("7_3")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert train_job.port("7_3") != first
    assert all(train_job.PORTS[0] <= train_job.port(str(number)) < train_job.PORTS[1] for number in range(100))


def test_a_controller_that_does_not_answer_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first question hangs, the second is answered."""
    squeue = tmp_path / "squeue"
    squeue.write_text(
        f"#!/bin/bash\n[ -e {tmp_path}/asked ] && echo '7_1|RUNNING|n1|None' && exit\ntouch {tmp_path}/asked\nexec sleep 9"
    )
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(slurm, "ANSWER_SECONDS", 0.5)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    assert slurm.queue() == {"7_1": slurm.SlurmJob("7_1", "RUNNING", "n1", "None")}
    squeue.write_text("#!/bin/bash\nexec sleep 9")
    with pytest.raises(UserError, match="squeue --name=x: no answer within"):
        slurm.run(["squeue", "--name=x"], (0,))


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
        (folder / "result.json").write_text(json.dumps(example_result(map=0.8)))


@pytest.fixture
def submitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A sweep of four runs: finished, running, failed and pending, by a fake Slurm."""
    names = ["a", "b", "c", "d"]
    config = change(Config(), "optim.steps", 10)
    folder = sweep_folder(tmp_path, "small")
    for number, name in enumerate(names):
        submission = Submission(run=name, cluster="slurm", job=f"7_{number}", folder=str(folder), time=1.0)
        append_submissions(folder, [submission])
    write_plan("small", tmp_path, [expand.PlannedRun(name, config, ()) for name in names])
    make_run(tmp_path / "a", 10, done=True)
    make_run(tmp_path / "b", 6)
    make_run(tmp_path / "c", 2)
    (folder / "7_2_0_log.err").write_text(
        "ecgmatch: no space left\nc: step 2: validation MAP 0.3 (kept)\nsrun: error: n1: task 0\n\n"
    )
    live = {
        "7_1": slurm.SlurmJob("7_1", "RUNNING", "n2", "None"),
        "7_3": slurm.SlurmJob("7_3", "PENDING", "", "Priority"),
    }
    monkeypatch.setattr(slurm, "available", lambda: True)
    monkeypatch.setattr(slurm, "queue", lambda: live)
    monkeypatch.setattr(slurm, "alive_among", lambda ids: {name: live[name] for name in ids if name in live})
    monkeypatch.setattr(slurm, "accounting", lambda ids: {"7_2": slurm.SlurmJob("7_2", "FAILED", "n1")})
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


def test_a_plan_of_the_first_release_is_read(submitted: Path) -> None:
    """It was a bare list, and did not know the steps on a split."""
    path = sweep_folder(submitted, "small") / "plan.json"
    plan = json.loads(path.read_text())
    path.write_text(json.dumps([{name: run[name] for name in ("run", "starts", "config")} for run in plan["runs"]]))
    first = read_plan("small", submitted)[0]
    assert (first.run, first.most_steps, first.method) == ("a", 10, "ecgmatch")
    path.write_text(json.dumps(plan | {"format": 99}))
    with pytest.raises(UserError, match=r"plan\.json: format 99, .*`ecgmatch sweep` command writes it again"):
        read_plan("small", submitted)


def test_status_of_a_checkpoint_that_is_damaged_or_just_removed(submitted: Path) -> None:
    texts = '{"coun', "5", '{"counters": [1]}', '{"counters": {"best": {"map": "high"}}}', "[" * 10_000
    for number, text in enumerate(texts):
        state = submitted / "b" / "checkpoints" / f"step-{number + 5:06}.1" / "state.json"
        state.parent.mkdir()
        state.write_text(text)
    (submitted / "b/checkpoints/step-000099.1").mkdir()
    (submitted / "b/checkpoints/step-000099.1/state.json").symlink_to("gone")
    with (submitted / "b" / "metrics.jsonl").open("a") as file:
        file.write(f'\n{{"step": 9, "kind": "train", "loss": 1{"0" * 400}, "time/step": 0.5}}\n')  # no float holds it
    assert status.collect("small", submitted)[1].best == 0.75


def test_only_runs_that_are_neither_finished_nor_in_the_queue_are_submitted(submitted: Path) -> None:
    runs = [expand.PlannedRun(name, Config(), ()) for name in ("a", "b", "c", "d", "e")]
    wanted, states = select_runs(runs, submitted)
    assert [run.name for run in wanted] == ["c", "e"]
    assert states == {
        "a": "finished",
        "b": "running as job 7_1",
        "c": "again",
        "d": "pending as job 7_3",
        "e": "new",
    }


def test_a_run_that_the_user_holds_is_shown_as_held(submitted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = slurm.SlurmJob("7_3", "PENDING", "", slurm.HELD)
    monkeypatch.setattr(slurm, "alive_among", lambda ids: {"7_3": held})
    _, states = select_runs([expand.PlannedRun("d", Config(), ())], submitted)
    assert states == {"d": "held (scontrol release 7_3) as job 7_3"}


def test_a_run_that_runs_on_this_machine_is_not_started_again(submitted: Path) -> None:
    """The id of a process that has ended may belong to another one now: that does not count as running."""
    folder = sweep_folder(submitted, "small") / "jobs" / "0"
    command, pipe = [sys.executable, "-uc", "print(); input()", str(folder)], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        process.stdout.readline()  # from now on /proc shows its command line
        own = Submission(run="e", cluster="local", job=str(process.pid), folder=str(folder), time=2.0)
        other = replace(own, run="f", folder=f"{folder}/other")
        append_submissions(sweep_folder(submitted, "small"), [own, other])
        wanted, states = select_runs([expand.PlannedRun(name, Config(), ()) for name in ("e", "f")], submitted)
        process.communicate(b"\n")
    assert [run.name for run in wanted] == ["f"]
    assert states == {"e": f"running here as process {process.pid}", "f": "new"}


def test_the_lock_of_a_killed_submission_is_removed(tmp_path: Path) -> None:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    lock = tmp_path / "sweeps" / "submitting"
    lock.parent.mkdir()
    lock.write_text(f"{socket.gethostname()}, process {process.pid}, today")
    with submission_lock(tmp_path):
        assert owner_is_dead(lock.read_text()) is False
    lock.write_text(f"elsewhere, process {process.pid}, today")
    with pytest.raises(UserError, match="elsewhere"), submission_lock(tmp_path):
        pass


def test_a_lock_whose_owner_was_killed_before_it_wrote_its_name_is_removed_after_a_minute(tmp_path: Path) -> None:
    lock = tmp_path / "sweeps" / "submitting"
    lock.parent.mkdir()
    lock.touch()
    with pytest.raises(UserError, match="another sweep is being submitted"), submission_lock(tmp_path):
        pass
    os.utime(lock, (time.time() - 61,) * 2)
    with submission_lock(tmp_path):
        assert lock.read_text()


def test_two_commands_that_see_the_same_stale_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both find it stale, then both remove it: the second would remove the new lock of the first."""
    with subprocess.Popen(["true"]) as process:
        process.wait()
    lock = tmp_path / "sweeps" / "submitting"
    lock.parent.mkdir()
    lock.write_text(f"{socket.gethostname()}, process {process.pid}, today")

    def slowly(owner: str) -> bool:
        dead = owner_is_dead(owner)
        time.sleep(0.3)
        return dead

    monkeypatch.setattr("ecgmatch_dist.launch.submission_lock.owner_is_dead", slowly)
    inside, refused, first_left = [], [], threading.Event()

    def command() -> None:
        try:
            with submission_lock(tmp_path):
                inside.append(1)
                first_left.wait(20)
        except UserError:
            refused.append(1)
            first_left.set()

    both = [threading.Thread(target=command) for _ in range(2)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    assert (len(inside), len(refused)) == (1, 1)


def test_an_accounting_that_does_not_answer_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = tmp_path / "sacct"
    command.write_text("#!/bin/sh\nexec sleep 60\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(slurm, "ANSWER_SECONDS", 0.2)
    assert slurm.accounting(["7_1"]) == {}


def test_an_error_with_brackets_and_escapes_is_shown_as_it_is() -> None:
    """rich would take [/x] for a mark of its own, and raise; a terminal would obey the escape."""
    row = status.StatusRow("a", "failed", "", "7_0", 1, 2, None, None, 0, "KeyError: '[/x]' \x1b[31m")
    screen = Console(file=io.StringIO(), width=200)
    screen.print(status.show([row], "small [/]"))
    shown = screen.file.getvalue()  # type: ignore[attr-defined]
    assert "KeyError: '[/x]' \\x1b[31m" in shown
    assert "small [/]: 1 failed" in shown


def test_one_submission_at_a_time(tmp_path: Path) -> None:
    refused = pytest.raises(UserError, match="another sweep is being submitted")
    with submission_lock(tmp_path), refused, submission_lock(tmp_path):
        pass
    with submission_lock(tmp_path):
        pass


def test_logs(submitted: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status.logs("c", runs=submitted)
    assert "no space left" in capsys.readouterr().out
    with pytest.raises(UserError, match="no run `z`"):
        status.logs("z", runs=submitted)


@pytest.mark.slow
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
    choose.choose("small", runs=submitted)
    out = capsys.readouterr().out
    assert re.search(r"ecgmatch.*0\.8000", out)
    assert "3 runs are not finished" in out


def test_a_run_waits_for_its_start_as_long_as_that_is_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(Config(), runs=tmp_path)
    answers = iter([True, True, False])
    monkeypatch.setattr(slurm, "is_alive", lambda name: name == "7_0" and next(answers))
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    train = train_job.TrainJob("b", config.to_json(), ("a",))
    submission = Submission(run="b", starts={"a": "7_0"}, cluster="slurm", job="7_1", folder="", time=1.0)
    append_submissions(sweep_folder(tmp_path, "small"), [submission])
    with pytest.raises(UserError, match="a did not finish, and b starts from it"):
        train.await_starts(config)
    make_run(tmp_path / "a", 3, done=True)
    train.await_starts(config)


@pytest.mark.parametrize("cluster", ["local", "debug"])
def test_on_this_machine(data: Path, tmp_path: Path, cluster: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """One supervised run, on two ranks through submitit's local executor, or in this process."""
    (data / "splits").mkdir(exist_ok=True)
    (data / "splits" / "one.json").write_text((data / "split.json").read_text())
    (tmp_path / "site.toml").write_text("ranks_per_node = 2\nsetup = ['export OMP_NUM_THREADS=1']\n")
    name = write(tmp_path, 'split = "one"\n[grid]\nmethod = ["supervised"]\n')
    small = (
        "data.rate=0",
        "data.length=0",
        "model.width=16",
        "model.heads=2",
        "pretrain.steps=3",
        "pretrain.labelled_batch=8",
        "runtime.device=cpu",
    )
    place = {"site": str(tmp_path / "site.toml"), "shards": str(data / "shards"), "splits": data / "splits"}
    for _ in range(2):
        sweep.main(name, cluster, **place, runs=tmp_path / "runs", set=(*small, "runtime.log_every=1"))  # type: ignore[arg-type]
    assert "nothing to submit" in capsys.readouterr().out
    (row,) = status.collect("small", tmp_path / "runs")
    assert (row.name, row.state, row.step) == ("within-chapman@0.2.s20.supervised", "finished", 3)
    result = json.loads((tmp_path / "runs" / row.name / "result.json").read_text())
    assert result["world_size"] == (2 if cluster == "local" else 1)


@pytest.mark.slow
def test_a_run_that_fails_on_this_machine_is_reported_and_is_an_error(
    data: Path,
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
    where: dict[str, Any] = {"site": "gpu", "splits": tmp_path, "runs": tmp_path, "dry_run": True}
    sweep.main("mix", cluster="slurm", **where, full=True)
    out = capsys.readouterr().out
    assert "mix: 27 runs" in out
    assert re.search(r"^ +3  mix@0\.01\.s19\.mixmatch +5,000 steps  new  after 0$", out, re.MULTILINE)
    assert "#SBATCH --array=0-26%27" in out
    assert "scontrol update jobid=ARRAY_[3-10] dependency=afterany:ARRAY_0\n" in out
    assert "scontrol release ARRAY_[0-26]\n" in out
    assert not (tmp_path / "sweeps").exists()


def test_a_dry_run_is_a_summary_and_names_the_splits_that_are_missing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """216 runs need no 282 lines, and no name is broken."""
    where: dict[str, Any] = {"splits": tmp_path / "splits", "runs": tmp_path}
    sweep.main("within", **where, dry_run=True, ratios=(0.1,))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) < 20
    assert any(line.split()[:2] == ["method", "mixmatch"] for line in lines)
    assert any("96, and 12 that they start from" in line for line in lines)
    made = [line.strip() for line in lines if line.strip().startswith("ecgmatch split")]
    assert len(made) == 4
    assert made[0].startswith(
        "ecgmatch split within --database g12ec --ratio 0.1 --seeds 19 20 21 --shards data/shards --to"
    )
    for command in made:
        check_command(command)
    with pytest.raises(
        UserError, match=r"12 splits are missing, first within-g12ec@0\.05\.s19\.json(.|\n)*--seeds 19 20 21"
    ):
        sweep.main("within", "local", **where)


def test_a_dry_run_names_each_variant_and_every_database_of_a_split(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "72")
    where: dict[str, Any] = {"splits": tmp_path / "splits", "runs": tmp_path, "dry_run": True}
    sweep.main("programme", **where)
    lines = capsys.readouterr().out.splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith("  variants"))
    end = next(i for i, line in enumerate(lines) if line.startswith("  runs"))
    names = " ".join(lines[begin:end]).split()[1:]
    assert names[:3] == ["plain", "supervised", "fully_supervised"]
    assert {"without_refinement", "mixmatch.pipeline=sequential"} <= {*names}
    assert len({*names}) == len(names), "each can be told from the others"
    assert max(map(len, lines[begin:end])) <= 72
    sweep.main("unlabelled", **where)
    made = [line.strip() for line in capsys.readouterr().out.splitlines() if "ecgmatch split" in line]
    together = next(line for line in made if "--unlabelled-database" in line)
    assert "--database chapman --unlabelled-database g12ec ningbo ptbxl --ratio 0.05" in together
    for command in made:
        check_command(command)


@pytest.mark.parametrize("name", ["launch/within.toml", "elsewhere/within.toml", "launch/within"])
def test_a_path_of_the_repository_suggests_the_name_that_works_everywhere(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="`within` names the one that comes with ecgmatch_dist"):
        sweep.main(name, dry_run=True)
    with pytest.raises(UserError, match=r"own\.toml: no such file$"):
        sweep.main("own.toml", dry_run=True)
    with pytest.raises(UserError, match="no recipe `own` in launch/: known are"):
        sweep.main("own", dry_run=True)
