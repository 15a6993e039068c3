"""A sweep as a job array: who waits for whom, what is handed to Slurm, what one whose submission was cut off left behind."""

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from ecgmatch_dist.config import Config
from ecgmatch_dist.launch import array, plan, site, slurm
from ecgmatch_dist.launch.submissions import folder_of, jobs_of, latest, read_records, write_records

RUNS = [
    plan.Run("s1", Config(), ()),
    plan.Run("s2", Config(), ()),
    plan.Run("a1", Config(), ("s1",)),
    plan.Run("a2", Config(), ("s2",)),
    plan.Run("b1", Config(), ("s1",)),
    plan.Run("c", Config(), ("s1", "s2")),
]


def described(runs: list[plan.Run], ids: list[str], folder: Path) -> list[array.Record]:
    return array.describe(runs, ids, [folder] * len(runs), folder)


def finish(folder: Path, name: str) -> None:
    (folder / name).mkdir()
    (folder / name / "result.json").touch()


def test_each_run_waits_for_its_own_starts(tmp_path: Path) -> None:
    records = described(RUNS, [f"7_{task}" for task in range(6)], tmp_path)
    assert [" ".join(command) for command in array.orders(records)] == [
        "scontrol update jobid=7_[2,4] dependency=afterany:7_0",
        "scontrol update jobid=7_[3] dependency=afterany:7_1",
        "scontrol update jobid=7_[5] dependency=afterany:7_0:7_1",
        "scontrol release 7_[0-5]",
    ]


def test_a_start_may_be_finished_or_at_work_for_another_sweep(tmp_path: Path) -> None:
    finish(tmp_path, "s1")
    write_records(folder_of(tmp_path, "other"), described(RUNS[:2], ["3_0", "3_1"], tmp_path))
    records = described([RUNS[2], RUNS[5]], ["8_0", "8_1"], tmp_path)
    assert [record["starts"] for record in records] == [{}, {"s2": "3_1"}]
    alone = described([RUNS[5]], ["9"], tmp_path)  # no array
    assert [" ".join(command) for command in array.orders(alone)] == [
        "scontrol update jobid=9 dependency=afterany:3_1",
        "scontrol release 9",
    ]


def test_jobs_as_scontrol_takes_them() -> None:
    assert array.expressions(["7_0", "7_1", "7_2", "7_5", "9", "8_3"]) == ["7_[0-2,5]", "9", "8_[3]"]
    assert array.expressions(["7_10", "7_9", "77_1"]) == ["7_[9-10]", "77_[1]"]
    assert array.arrays(["7_0", "7_1", "9"]) == ["7", "9"]


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
    text = array.sbatch_text("cross", tmp_path, replace(site.load("gpu"), nodes=2), 5)
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
    assert "--array" not in array.sbatch_text("cross", tmp_path, site.Site(), 1)


def test_a_preview_of_more_runs_than_an_array_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "array_limit", lambda patient: 5)
    text = array.preview("small", RUNS, tmp_path, site.Site(parallel=4))
    assert text.count("#SBATCH --array=0-4%2\n") == 1
    assert text.count("#!/bin/bash") == 2
    assert "scontrol update jobid=JOB dependency=afterany:ARRAY1_0:ARRAY1_1\n" in text


def test_a_refusal_names_the_reason_and_the_remedy() -> None:
    said = "sbatch: error: AssocMaxSubmitJobLimit\nsbatch: error: Batch job submission failed: policy\n"
    text = array.refusal("cross", 108, said)
    assert "sweep cross: sbatch refused 108 runs: AssocMaxSubmitJobLimit; Batch job submission failed: policy." in text
    assert "--dry-run" in text


def test_what_a_submission_that_was_cut_off_left_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Released is what is on record and was never released; cancelled what is not; a user's own hold stays."""
    place = folder_of(tmp_path, "small") / "jobs"
    held: dict[str, Path] = {"3": Path("/elsewhere/a.sh")}
    for number, name in ((5, "done"), (6, "cut"), (7, "lost")):
        (place / name).mkdir(parents=True)
        held |= {f"{number}_{task}": place / name / ".submission.sh" for task in range(6)}
        if name != "lost":
            ids = [f"{number}_{task}" for task in range(6)]
            write_records(folder_of(tmp_path, "small"), array.describe(RUNS, ids, [place / name] * 6, tmp_path))
    (place / "done" / array.RELEASED).touch()
    del held["6_3"]  # cancelled meanwhile
    told: list[list[str]] = []
    monkeypatch.setattr(slurm, "held", lambda: held)
    monkeypatch.setattr(slurm, "tell", told.append)
    monkeypatch.setattr(slurm, "cancel", lambda ids: told.append(["scancel", *ids]))
    cut, lost = array.take_up(tmp_path)
    assert cut.startswith("6_[0-2,4-5]: an earlier submission was cut off and left 5 runs held")
    assert lost.startswith("7_[0-5]: an earlier submission was cut off before its 6 runs were on record")
    assert [" ".join(command) for command in told] == [
        "scontrol update jobid=6_[2,4] dependency=afterany:6_0",
        "scontrol update jobid=6_[5] dependency=afterany:6_0:6_1",
        "scontrol release 6_[0-2,4-5]",
        "scancel 7_[0-5]",
    ]
    assert (place / "cut" / array.RELEASED).exists()


def test_the_list_of_submissions(tmp_path: Path) -> None:
    """The latest submission of a run counts, of whichever sweep; a run on this machine is no job."""
    first = {"run": "a", "cluster": "slurm", "job": "1_0", "folder": "f", "time": 1.0}
    write_records(folder_of(tmp_path, "x"), [first | {"job": "2_0", "time": 2.0}, first | {"run": "b"}])
    write_records(folder_of(tmp_path, "y"), [first, first | {"run": "b", "cluster": "local", "job": "99", "time": 3.0}])
    assert jobs_of(tmp_path) == {"a": "2_0", "b": "1_0"}
    assert latest(tmp_path)["b"]["job"] == "99"
    assert [record["run"] for record in read_records(folder_of(tmp_path, "x"))] == ["a", "b"]


def test_a_line_of_the_list_that_is_cut_spoils_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk was full: that job is held and not on the list. It is cancelled, it alone, before the next submission."""
    folder = folder_of(tmp_path, "x")
    place = folder / "jobs" / "0"
    place.mkdir(parents=True)
    record = {"run": "a", "starts": {}, "cluster": "slurm", "job": "1_0", "folder": str(place), "time": 1.0}
    write_records(folder, [record])
    with (folder / "submissions.jsonl").open("a") as file:
        file.write('{"run": "b", "clus')
    assert jobs_of(tmp_path) == {"a": "1_0"}
    told: list[list[str]] = []
    monkeypatch.setattr(slurm, "held", lambda: {f"1_{task}": place / ".submission.sh" for task in (0, 1)})
    monkeypatch.setattr(slurm, "tell", told.append)
    monkeypatch.setattr(slurm, "cancel", lambda ids: told.append(["scancel", *ids]))
    array.take_up(tmp_path)
    assert told == [["scontrol", "release", "1_[0]"], ["scancel", "1_[1]"]]
    write_records(folder, [record | {"run": "c", "job": "2_0"}])
    assert jobs_of(tmp_path) == {"a": "1_0", "c": "2_0"}
