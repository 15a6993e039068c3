"""A sweep's runs as one Slurm job array, in which each run waits only for the runs that it starts from.

Dependencies between the tasks of an array need its job id, which Slurm gives at submission. So:

1. sbatch submits the array held;
2. its runs are recorded in submissions.jsonl;
3. scontrol sets the dependencies;
4. scontrol releases all tasks.

A waiting run takes neither a node nor one of the array's `parallel` places. If the command is killed between these steps, its
runs stay held; the next submission into the same folder of runs recovers them (`recover_cut_submissions`).
"""

import shutil
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from submitit.core.utils import FailedJobError, FailedSubmissionError
from submitit.slurm.slurm import _make_sbatch_string

from ecgmatch_dist.errors import UserError
from ecgmatch_dist.launch import slurm
from ecgmatch_dist.launch.expand import PlannedRun
from ecgmatch_dist.launch.site import Site
from ecgmatch_dist.launch.submissions import (
    Submission,
    all_submissions,
    append_submissions,
    finished,
    slurm_jobs,
    sweep_folder,
)
from ecgmatch_dist.launch.train_job import TrainJob
from ecgmatch_dist.terminal.waiting import track

RELEASED = "released"  # an empty file beside the jobs' output; jobs that are held later were held by the user


def submit(sweep: str, wanted: Sequence[PlannedRun], runs: Path, site: Site) -> list[str]:
    """Submit all runs or, if sbatch refuses, none. Returns the array ids: one, or more if the cluster limits array sizes."""
    parts, site = divide(wanted, slurm.array_limit(), site)
    ids: list[str] = []
    folders: list[Path] = []
    for part in parts:
        folders.append((sweep_folder(runs, sweep) / "jobs" / f"{time.time_ns():x}").resolve())
        tasks = [TrainJob(run.name, run.config.to_json(), run.starts) for run in part]
        try:
            ids += site.submit(f"ecgmatch-{sweep}", folders[-1], tasks, held=True)
        except (FailedJobError, FailedSubmissionError) as error:
            slurm.cancel(array_ids(ids))
            for folder in folders:
                shutil.rmtree(folder, ignore_errors=True)
            raise UserError(refusal_message(sweep, len(part), str(error))) from None
    folder_of_each = [folder for part, folder in zip(parts, folders, strict=True) for _ in part]
    submissions = make_submissions(wanted, ids, folder_of_each, runs)
    append_submissions(sweep_folder(runs, sweep), submissions)
    release(submissions)
    return array_ids(ids)


