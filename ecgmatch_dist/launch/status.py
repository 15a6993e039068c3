"""`ecgmatch status`, `logs`, `cancel`, `choose`: a sweep's runs, as Slurm and the run folders know them."""

import json
import statistics
import subprocess
import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table

from ecgmatch_dist.errors import UserError
from ecgmatch_dist.launch import slurm
from ecgmatch_dist.launch.submissions import at_work_here, finished, folder_of, latest, read_records
from ecgmatch_dist.launch.sweep import last_line

TAIL = 65536  # bytes at the end of metrics.jsonl that are read


@dataclass(frozen=True)
class Row:
    """A run in the table."""

    name: str
    state: str
    node: str = ""
    job: str = ""
    step: int = 0
    steps: int = 0
    best: float | None = None
    left: float | None = None
    """Seconds until the last step, at the present speed."""
    restarts: int = 0
    error: str = ""


def read_plan(sweep: str, runs: Path) -> list[dict[str, Any]]:
    """The runs of a sweep that was submitted into `runs`."""
    path = folder_of(runs, Path(sweep).stem) / "plan.json"
    if not path.is_file():
        known = sorted(p.parent.name for p in runs.glob("sweeps/*/plan.json"))
        raise UserError(
            f"{runs}: no sweep `{Path(sweep).stem}` was submitted here; known are {', '.join(known) or 'none'}"
        )
    plan: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return plan


def progress(folder: Path) -> tuple[int, float | None, float | None]:
    """Step, best validation MAP so far and seconds a step, from the end of metrics.jsonl and the latest checkpoint."""
    step, seconds, best = 0, [], -1.0
    path = folder / "metrics.jsonl"
    if path.is_file():
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL))
            lines = file.read().decode("utf-8", errors="replace").splitlines()
        for line in lines:
            try:
                record = json.loads(line)
            except ValueError:  # the first line is cut, the last one may be
                continue
            step = record["step"]
            if record["kind"] == "train":
                seconds.append(float(record["time/step"]))
            else:
                best = max(best, record["map"])
    for state in folder.glob("checkpoints/step-*/state.json"):
        with suppress(OSError, ValueError, KeyError):  # the run removes old ones at any moment, and one may be damaged
            best = max(best, json.loads(state.read_text(encoding="utf-8"))["counters"]["best"]["map"])
    return step, best if best >= 0 else None, statistics.median(seconds) if seconds else None


def state_of(
    name: str, runs: Path, job: str, live: dict[str, slurm.Job], gone: dict[str, slurm.Job]
) -> tuple[str, str]:
    """State and node. The run folder knows best what is finished, the queue what is at work, the accounting the rest."""
    if finished(runs, name):
        return "finished", gone[job].nodes if job in gone else ""
    if job in live:
        now = live[job]
        waits = "" if now.state == "RUNNING" or now.reason == "None" else f" ({now.reason})"
        return now.state.lower() + waits, now.nodes
    if job in gone:
        return f"failed ({gone[job].state.lower()})", gone[job].nodes
    return ("ended" if job else "not submitted"), ""


def collect(sweep: str, runs: Path) -> list[Row]:
    """One row for each run of the sweep."""
    plan = read_plan(sweep, runs)
    records = latest(runs)
    ids = {r["job"] for r in records.values() if r["cluster"] == "slurm"}
    live = {name: job for name, job in slurm.queue().items() if name in ids} if ids and slurm.available() else {}
    gone = slurm.accounted(ids - live.keys())
    for record in records.values():  # a sweep on this machine: its jobs are processes
        if at_work_here(record):
            live[record["job"]] = slurm.Job(record["job"], "RUNNING", "here", "None")
    rows = []
    for entry in plan:
        name, steps = entry["run"], entry["config"]["optim"]["steps"]
        record = records.get(name, {})
        job = record.get("job", "")
        state, node = state_of(name, runs, job, live, gone)
        step, best, seconds = progress(runs / name)
        running = state == "running"
        generations = len(list((runs / name).glob("generations/*.jsonl")))
        failed = state.startswith(("failed", "ended"))
        error = last_line(Path(record["folder"]) / f"{job}_0_log.err", name) if failed else ""
        left = (steps - step) * seconds if running and seconds else None
        rows.append(Row(name, state, node, job, step, steps, best, left, max(0, generations - 1), error))
    return rows


