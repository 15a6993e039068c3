"""Sweeps on a real Slurm and what can happen to them: each run ends with the same bits as an undisturbed one."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ecgmatch_dist.launch import slurm, status
from ecgmatch_dist.launch.submissions import read_submissions, sweep_folder
from tests.cluster.harm import (
    ROOT,
    SET,
    SETTINGS,
    Lab,
    assert_same_bits,
    steps_of,
    submit,
    wait_for_step,
    wait_until,
    waits_for,
)

pytestmark = pytest.mark.cluster

ONE = "within-chapman@0.2.s20.ecgmatch"
ONE_RUN = """
split = "within-chapman@0.2.s20"
[grid]
method = ["ecgmatch"]
"""


def submit_one(tmp_path: Path, data: Path, runs: Path, set: tuple[str, ...] = SET, **changes: object) -> str:
    """Submit one run of ECGMatch; returns its job."""
    (tmp_path / "one.toml").write_text(ONE_RUN)
    submit(tmp_path / "one.toml", tmp_path, data, runs, set, **changes)
    return read_submissions(sweep_folder(runs, "one"))[-1].job


def wait_for_end(job: str, limit: float = 300) -> None:
    wait_until(lambda: not slurm.is_alive(job), f"the end of job {job}", limit, every=0.5)


def generations(run: Path) -> int:
    return len(list((run / "generations").iterdir()))


def output(runs: Path) -> str:
    """What the ranks of the latest job have written."""
    return "\n".join(path.read_text() for path in read_submissions(sweep_folder(runs, "one"))[-1].output_files())


def frozen(lab: Lab, runs: Path, job: str, step: int = 10) -> dict[int, int]:
    """The ranks of the first start of a job, stopped in the middle of training."""
    wait_for_step(runs / ONE, step)
    ranks = lab.ranks(job)
    assert sorted(ranks) == [0, 1]
    lab.signal(ranks, signal.SIGSTOP)
    return ranks


def test_a_sweep_equals_torchrun_to_the_bit(
    lab: Lab, data: Path, sweep_file: Path, reference: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As on a cluster with one rank per GPU: Slurm schedules the lab's GPUs as if they existed."""
    runs, gpus = tmp_path / "runs", {"gpus_per_node": 1, "ranks_per_node": 0}
    submit(sweep_file, tmp_path, data, runs, **gpus)
    submissions = read_submissions(sweep_folder(runs, "four"))
    assert len(submissions) == 6
    asked = subprocess.run(["scontrol", "show", "job", submissions[0].job], capture_output=True, text=True, check=True)
    assert "gres:gpu:1" in asked.stdout, asked.stdout  # on each of the two nodes
    jobs = {submission.run: submission.job for submission in submissions}
    assert len({job.split("_")[0] for job in jobs.values()}) == 1
    for run, job in jobs.items():  # each waits only for its own start
        own = run.rpartition(".")[0] + ".supervised"
        assert waits_for(job) == ([] if run == own else [jobs[own]])

    submit(sweep_file, tmp_path, data, runs, **gpus)  # all are in the queue: none is submitted again
    assert "nothing to submit" in capsys.readouterr().out
    assert len(read_submissions(sweep_folder(runs, "four"))) == 6

    for job in jobs.values():
        wait_for_end(job)
    rows = status.collect("four", runs)
    assert {(row.state, row.step, row.restarts) for row in rows} == {("finished", 60, 0), ("finished", 6, 0)}
    for run in jobs:
        assert_same_bits(reference / run, runs / run)
    world_sizes = [json.loads((runs / run / "result.json").read_text())["world_size"] for run in jobs]
    assert world_sizes == [2] * 6

    submit(sweep_file, tmp_path, data, runs, **gpus)
    assert "nothing to submit" in capsys.readouterr().out


def test_a_time_limit(lab: Lab, data: Path, reference: Path, runs: Path, tmp_path: Path) -> None:
    # Slurm may warn up to a minute too early: with a limit of one minute, that would be before the first step.
    job = submit_one(tmp_path, data, runs, minutes=2, warning_seconds=20)
    frozen(lab, runs, job)  # Slurm's warning wakes the ranks
    wait_for_end(job)
    assert_same_bits(reference / ONE, runs / ONE)
    assert "asked to stop: saved at step" in (runs / ONE / "log.txt").read_text()
    assert generations(runs / ONE) == 2


