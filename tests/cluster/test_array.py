"""A sweep as one job array on a real Slurm: dependencies, and submissions that are cut off or refused."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ecgmatch_dist.data.splits import make_split
from ecgmatch_dist.data.store import ShardStore
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.launch import array, slurm, status
from ecgmatch_dist.launch.submissions import read_submissions, sweep_folder
from tests.cluster.harm import SET, Lab, site, submit, wait_until, waits_for

pytestmark = pytest.mark.cluster

START = "within-chapman@0.2.s20.supervised"
OTHER = """
split = "within-chapman@0.2.s20"
[grid]
method = ["softmatch"]
"""


def path_with(command: str, lines: str, folder: Path) -> str:
    """A PATH on which a Slurm command is a script that runs `lines` first; $REAL is the real command."""
    (folder / f"before-{command}").mkdir()
    script = folder / f"before-{command}" / command
    script.write_text(f'#!/bin/bash\nREAL={shutil.which(command)}\n{lines}\nexec $REAL "$@"\n')
    script.chmod(0o755)
    return f"{script.parent}:{os.environ['PATH']}"


def submit_and_die(path: str, file: Path, tmp_path: Path, data: Path, runs: Path) -> str:
    """`ecgmatch sweep` in a process that one of the commands on `path` kills; returns its output."""
    command = [sys.executable, "-m", "ecgmatch_dist", "sweep", str(file), "--site", site(tmp_path)]
    command += ["--shards", str(data / "shards"), "--splits", str(data / "splits"), "--runs", str(runs), "--set", *SET]
    done = subprocess.run(command, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False)
    assert done.returncode == -9, done.stderr
    return done.stdout


def test_a_submission_that_is_cut_off(
    lab: Lab, data: Path, sweep_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Killed right after sbatch; a second time before the dependencies are set. The third time recovers the second."""
    runs = tmp_path / "runs"
    place = (tmp_path, data, runs)
    submit_and_die(path_with("sbatch", '$REAL "$@"; kill -9 $PPID; exit', tmp_path), sweep_file, *place)
    lost = slurm.held_jobs()
    assert len(lost) == 6
    assert read_submissions(sweep_folder(runs, "four")) == []

    path = path_with("scontrol", '[ "$1" != update ] || { kill -9 $PPID; exit; }', tmp_path)
    out = submit_and_die(path, sweep_file, *place)
    assert "cut off before its 6 runs were recorded; cancelled" in out
    submissions = read_submissions(sweep_folder(runs, "four"))
    jobs = {submission.run: submission.job for submission in submissions}
    assert set(jobs.values()) == slurm.held_jobs().keys()
    assert not lost.keys() & set(jobs.values())

    submit(sweep_file, *place)
    out = capsys.readouterr().out
    assert "left 6 runs held; they are released now" in out
    assert "nothing to submit" in out
    assert read_submissions(sweep_folder(runs, "four")) == submissions
    assert slurm.held_jobs() == {}
    for submission in submissions:
        own = submission.run.rpartition(".")[0] + ".supervised"
        assert waits_for(submission.job) == ([] if submission.run == own else [jobs[own]])

    # A single run of another sweep is a plain job; it waits for the start that is already in the queue.
    (tmp_path / "other.toml").write_text(OTHER)
    submit(tmp_path / "other.toml", *place)
    (submission,) = read_submissions(sweep_folder(runs, "other"))
    assert "_" not in submission.job
    assert waits_for(submission.job) == [jobs[START]]

    wait_until(lambda: slurm.queue()[jobs[START]].state == "RUNNING", "a run that was held", every=0.5)
    for name in ("other", "four"):
        status.cancel(name, runs)


def test_more_runs_than_an_array_takes(
    lab: Lab, data: Path, sweep_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs of the second array wait for starts in the first. If sbatch refuses the second, the first is cancelled."""
    runs = tmp_path / "runs"
    monkeypatch.setattr(slurm, "array_limit", lambda: 4)
    refuse = 'if grep -q "array=0-1%" "$1"; then sed -i "s/partition=main/partition=none/" "$1"; fi'
    with monkeypatch.context() as context:
        context.setenv("PATH", path_with("sbatch", refuse, tmp_path))
        with pytest.raises(UserError, match=r"sweep four: sbatch refused 2 runs: .*partition.*--dry-run"):
            submit(sweep_file, tmp_path, data, runs)
    assert slurm.held_jobs() == {}
    assert read_submissions(sweep_folder(runs, "four")) == []
    assert list((sweep_folder(runs, "four") / "jobs").iterdir()) == []

    submit(sweep_file, tmp_path, data, runs)
    jobs = [submission.job for submission in read_submissions(sweep_folder(runs, "four"))]
    first, second = array.array_ids(jobs)
    assert jobs == [f"{first}_0", f"{first}_1", f"{first}_2", f"{first}_3", f"{second}_0", f"{second}_1"]
    assert [waits_for(job) for job in jobs] == [[], [], *([f"{first}_{start}"] for start in (0, 0, 1, 1))]
    status.cancel("four", runs)


def test_two_hundred_jobs(lab: Lab, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each of a hundred runs waits for its own start. The jobs end at once: what is tried is everything around them."""
    runs, store, seeds = tmp_path / "runs", ShardStore(data / "shards", ["chapman"]), range(100, 200)
    for seed in seeds:
        split = make_split(store, "within", 0.2, seed, "ecgmatch5")
        split.save(tmp_path / "splits" / f"{split.name}.json")
    (tmp_path / "many.toml").write_text(
        f'split = "within-chapman@0.2.s{{seed}}"\n[grid]\nseed = {[*seeds]}\nmethod = ["ecgmatch"]\n'
    )
    (tmp_path / "shards").symlink_to(data / "shards")
    seconds = {}

    def timed(what: str, function: Callable[[], object]) -> None:
        begin = time.monotonic()
        function()
        seconds[what] = round(time.monotonic() - begin, 1)

    at_once = {"setup": ["exit 0"], "nodes": 1, "parallel": 8}
    timed("submitted", lambda: submit(tmp_path / "many.toml", tmp_path, tmp_path, runs, **at_once))
    jobs = {submission.run: submission.job for submission in read_submissions(sweep_folder(runs, "many"))}
    assert len(jobs) == 200
    timed("status", lambda: status.main("many", runs=runs))
    assert "200" in capsys.readouterr().out
    timed("all jobs", lambda: wait_until(lambda: not slurm.queue(), "200 jobs", limit=600, every=1))
    (array_id,) = array.array_ids(jobs.values())
    times: dict[str, tuple[str, str]] = {}

    def accounted() -> bool:
        """The database learns of a job's end a while after the queue."""
        account = ["sacct", "-X", "-n", "-P", "-o", "JobID,Start,End", "-j", array_id]
        text = subprocess.run(account, check=True, capture_output=True, text=True).stdout
        times.update({job: (start, end) for job, start, end in (line.split("|") for line in text.split())})
        return all(times.get(job, ("", "Unknown"))[1] not in ("", "Unknown") for job in jobs.values())

    wait_until(accounted, "the accounts of 200 jobs", every=1)
    for seed in seeds:
        start, run = (times[jobs[f"within-chapman@0.2.s{seed}.{method}"]] for method in ("supervised", "ecgmatch"))
        assert start[1] <= run[0], seed
    timed("status of ended jobs", lambda: status.main("many", runs=runs))
    print(f"200 jobs: {seconds}")
