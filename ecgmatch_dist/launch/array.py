"""A sweep's runs as one Slurm job array, in which each run waits for the runs that it starts from and for no others.

The tasks of an array can name each other only when it has its number. So it is submitted held; then its runs go on record, each
is told what to wait for, and all are let go. A run that waits takes neither a node nor one of the array's `parallel` places.
Who is killed in between leaves runs that are held: the next submission into the same folder of runs puts that right.
"""

import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import submitit
from submitit.core.utils import FailedJobError, FailedSubmissionError
from submitit.slurm.slurm import _make_sbatch_string

from ecgmatch_dist.errors import UserError
from ecgmatch_dist.launch import slurm
from ecgmatch_dist.launch.job import TrainJob
from ecgmatch_dist.launch.plan import Run
from ecgmatch_dist.launch.site import Site
from ecgmatch_dist.launch.submissions import all_records, finished, folder_of, jobs_of, write_records

Record = dict[str, Any]
RELEASED = "released"  # a file beside the jobs' output; a job that is held in spite of it is held by somebody's wish


def submit(sweep: str, wanted: Sequence[Run], runs: Path, site: Site) -> list[str]:
    """Submit all runs or, if sbatch refuses, none. Returns the arrays: one, unless the cluster's limit asks for more."""
    parts, site = divide(wanted, slurm.array_limit(), site)
    ids: list[str] = []
    folders: list[Path] = []
    for part in parts:
        folders.append((folder_of(runs, sweep) / "jobs" / f"{time.time_ns():x}").resolve())
        try:
            ids += sbatch(sweep, part, folders[-1], site)
        except (FailedJobError, FailedSubmissionError) as error:
            slurm.cancel(arrays(ids))
            for folder in folders:
                shutil.rmtree(folder, ignore_errors=True)
            raise UserError(refusal(sweep, len(part), str(error))) from None
    places = [folder for part, folder in zip(parts, folders, strict=True) for _ in part]
    records = describe(wanted, ids, places, runs)
    write_records(folder_of(runs, sweep), records)
    release(records)
    return arrays(ids)


