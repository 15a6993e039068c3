"""A sweep as a job array: dependencies, batch file, recovery of a submission that was cut off."""

import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ecgmatch_dist.config import Config
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.launch import array, expand, site, slurm
from ecgmatch_dist.launch.submissions import (
    Submission,
    append_submissions,
    latest_submissions,
    read_submissions,
    slurm_jobs,
    sweep_folder,
)

RUNS = [
    expand.PlannedRun("s1", Config(), ()),
    expand.PlannedRun("s2", Config(), ()),
    expand.PlannedRun("a1", Config(), ("s1",)),
    expand.PlannedRun("a2", Config(), ("s2",)),
    expand.PlannedRun("b1", Config(), ("s1",)),
    expand.PlannedRun("c", Config(), ("s1", "s2")),
]


def submissions_of(runs: list[expand.PlannedRun], ids: list[str], folder: Path) -> list[Submission]:
    return array.make_submissions(runs, ids, [folder] * len(runs), folder)


def finish(folder: Path, name: str) -> None:
    (folder / name).mkdir()
    (folder / name / "result.json").touch()


def test_each_run_waits_for_its_own_starts(tmp_path: Path) -> None:
    records = submissions_of(RUNS, [f"7_{task}" for task in range(6)], tmp_path)
    assert [" ".join(command) for command in array.scontrol_commands(records)] == [
        "scontrol update jobid=7_[2,4] dependency=afterany:7_0",
        "scontrol update jobid=7_[3] dependency=afterany:7_1",
        "scontrol update jobid=7_[5] dependency=afterany:7_0:7_1",
        "scontrol release 7_[0-5]",
    ]


def test_a_start_may_be_finished_or_run_for_another_sweep(tmp_path: Path) -> None:
    finish(tmp_path, "s1")
    append_submissions(sweep_folder(tmp_path, "other"), submissions_of(RUNS[:2], ["3_0", "3_1"], tmp_path))
    records = submissions_of([RUNS[2], RUNS[5]], ["8_0", "8_1"], tmp_path)
    assert [submission.starts for submission in records] == [{}, {"s2": "3_1"}]
    alone = submissions_of([RUNS[5]], ["9"], tmp_path)  # no array
    assert [" ".join(command) for command in array.scontrol_commands(alone)] == [
        "scontrol update jobid=9 dependency=afterany:3_1",
        "scontrol release 9",
    ]


def test_jobs_as_scontrol_takes_them() -> None:
    assert array.job_ranges(["7_0", "7_1", "7_2", "7_5", "9", "8_3"]) == ["7_[0-2,5]", "9", "8_[3]"]
    assert array.job_ranges(["7_10", "7_9", "77_1"]) == ["7_[9-10]", "77_[1]"]
    assert array.array_ids(["7_0", "7_1", "9"]) == ["7", "9"]


def test_as_few_arrays_as_the_cluster_allows() -> None:
    parts, place = array.divide(RUNS, 6, site.Site(parallel=5))
    assert ([len(part) for part in parts], place.parallel) == ([6], 5)
    parts, place = array.divide(RUNS, 4, site.Site(parallel=5))
    assert ([len(part) for part in parts], place.parallel) == ([4, 2], 2)  # together no more than asked for
    assert array.divide(RUNS, 1, site.Site(parallel=5))[1].parallel == 1


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        ("MaxArraySize            = 1001\nMaxJobCount = 10000\n", 1001),
        ("MaxArraySize = 5000\nSchedulerParameters     = bf_window=9,max_array_tasks=200\n", 200),
        ("MaxArraySize = 0\n", 1),  # no arrays here
        ("", slurm.MAX_ARRAY_SIZE),
    ],
)
def test_what_the_cluster_allows(config: str, limit: int) -> None:
    assert slurm.parse_array_limit(config) == limit


def test_the_batch_file_is_a_script(tmp_path: Path) -> None:
    text = array.batch_file("cross", tmp_path, replace(site.load_site("gpu"), nodes=2), 5)
    for line in (
        "--array=0-4%5",
        "--hold",
        "--nodes=2",
        "--ntasks-per-node=4",
        "--gpus-per-node=4",
        "--requeue",
        "--signal=USR2@180",
    ):
        assert f"#SBATCH {line}\n" in text, line
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0
    assert "--array" not in array.batch_file("cross", tmp_path, site.Site(), 1)


def test_no_name_becomes_a_command(tmp_path: Path) -> None:
    """bash runs the batch file, with stand-ins for Slurm's commands, in folders whose names a shell would like to run."""
    marker, runs = tmp_path / "ran", tmp_path / "a b;$(touch ran);`touch ran`'\"&"
    runs.mkdir()
    text = array.batch_file(
        "x;touch ran", runs, replace(site.Site(), partition="p;touch ran", account="$(touch ran)"), 2
    )
    for name in ("srun", "scontrol"):
        (tmp_path / name).write_text("#!/bin/sh\nexit 0\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "batch.sh").write_text(text)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    subprocess.run(["bash", "batch.sh"], cwd=tmp_path, env=path, capture_output=True, check=False, timeout=60)
    assert not marker.exists()


@pytest.mark.parametrize(
    "change",
    [{"partition": "x\ntouch ran"}, {"account": "x\rtouch ran"}, {"extra": {"mail-user": "x\ntouch ran"}},
     {"extra": {"mail\ntouch ran": "x"}}, {"extra": {"a b": "x"}}],
)  # fmt: skip
def test_a_site_cannot_add_lines_to_the_batch_file(change: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="site: "):
        replace(site.Site(), **change)


def test_a_folder_cannot_add_lines_to_the_batch_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no line breaks"):
        array.batch_file("x", tmp_path / "a\ntouch ran", site.Site(), 2)


def test_a_preview_of_more_runs_than_an_array_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "array_limit", lambda required: 5)
    text = array.preview("small", RUNS, tmp_path, site.Site(parallel=4))
    assert text.count("#SBATCH --array=0-4%2\n") == 1
    assert text.count("#!/bin/bash") == 2
    assert "scontrol update jobid=JOB dependency=afterany:ARRAY1_0:ARRAY1_1\n" in text