def show(rows: list[Row], title: str) -> Table:
    counts: dict[str, int] = defaultdict(int)
    for row in rows:
        counts[row.state.split(" (")[0]] += 1
    summary = ", ".join(f"{n} {state}" for state, n in sorted(counts.items()))
    table = Table(title=f"{title}: {summary}", title_justify="left", box=box.SIMPLE_HEAD, collapse_padding=True)
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
    columns = {name: cells for name, cells in columns.items() if any(cells)}  # terminals are narrow
    for name in columns:
        least = {"run": 16, "state": 9, "last error": 20}.get(name)
        right = name in ("step", "best MAP", "left", "restarts")
        table.add_column(
            name, justify="right" if right else "left", overflow="fold", min_width=least, no_wrap=least is None
        )
    for cells in zip(*columns.values(), strict=True):
        table.add_row(*cells)
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
        watch: Go on until no run waits or runs.
        every: Seconds between looks.
    """
    name = Path(sweep).stem
    rows = collect(sweep, runs)
    if not watch:
        Console().print(show(rows, name))
        return
    with Live(show(rows, name), auto_refresh=False) as live:
        while any(row.state.startswith(("pending", "running", "completing", "configuring", "requeue")) for row in rows):
            time.sleep(every)
            rows = collect(sweep, runs)
            live.update(show(rows, name), refresh=True)


def logs(
    run: tyro.conf.Positional[str],
    /,
    runs: Path = Path("runs"),
    lines: int = 40,
    follow: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
) -> None:
    """The end of a run's log, and of what its latest job wrote.

    Args:
        run: Name of the run.
        runs: Folder of runs.
        lines: How many of each.
        follow: Go on with what is added, also across restarts, until Ctrl-C.
    """
    files = [runs / run / "log.txt"]
    if last := latest(runs).get(run):
        files += sorted(Path(last["folder"]).glob(f"{last['job']}_*_log.*"))
    if not any(path.is_file() for path in files):
        raise UserError(f"{runs}: no run `{run}` here; `ecgmatch status SWEEP` lists names")
    if follow:
        with suppress(KeyboardInterrupt):  # -F: a restarted run's log is another file of the same name
            subprocess.call(["tail", "-n", str(lines), "-F", *map(str, files)])
        return
    for path in files:
        if path.is_file() and path.stat().st_size:
            print(f"==> {path} <==")
            print("\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:]))


def cancel(sweep: tyro.conf.Positional[str], /, runs: Path = Path("runs")) -> None:
    """End the jobs of a sweep that wait or run. Runs keep what they have; `ecgmatch sweep` takes them up again.

    Args:
        sweep: Name of a submitted sweep, or its file.
        runs: Folder of runs that it was submitted into.
    """
    read_plan(sweep, runs)
    mine = {r["job"]: r["run"] for r in read_records(folder_of(runs, Path(sweep).stem)) if r["cluster"] == "slurm"}
    jobs = slurm.living(mine)
    slurm.cancel(jobs)
    print(f"{len(jobs)} jobs cancelled" + "".join(f"\n  {job}  {mine[job]}" for job in sorted(jobs)))


def choose(sweep: tyro.conf.Positional[str], /, runs: Path = Path("runs")) -> None:
    """The settings of a sweep by their mean validation MAP over its splits; test results are not looked at.

    Args:
        sweep: Name of a submitted sweep, or its file.
        runs: Folder of runs that it was submitted into.
    """
    values: dict[tuple[str, str], list[float]] = defaultdict(list)
    missing = 0
    for entry in read_plan(sweep, runs):
        config, path = entry["config"], runs / entry["run"] / "result.json"
        if not path.is_file():
            missing += 1
            continue
        result = json.loads(path.read_text(encoding="utf-8"))
        values[config["method"]["name"], config["tag"]].append(result["validation"]["map"])
    if not values:
        raise UserError(f"{runs}: no run of the sweep {Path(sweep).stem} is finished")
    most = max(map(len, values.values()))
    ranked = sorted(values.items(), key=lambda item: (-len(item[1]), -statistics.mean(item[1])))
    table = Table(title=f"{Path(sweep).stem}: mean validation MAP", title_justify="left")
    for name in ("method", "settings", "MAP", "runs"):
        table.add_column(name, justify="right" if name in ("MAP", "runs") else "left")
    for (method, tag), scores in ranked:
        note = "" if len(scores) == most else f" of {most}"
        table.add_row(method, tag or "(as they are)", f"{statistics.mean(scores):.4f}", f"{len(scores)}{note}")
    Console().print(table)
    if missing:
        print(f"{missing} runs are not finished: only settings with all {most} splits can be compared")