def divide(wanted: Sequence[PlannedRun], limit: int, site: Site) -> tuple[list[Sequence[PlannedRun]], Site]:
    """As few arrays as the limit allows. Slurm applies `parallel` to each array, so the returned site has their share of it."""
    parts = [wanted[first : first + limit] for first in range(0, len(wanted), limit)]
    return parts, replace(site, parallel=max(1, site.parallel // len(parts)))


def refusal_message(sweep: str, count: int, stderr: str) -> str:
    why = "; ".join(line.removeprefix("sbatch: error: ").strip() for line in stderr.splitlines() if line.strip())
    return (
        f"sweep {sweep}: sbatch refused {count} runs: {why or 'no reason given'}. Nothing was submitted; correct the site "
        "file, --dry-run --full shows what sbatch gets"
    )


def make_submissions(
    wanted: Sequence[PlannedRun], ids: Sequence[str], folders: Sequence[Path], runs: Path
) -> list[Submission]:
    """The lines of submissions.jsonl: each run's job, and the jobs of the unfinished runs that it starts from."""
    jobs = slurm_jobs(runs) | {run.name: job for run, job in zip(wanted, ids, strict=True)}
    now = time.time()
    return [
        Submission(
            run=run.name,
            starts={start: jobs[start] for start in run.starts if start in jobs and not finished(runs, start)},
            cluster="slurm",
            job=job,
            folder=str(folder),
            time=now,
        )
        for run, job, folder in zip(wanted, ids, folders, strict=True)
    ]


def release(submissions: Sequence[Submission]) -> None:
    """Set the dependencies of held jobs, then release them."""
    try:
        commands = scontrol_commands(submissions)
        for command in track(commands, "dependencies", len(commands)):
            slurm.run(command)
    except UserError as error:
        jobs = " ".join(job_ranges([submission.job for submission in submissions]))
        raise UserError(
            f"{error}; {jobs} are held: give the same command again to release them, or scancel them"
        ) from None
    for folder in {submission.folder for submission in submissions}:
        (Path(folder) / RELEASED).touch()


def scontrol_commands(submissions: Sequence[Submission]) -> list[list[str]]:
    """One `update` for all runs that wait for the same jobs, then the `release` of all."""
    waiting: dict[tuple[str, ...], list[str]] = {}
    for submission in submissions:
        if submission.starts:
            waiting.setdefault(tuple(submission.starts.values()), []).append(submission.job)
    # afterany, not afterok: a run whose start failed must begin, to report that. With afterok it would stay in the queue.
    updates = [
        ["scontrol", "update", f"jobid={tasks}", f"dependency=afterany:{':'.join(starts)}"]
        for starts, jobs in waiting.items()
        for tasks in job_ranges(jobs)
    ]
    return [*updates, *(["scontrol", "release", tasks] for tasks in job_ranges([s.job for s in submissions]))]


def array_ids(jobs: Iterable[str]) -> list[str]:
    """The ids of the arrays (and plain jobs) that jobs belong to."""
    return list(dict.fromkeys(job.partition("_")[0] for job in jobs))


def job_ranges(jobs: Sequence[str]) -> list[str]:
    """Jobs in scontrol's notation: 7_0 7_1 7_2 7_5 9 -> 7_[0-2,5] 9."""
    out = []
    for array in array_ids(jobs):
        tasks = sorted(int(job.partition("_")[2]) for job in jobs if job.startswith(f"{array}_"))
        # Consecutive numbers have the same difference to their index in the list.
        rows = [[task for _, task in row] for _, row in groupby(enumerate(tasks), lambda item: item[1] - item[0])]
        spans = [f"{row[0]}-{row[-1]}" if len(row) > 1 else str(row[0]) for row in rows]
        out.append(f"{array}_[{','.join(spans)}]" if spans else array)
    return out


def recover_cut_submissions(runs: Path) -> list[str]:
    """Recover the jobs that killed submissions left held, of every sweep, as sweeps share runs. Jobs that are recorded in
    submissions.jsonl are released. The others belong to no run that could be found again, and are cancelled. Returns a message
    for each of the two."""
    sweeps = (runs / "sweeps").resolve()
    held = {job: script.parent for job, script in slurm.held_jobs().items() if script.is_relative_to(sweeps)}
    recorded = [s for s in all_submissions(runs) if s.job in held and s.folder == str(held[s.job])] if held else []
    cut = [submission for submission in recorded if not (Path(submission.folder) / RELEASED).exists()]
    lost = held.keys() - {submission.job for submission in recorded}
    messages = []
    if cut:
        release(cut)
        jobs = " ".join(job_ranges([submission.job for submission in cut]))
        messages.append(
            f"{jobs}: an earlier submission was cut off and left {len(cut)} runs held; they are released now"
        )
    if lost:
        ranges = job_ranges(sorted(lost))  # not the whole arrays: other tasks of them may be recorded
        slurm.cancel(ranges)
        what = f"cut off before its {len(lost)} runs were recorded; cancelled"
        messages.append(f"{' '.join(ranges)}: an earlier submission was {what}")
    return messages


def preview(sweep: str, wanted: Sequence[PlannedRun], runs: Path, site: Site) -> str:
    """The batch files and the scontrol commands of a submission."""
    parts, site = divide(wanted, slurm.array_limit(required=False), site)
    ids: list[str] = []
    for number, part in enumerate(parts, 1):
        name = f"ARRAY{number if len(parts) > 1 else ''}"
        ids += [f"{name}_{task}" for task in range(len(part))] if len(part) > 1 else ["JOB"]
    submissions = make_submissions(wanted, ids, [Path()] * len(wanted), runs)
    texts = [batch_file(sweep, runs, site, len(part)) for part in parts]
    after = ["# then, with Slurm's job ids", *(" ".join(command) for command in scontrol_commands(submissions))]
    return "\n\n".join([*texts, "\n".join(after)])


def batch_file(sweep: str, runs: Path, site: Site, count: int) -> str:
    """The batch file of an array of `count` runs."""
    folder = (sweep_folder(runs, sweep) / "jobs" / "0").resolve()
    parameters = site.parameters(f"ecgmatch-{sweep}", folder, held=True)
    command = f"python -u -m submitit.core._submit {folder}"
    return str(_make_sbatch_string(command, folder, map_count=count if count > 1 else None, **parameters))