def test_a_preemption(lab: Lab, data: Path, reference: Path, runs: Path, tmp_path: Path) -> None:
    job = submit_one(tmp_path, data, runs, partition="low")
    frozen(lab, runs, job)  # Slurm's warning wakes the ranks
    higher = ["sbatch", "-p", "main", "-N", "2", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 3"]
    subprocess.run(higher, check=True, capture_output=True)
    wait_for_end(job)
    assert_same_bits(reference / ONE, runs / ONE)
    assert "asked to stop: saved at step" in (runs / ONE / "log.txt").read_text()
    assert generations(runs / ONE) == 2


def test_a_preemption_without_a_warning(lab: Lab, data: Path, reference: Path, runs: Path, tmp_path: Path) -> None:
    """A plain SIGTERM while the job is RUNNING, as on clusters without preempt_send_user_signal."""
    job = submit_one(tmp_path, data, runs)
    wait_for_step(runs / ONE, 10)
    subprocess.run(["scancel", "--signal=TERM", job], check=True)
    wait_for_end(job)
    assert "asked to stop: saved at step" in (runs / ONE / "log.txt").read_text()
    assert_same_bits(reference / ONE, runs / ONE)
    assert generations(runs / ONE) == 2


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank(lab: Lab, data: Path, reference: Path, runs: Path, tmp_path: Path, rank: int) -> None:
    job = submit_one(tmp_path, data, runs)
    wait_for_step(runs / ONE, 10)
    os.kill(lab.ranks(job)[rank], signal.SIGKILL)
    wait_for_end(job)
    assert_same_bits(reference / ONE, runs / ONE)
    assert generations(runs / ONE) == 2
    assert status.collect("one", runs)[-1].restarts == 1


def test_a_rank_that_hangs(lab: Lab, data: Path, reference: Path, runs: Path, tmp_path: Path) -> None:
    """One rank hangs, the other one gives up; Slurm must kill the first and queue the job again."""
    job = submit_one(tmp_path, data, runs, set=(*SET, "runtime.timeout_minutes=0.5"))
    wait_for_step(runs / ONE, 10)
    lab.signal({1: lab.ranks(job)[1]}, signal.SIGSTOP)
    wait_for_end(job)
    assert "rank 0 lost contact in " in output(runs)
    assert_same_bits(reference / ONE, runs / ONE)
    assert generations(runs / ONE) == 2


@pytest.mark.parametrize("node", ["n1", "n2"])
def test_a_power_cut(lab: Lab, data: Path, reference: Path, runs: Path, tmp_path: Path, node: str) -> None:
    job = submit_one(tmp_path, data, runs)
    frozen(lab, runs, job)
    lab.kill(f"node.{node}")
    subprocess.run(["scontrol", "update", f"nodename={node}", "state=down", "reason=power"], check=True)
    for pid in lab.ranks(job).values():
        os.kill(pid, signal.SIGCONT)
    lab.repair()
    wait_for_end(job)
    assert_same_bits(reference / ONE, runs / ONE)
    assert generations(runs / ONE) == 2


def test_two_copies_at_once(lab: Lab, data: Path, reference: Path, runs: Path, tmp_path: Path) -> None:
    """A node's daemon dies, but not the node: Slurm starts the run again elsewhere while the old copy still runs."""
    job = submit_one(tmp_path, data, runs, nodes=1, ranks_per_node=2)
    old = frozen(lab, runs, job)
    node = slurm.queue()[job].nodes
    lab.kill(f"slurmd.{node}")
    subprocess.run(["scontrol", "update", f"nodename={node}", "state=down", "reason=daemon"], check=True)
    wait_until(lambda: generations(runs / ONE) == 2, "the second copy")
    wait_for_step(runs / ONE, 15)
    lab.signal(old, signal.SIGCONT)
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in old.values()), "the end of the old copy")
    assert "a newer copy of this run has taken over (generation 2" in output(runs)
    wait_for_end(job)
    lab.repair()
    assert_same_bits(reference / ONE, runs / ONE)
    assert steps_of(runs / ONE) == list(range(1, 61))
    assert generations(runs / ONE) == 2
    written = {path.name.split(".")[1] for path in (runs / ONE / "checkpoints").glob("step-*")}
    assert written == {"2"}  # the old copy's checkpoints are gone, and it has written no new ones


def test_a_restart_of_the_controller(lab: Lab, data: Path, reference: Path, runs: Path, tmp_path: Path) -> None:
    job = submit_one(tmp_path, data, runs)
    ranks = frozen(lab, runs, job)
    lab.kill("slurmctld")
    lab.repair()
    lab.signal(ranks, signal.SIGCONT)
    wait_for_end(job)
    assert_same_bits(reference / ONE, runs / ONE)
    assert generations(runs / ONE) == 1


def test_a_cancelled_sweep_is_resumed(
    lab: Lab, data: Path, reference: Path, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = submit_one(tmp_path, data, runs)
    wait_for_step(runs / ONE, 10)
    status.cancel("one", runs)
    assert "1 jobs cancelled" in capsys.readouterr().out
    wait_for_end(job)
    assert status.collect("one", runs)[-1].state == "failed (cancelled)"
    again = submit_one(tmp_path, data, runs)
    assert again != job
    wait_for_end(again)
    assert_same_bits(reference / ONE, runs / ONE)


@pytest.mark.parametrize("warning", ["USR2", "TERM"])
def test_the_plain_batch_script(
    lab: Lab, data: Path, reference: Path, runs: Path, tmp_path: Path, warning: str
) -> None:
    """sbatch and torchrun without a sweep, on two nodes. A warning does not count as a crash."""
    where = [
        f"--split={data / 'splits' / 'within-chapman@0.2.s20.json'}",
        f"--shards={data / 'shards'}",
        f"--runs={runs}",
    ]
    flags = [f"--{key.replace('_', '-')}={value}" for key, value in SETTINGS.items()]
    options = ["--parsable", "--nodes=2", "--cpus-per-task=1", f"--output={tmp_path}/log", f"--chdir={tmp_path}"]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    command = ["sbatch", *options, str(ROOT / "slurm/train.sbatch"), *where, *flags]
    job = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout.strip()
    wait_for_step(runs / ONE, 10)
    subprocess.run(["scancel", f"--signal={warning}", job], check=True)
    wait_until(lambda: generations(runs / ONE) == 2, "the second start")
    assert not list(tmp_path.glob(".ecgmatch-*.crashes"))
    wait_for_end(job)
    assert "asked to stop: saved at step" in (runs / ONE / "log.txt").read_text(), (tmp_path / "log").read_text()
    assert_same_bits(reference / ONE, runs / ONE)
    assert generations(runs / ONE) == 2
