"""`ecgmatch sweep`: plan the runs of a file of launch/, and submit those that are neither finished nor at work."""

import json
import os
import re
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import submitit
import tyro
from rich.console import Console
from rich.table import Table

from ecgmatch_dist.config import from_json
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.files import write_json
from ecgmatch_dist.launch import array, slurm
from ecgmatch_dist.launch import plan as planning
from ecgmatch_dist.launch import site as sites
from ecgmatch_dist.launch.job import TrainJob
from ecgmatch_dist.launch.plan import Run
from ecgmatch_dist.launch.site import Site
from ecgmatch_dist.launch.submissions import at_work_here, finished, folder_of, jobs_of, latest, write_records

Cluster = Literal["slurm", "local", "debug"]


def to_do(planned: Sequence[Run], runs: Path) -> tuple[list[Run], dict[str, str]]:
    """The runs that are neither finished nor at work, on Slurm or here, and what is to be said of each planned one."""
    jobs = jobs_of(runs)
    alive = slurm.living(jobs.values()) if slurm.available() else {}
    here = {name: record["job"] for name, record in latest(runs).items() if at_work_here(record)}
    said, wanted = {}, []
    for run in planned:
        job = jobs.get(run.name)
        if finished(runs, run.name):
            said[run.name] = "finished"
        elif job in alive:
            held = alive[job].reason == slurm.HELD  # by the user: what a cut submission left is released before
            state = f"held (scontrol release {job})" if held else alive[job].state.lower()
            said[run.name] = f"{state} as job {job}"
        elif run.name in here:
            said[run.name] = f"running here as process {here[run.name]}"
        else:
            said[run.name] = "again" if (runs / run.name).is_dir() else "new"
            wanted.append(run)
    return wanted, said


@contextmanager
def submitting(runs: Path) -> Iterator[None]:
    """One submission into a folder of runs at a time: two at once would submit the same runs."""
    (runs / "sweeps").mkdir(parents=True, exist_ok=True)
    path, me = runs / "sweeps" / "submitting", f"{socket.gethostname()}, process {os.getpid()}"
    if path.exists() and ended(path.read_text()):
        path.unlink(missing_ok=True)
    try:
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    except FileExistsError:
        raise UserError(
            f"{path}: another sweep is being submitted ({path.read_text().strip()}); if it is not, remove that file"
        ) from None
    try:
        os.write(handle, f"{me}, {time.ctime()}".encode())
        os.close(handle)
        yield
    finally:
        path.unlink()


def ended(note: str) -> bool:
    """Whether a note is of a process of this machine that is no more, as after a kill; of other machines nobody knows."""
    found = re.match(rf"{re.escape(socket.gethostname())}, process (\d+), ", note)
    return found is not None and not Path(f"/proc/{found[1]}").exists()


def run_local(sweep: str, wanted: Sequence[Run], runs: Path, site: Site) -> None:
    """One run after the other on this machine, each with as many ranks as the site says."""
    failed = []
    for number, run in enumerate(wanted, 1):
        still, said = to_do([run], runs)  # another command may have taken it up meanwhile
        print(f"[{number}/{len(wanted)}] {run.name}" + ("" if still else f": {said[run.name]}"), flush=True)
        if not still:
            continue
        folder = folder_of(runs, sweep) / "jobs" / f"{time.time_ns():x}"
        executor = submitit.LocalExecutor(folder.resolve())
        executor.update_parameters(
            timeout_min=60 * 24 * 30, tasks_per_node=site.ranks, gpus_per_node=site.gpus_per_node, setup=site.setup
        )
        job = executor.submit(TrainJob(run.name, run.config.to_json(), run.starts))
        record = {"run": run.name, "cluster": "local", "job": job.job_id, "folder": str(folder.resolve())}
        write_records(folder_of(runs, sweep), [{**record, "time": time.time()}])
        try:
            job.wait()
        except KeyboardInterrupt:
            job.cancel()
            raise
        if finished(runs, run.name):
            result = json.loads((runs / run.name / "result.json").read_text(encoding="utf-8"))
            print(f"    test MAP {result['test']['map']:.4f} after {result['seconds']:.0f} s", flush=True)
        else:
            failed.append(run.name)
            print(f"    failed: {last_line(Path(folder) / f'{job.job_id}_0_log.err', run.name)}", flush=True)
    if failed:
        raise UserError(
            f"{len(failed)} of {len(wanted)} runs failed: `ecgmatch logs {failed[0]} --runs {runs}` tells more; "
            "the same command tries them again"
        )


