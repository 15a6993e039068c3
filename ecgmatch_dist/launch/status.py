"""`ecgmatch status`, `logs`, `cancel`: the runs of a submitted sweep, from Slurm and from the run folders."""

import json
import statistics
import subprocess
import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table

from ecgmatch_dist.errors import UserError
from ecgmatch_dist.files.plain import plain_markup
from ecgmatch_dist.launch import slurm
from ecgmatch_dist.launch.submissions import finished, latest_submissions, read_submissions, sweep_folder
from ecgmatch_dist.launch.sweep_plan import read_plan
from ecgmatch_dist.record.metrics_file import read_latest
from ecgmatch_dist.terminal.waiting import track


@dataclass(frozen=True)
class StatusRow:
    """One run in the table."""

    name: str
    state: str
    node: str = ""
    job: str = ""
    step: int = 0
    steps: int = 0
    best: float | None = None
    left: float | None = None
    """Seconds until the last step, at the current speed."""
    restarts: int = 0
    error: str = ""


def progress(folder: Path) -> tuple[int, float | None, float | None]:
    """Step, best validation MAP so far and seconds per step, from the end of metrics.jsonl and the checkpoints."""
    step, seconds, best = 0, [], -1.0
    for line in read_latest(folder):
        step = line.step
        seconds += [line.values["time/step"]] if "time/step" in line.values else []
        best = max(best, line.values.get("map", best))
    for state in folder.glob("checkpoints/step-*/state.json"):
        with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):  # it is just removed, or damaged
            best = max(best, float(json.loads(state.read_text(encoding="utf-8"))["counters"]["best"]["map"]))
    return step, best if best >= 0 else None, statistics.median(seconds) if seconds else None


def state_of(
    name: str, runs: Path, job: str, live: dict[str, slurm.SlurmJob], gone: dict[str, slurm.SlurmJob]
) -> tuple[str, str]:
    """State and node: "finished" by the run folder, else by the queue (`live`), else by the accounting (`gone`)."""
    if finished(runs, name):
        return "finished", gone[job].nodes if job in gone else ""
    if job in live:
        now = live[job]
        waits = "" if now.state == "RUNNING" or now.reason == "None" else f" ({now.reason})"
        return now.state.lower() + waits, now.nodes
    if job in gone:
        return f"failed ({gone[job].state.lower()})", gone[job].nodes
    return ("ended" if job else "not submitted"), ""


def collect(sweep: str, runs: Path, bar: bool = True) -> list[StatusRow]:
    """One row per run of the sweep. `bar`: shown if it takes long; not beside a table that is updated."""
    plan = read_plan(sweep, runs)
    submissions = latest_submissions(runs)
    ids = {submission.job for submission in submissions.values() if submission.cluster == "slurm"}
    live = {name: job for name, job in slurm.queue().items() if name in ids} if ids and slurm.available() else {}
    gone = slurm.accounting(ids - live.keys())
    for submission in submissions.values():
        if submission.is_running_here():
            live[submission.job] = slurm.SlurmJob(submission.job, "RUNNING", "here", "None")
    rows = []
    for entry in track(plan, "read runs", len(plan)) if bar else plan:
        name, steps = entry.run, entry.most_steps
        latest = submissions.get(name)
        job = latest.job if latest else ""
        state, node = state_of(name, runs, job, live, gone)
        step, best, seconds = progress(runs / name)
        running = state == "running"
        generations = len(list((runs / name).glob("generations/*.jsonl")))
        error = latest.last_error() if latest and state.startswith(("failed", "ended")) else ""
        left = (steps - step) * seconds if running and seconds else None
        rows.append(StatusRow(name, state, node, job, step, steps, best, left, max(0, generations - 1), error))
    return rows


