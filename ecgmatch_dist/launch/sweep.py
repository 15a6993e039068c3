"""`ecgmatch sweep`: plan the runs of a file of launch/, and submit those that are neither finished nor in the queue."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from ecgmatch_dist.errors import UserError
from ecgmatch_dist.launch import array
from ecgmatch_dist.launch.choose import apply_choices, read_choices
from ecgmatch_dist.launch.expand import PlannedRun, Sweep, base_config, load_sweep, plan_runs
from ecgmatch_dist.launch.local import run_debug, run_local
from ecgmatch_dist.launch.select import select_runs
from ecgmatch_dist.launch.show import how_to_make, missing_splits, run_lines, summary
from ecgmatch_dist.launch.site import Site, load_site
from ecgmatch_dist.launch.submission_lock import submission_lock
from ecgmatch_dist.launch.sweep_plan import write_plan
from ecgmatch_dist.launch.where import elsewhere

Cluster = Literal["slurm", "local", "debug"]


@dataclass(frozen=True)
class Request:
    """A sweep with its runs, and where they are to run."""

    sweep: Sweep
    planned: Sequence[PlannedRun]
    runs: Path
    cluster: Cluster
    site: Site
    full: bool
    """Show each run, too."""

    def select(self) -> list[PlannedRun]:
        """The runs to submit. Prints the grid and, if asked for, each run. Plain lines: a name that the screen is too narrow
        for is not cut here."""
        wanted, states = select_runs(self.planned, self.runs)
        lines = summary(self.sweep, self.planned, states) + (run_lines(self.planned, states) if self.full else [])
        print("\n".join(lines), flush=True)
        return wanted


def preview(request: Request, missing: str) -> None:
    """Show what would be submitted, and which splits are missing."""
    wanted = request.select()
    if missing:
        print(f"  missing   {missing}")
    if not request.full:
        print("--full shows each run, the batch file and who waits for whom")
    elif request.cluster == "slurm" and wanted:
        print(array.preview(request.sweep.name, wanted, request.runs, request.site))


def submit(request: Request) -> None:
    """Submit, or run here, what is neither finished nor in the queue."""
    sweep, runs = request.sweep.name, request.runs
    with submission_lock(runs):
        if request.cluster == "slurm":
            for message in array.recover_cut_submissions(runs):
                print(message)
        wanted = request.select()
        write_plan(sweep, runs, request.planned)
        if request.cluster == "slurm" and wanted:
            arrays = array.submit(sweep, wanted, runs, request.site)
            print(f"{len(wanted)} runs submitted as {' and '.join(arrays)}: ecgmatch status {sweep} --runs {runs}")
    if not wanted:
        print("nothing to submit")
    elif request.cluster == "local":
        run_local(sweep, wanted, runs, request.site)
    elif request.cluster == "debug":
        run_debug(wanted)


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
    sweep = elsewhere(load_sweep(name), protocol, databases, ratios, seeds)
    base = base_config(sweep, preset, shards if "://" in shards else str(Path(shards).resolve()), runs.resolve(), set)
    choices = read_choices(chosen) if chosen else None
    planned = plan_runs(
        sweep, base, splits.resolve(), lambda found: found if choices is None else apply_choices(found, choices)
    )
    request = Request(sweep, planned, runs, cluster, load_site(site), full)
    missing = missing_splits(planned)
    how = "\n".join(how_to_make(missing, shards, splits))
    if dry_run:
        lines = f"{len(missing)} splits in {splits}; make them, once the shards are there:\n{how}"
        preview(request, lines if missing else "")
    elif missing:
        raise UserError(f"{len(missing)} splits are missing, first {missing[0].name} in {splits}; make them:\n{how}")
    else:
        submit(request)
