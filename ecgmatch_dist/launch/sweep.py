"""`ecgmatch sweep`: plan the runs of a file of launch/, and submit those that are neither finished nor in the queue."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import submitit
import tyro
from rich.console import Console

from ecgmatch_dist.config import Config, from_json
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.launch import array, slurm
from ecgmatch_dist.launch.choose import apply_choices, read_choices
from ecgmatch_dist.launch.expand import PlannedRun, Sweep, base_config, load_sweep, plan_runs
from ecgmatch_dist.launch.show import how_to_make, missing_splits, run_lines, summary
from ecgmatch_dist.launch.site import Site, load_site
from ecgmatch_dist.launch.submission_lock import submission_lock
from ecgmatch_dist.launch.submissions import (
    Submission,
    append_submissions,
    finished,
    latest_submissions,
    slurm_jobs,
    sweep_folder,
)
from ecgmatch_dist.launch.sweep_plan import write_plan
from ecgmatch_dist.launch.train_job import TrainJob
from ecgmatch_dist.launch.where import elsewhere
from ecgmatch_dist.record.metrics_file import read_latest
from ecgmatch_dist.record.result import read_result
from ecgmatch_dist.terminal.waiting import make_bar


def select_runs(planned: Sequence[PlannedRun], runs: Path) -> tuple[list[PlannedRun], dict[str, str]]:
    """The runs to submit: neither finished, nor pending or running, on Slurm or here. And the state of every planned run."""
    jobs = slurm_jobs(runs)
    alive = slurm.alive_among(jobs.values()) if slurm.available() else {}
    here = {name: latest.job for name, latest in latest_submissions(runs).items() if latest.is_running_here()}
    states, wanted = {}, []
    for run in planned:
        job = jobs.get(run.name)
        if finished(runs, run.name):
            states[run.name] = "finished"
        elif job in alive:
            held = alive[job].reason == slurm.HELD  # by the user: jobs of cut submissions have been released before
            state = f"held (scontrol release {job})" if held else alive[job].state.lower()
            states[run.name] = f"{state} as job {job}"
        elif run.name in here:
            states[run.name] = f"running here as process {here[run.name]}"
        else:
            states[run.name] = "again" if (runs / run.name).is_dir() else "new"
            wanted.append(run)
    return wanted, states


def run_local(sweep: str, wanted: Sequence[PlannedRun], runs: Path, site: Site) -> None:
    """One run after the other on this machine, with the site's ranks per node each."""
    failed = []
    for number, run in enumerate(wanted, 1):
        still_wanted, states = select_runs([run], runs)  # another command may have started it meanwhile
        print(f"[{number}/{len(wanted)}] {run.name}" + ("" if still_wanted else f": {states[run.name]}"), flush=True)
        if not still_wanted:
            continue
        folder = (sweep_folder(runs, sweep) / "jobs" / f"{time.time_ns():x}").resolve()
        executor = submitit.LocalExecutor(folder)
        executor.update_parameters(
            timeout_min=60 * 24 * 30, tasks_per_node=site.ranks, gpus_per_node=site.gpus_per_node, setup=site.setup
        )
        job = executor.submit(TrainJob(run.name, run.config.to_json(), run.starts))
        submission = Submission(run=run.name, cluster="local", job=job.job_id, folder=str(folder), time=time.time())
        append_submissions(sweep_folder(runs, sweep), [submission])
        try:
            wait_for(job, run, runs)
        except KeyboardInterrupt:
            job.cancel()
            raise
        if finished(runs, run.name):
            result = read_result(runs / run.name / "result.json")
            print(f"    test MAP {result.test.map:.4f} after {result.seconds:.0f} s", flush=True)
        else:
            failed.append(run.name)
            print(f"    failed: {submission.last_error()}", flush=True)
    if failed:
        raise UserError(
            f"{len(failed)} of {len(wanted)} runs failed: `ecgmatch logs {failed[0]} --runs {runs}` shows why; "
            "the same command tries them again"
        )


def wait_for(job: submitit.Job[str], run: PlannedRun, runs: Path) -> None:
    """Wait for a run; on a terminal, with the steps that it has taken so far."""
    with make_bar(Console(stderr=True)) as bar:
        task = bar.add_task(run.name, total=run.config.optim.steps)
        while not job.done():
            steps = [line.step for line in read_latest(runs / run.name)]
            bar.update(task, completed=max(steps, default=0))
            time.sleep(1)
    job.wait()