def test_a_refusal_names_the_reason_and_the_remedy() -> None:
    stderr = "sbatch: error: AssocMaxSubmitJobLimit\nsbatch: error: Batch job submission failed: policy\n"
    text = array.refusal_message("cross", 108, stderr)
    assert "sweep cross: sbatch refused 108 runs: AssocMaxSubmitJobLimit; Batch job submission failed: policy." in text
    assert "--dry-run" in text


def test_what_a_submission_that_was_cut_off_left_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded jobs are released, unless the user holds them; jobs that are not recorded are cancelled."""
    place = sweep_folder(tmp_path, "small") / "jobs"
    held: dict[str, Path] = {"3": Path("/elsewhere/a.sh")}
    for number, name in ((5, "done"), (6, "cut"), (7, "lost")):
        (place / name).mkdir(parents=True)
        held |= {f"{number}_{task}": place / name / ".submission.sh" for task in range(6)}
        if name != "lost":
            ids = [f"{number}_{task}" for task in range(6)]
            append_submissions(
                sweep_folder(tmp_path, "small"), array.make_submissions(RUNS, ids, [place / name] * 6, tmp_path)
            )
    (place / "done" / array.RELEASED).touch()
    del held["6_3"]  # cancelled meanwhile
    commands: list[list[str]] = []
    monkeypatch.setattr(slurm, "held_jobs", lambda: held)
    monkeypatch.setattr(slurm, "run", commands.append)
    monkeypatch.setattr(slurm, "cancel", lambda ids: commands.append(["scancel", *ids]))
    cut, lost = array.recover_cut_submissions(tmp_path)
    assert cut.startswith("6_[0-2,4-5]: an earlier submission was cut off and left 5 runs held")
    assert lost.startswith("7_[0-5]: an earlier submission was cut off before its 6 runs were recorded")
    assert [" ".join(command) for command in commands] == [
        "scontrol update jobid=6_[2,4] dependency=afterany:6_0",
        "scontrol update jobid=6_[5] dependency=afterany:6_0:6_1",
        "scontrol release 6_[0-2,4-5]",
        "scancel 7_[0-5]",
    ]
    assert (place / "cut" / array.RELEASED).exists()


def test_the_list_of_submissions(tmp_path: Path) -> None:
    """The latest submission of a run counts, by any sweep; a local run has no Slurm job."""
    first = Submission(run="a", cluster="slurm", job="1_0", folder="f", time=1.0)
    append_submissions(sweep_folder(tmp_path, "x"), [replace(first, job="2_0", time=2.0), replace(first, run="b")])
    local = replace(first, run="b", cluster="local", job="99", time=3.0)
    append_submissions(sweep_folder(tmp_path, "y"), [first, local])
    assert slurm_jobs(tmp_path) == {"a": "2_0", "b": "1_0"}
    assert latest_submissions(tmp_path)["b"].job == "99"
    assert [submission.run for submission in read_submissions(sweep_folder(tmp_path, "x"))] == ["a", "b"]


def test_a_line_that_is_not_a_submission_is_refused_by_name(tmp_path: Path) -> None:
    folder = sweep_folder(tmp_path, "x")
    folder.mkdir(parents=True)
    (folder / "submissions.jsonl").write_text('{"run": "a", "cluster": "slurm", "job": "1_0", "folder": "f"}\n')
    with pytest.raises(UserError, match=r"submissions\.jsonl: the key `time` is missing"):
        read_submissions(folder)


def test_a_cut_line_damages_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk was full: that job is held and not recorded. It alone is cancelled before the next submission."""
    folder = sweep_folder(tmp_path, "x")
    place = folder / "jobs" / "0"
    place.mkdir(parents=True)
    submission = Submission(run="a", cluster="slurm", job="1_0", folder=str(place), time=1.0)
    append_submissions(folder, [submission])
    with (folder / "submissions.jsonl").open("a") as file:
        file.write('{"run": "b", "clus')
    assert slurm_jobs(tmp_path) == {"a": "1_0"}
    commands: list[list[str]] = []
    monkeypatch.setattr(slurm, "held_jobs", lambda: {f"1_{task}": place / ".submission.sh" for task in (0, 1)})
    monkeypatch.setattr(slurm, "run", commands.append)
    monkeypatch.setattr(slurm, "cancel", lambda ids: commands.append(["scancel", *ids]))
    array.recover_cut_submissions(tmp_path)
    assert commands == [["scontrol", "release", "1_[0]"], ["scancel", "1_[1]"]]
    append_submissions(folder, [replace(submission, run="c", job="2_0")])
    assert slurm_jobs(tmp_path) == {"a": "1_0", "c": "2_0"}