def divide(wanted: Sequence[Run], limit: int, site: Site) -> tuple[list[Sequence[Run]], Site]:
    """As few arrays as the limit allows, and the site with their share of `parallel`, which Slurm counts in each by itself."""
    parts = [wanted[first : first + limit] for first in range(0, len(wanted), limit)]
    return parts, replace(site, parallel=max(1, site.parallel // len(parts)))


def sbatch(sweep: str, part: Sequence[Run], folder: Path, site: Site) -> list[str]:
    """Submit runs as one array, held; supervised runs come first, as Slurm starts low numbers first. Returns their jobs."""
    executor = submitit.SlurmExecutor(folder, max_num_timeout=site.requeues)
    executor.update_parameters(**site.parameters(f"ecgmatch-{sweep}", folder, held=True))
    with executor.batch() if len(part) > 1 else _single():
        jobs = [executor.submit(TrainJob(run.name, run.config.to_json(), run.starts)) for run in part]
    return [str(job.job_id) for job in jobs]


@contextmanager
def _single() -> Iterator[None]:
    """An array of one would have other names for its files."""
    yield


def refusal(sweep: str, count: int, said: str) -> str:
    why = "; ".join(line.removeprefix("sbatch: error: ").strip() for line in said.splitlines() if line.strip())
    return (
        f"sweep {sweep}: sbatch refused {count} runs: {why or 'without a word'}. None is submitted; the site file says what "
        "is asked for, and --dry-run shows it"
    )


def describe(wanted: Sequence[Run], ids: Sequence[str], folders: Sequence[Path], runs: Path) -> list[Record]:
    """What goes on record: each run's job, and the jobs of those runs that it starts from and that are not finished."""
    jobs = jobs_of(runs) | {run.name: job for run, job in zip(wanted, ids, strict=True)}
    now = time.time()
    return [
        {
            "run": run.name,
            "starts": {start: jobs[start] for start in run.starts if start in jobs and not finished(runs, start)},
            "cluster": "slurm",
            "job": job,
            "folder": str(folder),
            "time": now,
        }
        for run, job, folder in zip(wanted, ids, folders, strict=True)
    ]


def release(records: Sequence[Record]) -> None:
    """Tell held jobs what to wait for, and let them go."""
    try:
        for command in orders(records):
            slurm.tell(command)
    except UserError as error:
        jobs = " ".join(expressions([record["job"] for record in records]))
        raise UserError(f"{error}; {jobs} are held: the same command again releases them, scancel ends them") from None
    for folder in {record["folder"] for record in records}:
        (Path(folder) / RELEASED).touch()


def orders(records: Sequence[Record]) -> list[list[str]]:
    """Calls of scontrol: one for all runs that wait for the same jobs; then the release of all, in the order of numbers."""
    waiting: dict[tuple[str, ...], list[str]] = {}
    for record in records:
        if record["starts"]:
            waiting.setdefault(tuple(record["starts"].values()), []).append(record["job"])
    # Not afterok: one start that fails must not keep back the runs of the others. A run whose start failed says so.
    updates = [
        ["scontrol", "update", f"jobid={tasks}", f"dependency=afterany:{':'.join(starts)}"]
        for starts, jobs in waiting.items()
        for tasks in expressions(jobs)
    ]
    return [*updates, *(["scontrol", "release", tasks] for tasks in expressions([r["job"] for r in records]))]


def arrays(ids: Iterable[str]) -> list[str]:
    """The arrays (and single jobs) that jobs belong to."""
    return list(dict.fromkeys(job.partition("_")[0] for job in ids))


def expressions(ids: Sequence[str]) -> list[str]:
    """Jobs as scontrol takes them: 7_0 7_1 7_2 7_5 9 -> 7_[0-2,5] 9."""
    out = []
    for array in arrays(ids):
        tasks = sorted(int(job.partition("_")[2]) for job in ids if job.startswith(f"{array}_"))
        # Numbers in a row have the same distance to their place in the list.
        rows = [[task for _, task in row] for _, row in groupby(enumerate(tasks), lambda item: item[1] - item[0])]
        spans = [f"{row[0]}-{row[-1]}" if len(row) > 1 else str(row[0]) for row in rows]
        out.append(f"{array}_[{','.join(spans)}]" if spans else array)
    return out


def take_up(runs: Path) -> list[str]:
    """Put right what submissions that were cut off have left held, of any sweep: others may start from its runs. What is on
    record is released; what is not, nobody would find again, and it is cancelled. Returns what is to be said of it."""
    place = (runs / "sweeps").resolve()
    held = {job: script.parent for job, script in slurm.held().items() if script.is_relative_to(place)}
    recorded = [r for r in all_records(runs) if r["job"] in held and r["folder"] == str(held[r["job"]])] if held else []
    cut = [record for record in recorded if not (Path(record["folder"]) / RELEASED).exists()]
    lost = held.keys() - {record["job"] for record in recorded}
    said = []
    if cut:
        release(cut)
        jobs = expressions([record["job"] for record in cut])
        said.append(
            f"{' '.join(jobs)}: an earlier submission was cut off and left {len(cut)} runs held; they are released now"
        )
    if lost:
        jobs = expressions(sorted(lost))  # not their arrays: others of the same one may be on record
        slurm.cancel(jobs)
        what = f"cut off before its {len(lost)} runs were on record; cancelled"
        said.append(f"{' '.join(jobs)}: an earlier submission was {what}")
    return said


def preview(sweep: str, wanted: Sequence[Run], runs: Path, site: Site) -> str:
    """What would be handed to sbatch, and to scontrol after it."""
    parts, site = divide(wanted, slurm.array_limit(patient=False), site)
    ids: list[str] = []
    for number, part in enumerate(parts, 1):
        name = f"ARRAY{number if len(parts) > 1 else ''}"
        ids += [f"{name}_{task}" for task in range(len(part))] if len(part) > 1 else ["JOB"]
    records = describe(wanted, ids, [Path()] * len(wanted), runs)
    texts = [sbatch_text(sweep, runs, site, len(part)) for part in parts]
    after = ["# and then, with the numbers that Slurm gives", *(" ".join(command) for command in orders(records))]
    return "\n\n".join([*texts, "\n".join(after)])


def sbatch_text(sweep: str, runs: Path, site: Site, count: int) -> str:
    """What would be handed to sbatch for so many runs."""
    folder = (folder_of(runs, sweep) / "jobs" / "0").resolve()
    parameters = site.parameters(f"ecgmatch-{sweep}", folder, held=True)
    command = f"python -u -m submitit.core._submit {folder}"
    return str(_make_sbatch_string(command, folder, map_count=count if count > 1 else None, **parameters))