def run_debug(wanted: Sequence[PlannedRun]) -> None:
    """In this process, for a debugger."""
    from ecgmatch_dist.train import train

    for run in wanted:
        train(from_json(run.config.to_json()))


def tell(sweep: Sweep, planned: Sequence[PlannedRun], states: dict[str, str], full: bool) -> None:
    """Print the grid and, if asked for, each run. Plain lines: a name that the screen is too narrow for is not cut here."""
    print("\n".join([*summary(sweep, planned, states), *(run_lines(planned, states) if full else [])]), flush=True)


def main(
    name: tyro.conf.Positional[str],
    /,
    cluster: Literal["slurm", "local", "debug"] = "slurm",
    site: str = "",
    shards: str = "data/shards",
    splits: Path = Path("splits"),
    runs: Path = Path("runs"),
    preset: str = "",
    set: tuple[str, ...] = (),
    protocol: Literal["", "within", "cross", "mix"] = "",
    databases: tuple[str, ...] = (),
    ratios: tuple[float, ...] = (),
    seeds: tuple[int, ...] = (),
    chosen: Path | None = None,
    dry_run: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    full: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
) -> None:
    """Submit the runs of a sweep that are neither finished nor in the queue. The same command again resubmits what failed.

    Args:
        name: Sweep in launch/ (within, cross, mix, ...) or the path of a .toml file.
        cluster: slurm: one job array; local: one run after the other on this machine; debug: in this process.
        site: Site in slurm/ or the path of a .toml file: partition, account, GPUs, time limit, setup lines.
        shards: Folder or URL of the shards.
        splits: Folder of the split files.
        runs: Folder of runs.
        preset: Use this preset instead of the sweep's.
        set: Settings for all runs, as in --set optim.steps=1000 model.width=64
        protocol: Run the sweep on the splits of this protocol instead of its own, as `<sweep>-<protocol>`.
        databases: Databases (tested ones for cross) instead of the sweep's.
        ratios: Labelled shares instead of the sweep's; with --protocol, the paper's for the protocol are the default.
        seeds: Seeds of the splits instead of the sweep's.
        chosen: File of `ecgmatch choose --write`: train each method with the settings chosen for it, as runs `.chosen`.
        dry_run: Show the grid and the splits that are missing, submit nothing.
        full: Also show each run and, with --dry-run, the batch file and who waits for whom.
    """
    given = shards
    sweep, on_site = elsewhere(load_sweep(name), protocol, databases, ratios, seeds), load_site(site)
    shards = shards if "://" in shards else str(Path(shards).resolve())
    base = base_config(sweep, preset, shards, runs.resolve(), set)
    choices = read_choices(chosen) if chosen else ()

    def adapt(found: list[tuple[Path, Config]]) -> list[tuple[Path, Config]]:
        return apply_choices(found, choices) if chosen else found

    planned = plan_runs(sweep, base, splits.resolve(), adapt)
    missing = missing_splits(planned)
    make = "\n".join(how_to_make(missing, given, splits))
    if dry_run:
        wanted, states = select_runs(planned, runs)
        tell(sweep, planned, states, full)
        if missing:
            print(f"  missing   {len(missing)} splits in {splits}; make them, once the shards are there:\n{make}")
        if not full:
            print("--full shows each run, the batch file and who waits for whom")
        elif cluster == "slurm" and wanted:
            print(array.preview(sweep.name, wanted, runs, on_site))
        return
    if missing:
        raise UserError(f"{len(missing)} splits are missing, first {missing[0].name} in {splits}; make them:\n{make}")
    with submission_lock(runs):
        if cluster == "slurm":
            for message in array.recover_cut_submissions(runs):
                print(message)
        wanted, states = select_runs(planned, runs)
        tell(sweep, planned, states, full)
        write_plan(sweep.name, runs, planned)
        if cluster == "slurm" and wanted:
            arrays = array.submit(sweep.name, wanted, runs, on_site)
            print(f"{len(wanted)} runs submitted as {' and '.join(arrays)}: ecgmatch status {sweep.name} --runs {runs}")
    if not wanted:
        print("nothing to submit")
    elif cluster == "local":
        run_local(sweep.name, wanted, runs, on_site)
    elif cluster == "debug":
        run_debug(wanted)