def run_debug(wanted: Sequence[Run]) -> None:
    """In this process, where a debugger reaches everything."""
    from ecgmatch_dist.train import execute

    for run in wanted:
        execute(from_json(run.config.to_json()))


def last_line(path: Path, run: str) -> str:
    """The last line that says something, of a job's errors; what the run says of its progress is none."""
    if not path.is_file():
        return ""
    lines = [line.strip() for line in path.read_text(encoding="utf-8", errors="replace").splitlines()]
    noise = ("srun:", "slurmstepd:", "*", "submitit", "Traceback", "File ", f"{run}: ")
    telling = [line for line in lines if line and not line.startswith(noise)]
    return telling[-1] if telling else ""


def table(planned: Sequence[Run], said: dict[str, str], title: str) -> Table:
    out = Table(title=title, title_justify="left")
    for name in ("run", "starts from", "steps", "what"):
        out.add_column(name, overflow="fold")
    for run in planned:
        out.add_row(run.name, ", ".join(run.starts), f"{run.config.optim.steps:,}", said[run.name])
    return out


def main(
    name: tyro.conf.Positional[str],
    /,
    cluster: Cluster = "slurm",
    site: str = "",
    shards: str = "data/shards",
    splits: Path = Path("splits"),
    runs: Path = Path("runs"),
    preset: str = "",
    set: tuple[str, ...] = (),
    dry_run: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
) -> None:
    """Submit the runs of a sweep that are neither finished nor at work. The same command again resubmits what failed.

    Args:
        name: Sweep in launch/ (within, cross, mix, ...) or the path of a .toml file.
        cluster: slurm: one job array; local: one run after the other on this machine; debug: in this process.
        site: Site in slurm/ or the path of a .toml file: partition, account, GPUs, time limit, setup lines.
        shards: Folder or URL of the shards.
        splits: Folder of the split files.
        runs: Where run folders are made.
        preset: Instead of the sweep's preset.
        set: Settings for all runs, as in --set optim.steps=1000 model.width=64
        dry_run: Show the runs and the sbatch file, and submit nothing.
    """
    sweep, place = planning.load(name), sites.load(site)
    shards = shards if "://" in shards else str(Path(shards).resolve())
    base = planning.base_config(sweep, preset, shards, runs.resolve(), set)
    planned = planning.plan(sweep, base, splits.resolve(), need_splits=not dry_run)
    console = Console(soft_wrap=True)
    title = f"{sweep.name}: {len(planned)} runs. {sweep.about}"
    if dry_run:
        wanted, said = to_do(planned, runs)
        console.print(table(planned, said, title))
        if cluster == "slurm" and wanted:
            console.print(array.preview(sweep.name, wanted, runs, place), markup=False, highlight=False)
        return
    with submitting(runs):
        if cluster == "slurm":
            for line in array.take_up(runs):
                console.print(line, markup=False, highlight=False)
        wanted, said = to_do(planned, runs)
        console.print(table(planned, said, title))
        record = [{"run": run.name, "starts": run.starts, "config": run.config.to_json()} for run in planned]
        folder_of(runs, sweep.name).mkdir(parents=True, exist_ok=True)
        write_json(folder_of(runs, sweep.name) / "plan.json", json.loads(json.dumps(record, default=str)))
        if cluster == "slurm" and wanted:
            arrays = array.submit(sweep.name, wanted, runs, place)
            console.print(
                f"{len(wanted)} runs submitted as {' and '.join(arrays)}: ecgmatch status {sweep.name} --runs {runs}"
            )
    if not wanted:
        console.print("nothing to submit")
    elif cluster == "local":
        run_local(sweep.name, wanted, runs, place)
    elif cluster == "debug":
        run_debug(wanted)