def show(rows: list[StatusRow], title: str) -> Table:
    counts: dict[str, int] = defaultdict(int)
    for row in rows:
        counts[row.state.split(" (")[0]] += 1
    summary = ", ".join(f"{n} {state}" for state, n in sorted(counts.items()))
    table = Table(
        title=plain_markup(f"{title}: {summary}"), title_justify="left", box=box.SIMPLE_HEAD, collapse_padding=True
    )
    columns = {
        "run": [row.name for row in rows],
        "state": [row.state for row in rows],
        "job": [row.job for row in rows],
        "node": [row.node for row in rows],
        "step": [f"{row.step}/{row.steps}" for row in rows],
        "best MAP": ["" if row.best is None else f"{row.best:.4f}" for row in rows],
        "left": ["" if row.left is None else duration(row.left) for row in rows],
        "restarts": [str(row.restarts or "") for row in rows],
        "last error": [row.error for row in rows],
    }
    columns = {name: cells for name, cells in columns.items() if any(cells)}  # save width
    for name in columns:
        least = {"run": 16, "state": 9, "last error": 20}.get(name)
        right = name in ("step", "best MAP", "left", "restarts")
        table.add_column(
            name, justify="right" if right else "left", overflow="fold", min_width=least, no_wrap=least is None
        )
    for cells in zip(*columns.values(), strict=True):
        table.add_row(*map(plain_markup, cells))
    return table


def duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{seconds:.0f} s" if seconds < 60 else f"{minutes} min" if minutes < 120 else f"{minutes / 60:.1f} h"


def main(
    sweep: tyro.conf.Positional[str],
    /,
    runs: Path = Path("runs"),
    watch: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    every: float = 5.0,
) -> None:
    """A sweep's runs: state, node, step, best MAP, time left, restarts, last error.

    Args:
        sweep: Name of a submitted sweep, or its file.
        runs: Folder of runs that it was submitted into.
        watch: Update the table until no run is pending or running.
        every: Seconds between updates.
    """
    name = Path(sweep).stem
    rows = collect(name, runs)
    if not watch:
        Console().print(show(rows, name))
        return
    with Live(show(rows, name), auto_refresh=False) as live:
        while any(row.state.startswith(("pending", "running", "completing", "configuring", "requeue")) for row in rows):
            time.sleep(every)
            rows = collect(name, runs, bar=False)
            live.update(show(rows, name), refresh=True)


def logs(
    run: tyro.conf.Positional[str],
    /,
    runs: Path = Path("runs"),
    lines: int = 40,
    follow: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
) -> None:
    """The end of a run's log and of the output of its latest job.

    Args:
        run: Name of the run.
        runs: Folder of runs.
        lines: Lines per file.
        follow: Show new lines as they come, also across restarts, until Ctrl-C.
    """
    files = [runs / run / "log.txt"]
    if latest := latest_submissions(runs).get(run):
        files += latest.output_files()
    if not any(path.is_file() for path in files):
        raise UserError(f"{runs}: no run `{run}` here; `ecgmatch status SWEEP` lists names")
    if follow:
        with suppress(KeyboardInterrupt):  # -F: a restart replaces log.txt by a new file
            subprocess.call(["tail", "-n", str(lines), "-F", *map(str, files)])
        return
    for path in files:
        if path.is_file() and path.stat().st_size:
            print(f"==> {path} <==")
            print("\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:]))


def cancel(sweep: tyro.conf.Positional[str], /, runs: Path = Path("runs")) -> None:
    """Cancel the pending and running jobs of a sweep. Runs keep their checkpoints; `ecgmatch sweep` resumes them.

    Args:
        sweep: Name of a submitted sweep, or its file.
        runs: Folder of runs that it was submitted into.
    """
    name = Path(sweep).stem
    read_plan(name, runs)  # refuses a sweep that was not submitted here
    submitted = {s.job: s.run for s in read_submissions(sweep_folder(runs, name)) if s.cluster == "slurm"}
    jobs = slurm.alive_among(submitted)
    slurm.cancel(jobs)
    print(f"{len(jobs)} jobs cancelled" + "".join(f"\n  {job}  {submitted[job]}" for job in sorted(jobs)))
