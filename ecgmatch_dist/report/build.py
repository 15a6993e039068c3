"""From a folder of runs to a folder with the report: read, assess, tabulate, draw, write."""

import json
import multiprocessing
import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from ecgmatch_dist.errors import UserError
from ecgmatch_dist.report import drawing, facts, render
from ecgmatch_dist.report.assess import Assessment, assess
from ecgmatch_dist.report.contents import Job, Section, sections
from ecgmatch_dist.report.page import Drawn, write_page
from ecgmatch_dist.report.runs import Damaged, Problem, Run, find_runs
from ecgmatch_dist.report.studies import find_studies

MANIFEST = "files.txt"
"""Names what a report wrote, so that the next one in the same folder can clear it away and nothing else."""
PARALLEL_FROM = 12
"""Runs from which a second process is worth its start."""
T = TypeVar("T")


def build_report(runs: Path, out: Path, bench: Path | None = None, replicates: int = 0, workers: int = 0) -> Path:
    """Write the report on all runs under `runs` into `out`; return its page. `replicates`, `workers`: 0 chooses."""
    if not runs.is_dir():
        raise UserError(f"{runs}: no such folder; give the folder that `ecgmatch train` wrote its runs to")
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file: give --out the name of a folder")
    found, problems = find_runs(runs, out)
    if not found and not problems:
        raise UserError(f"{runs}: no run folder in it; `ecgmatch train` makes them")
    costs = read_bench(bench) if bench else {}
    prepare(out)
    sizes = facts.split_sizes(found, problems)
    replicates = replicates or affordable(found, sizes)
    with Workers(workers or (min(2, os.cpu_count() or 1) if len(found) >= PARALLEL_FROM else 1)) as pool:
        groups: dict[str, list[Run]] = defaultdict(list)
        for run in found:
            groups[run.split_sha256].append(run)
        parts = pool.map(assess, [(group, replicates) for group in groups.values()])
        assessed = {folder: assessment for part in parts for folder, assessment in part.items()}
        problems += doubts(found, assessed)
        used = [run for run in found if not assessed[str(run.folder)].doubt]
        studies = find_studies(used)
        chapters = sections(studies, sizes, assessed, replicates, costs)
        jobs = [job for chapter in chapters for part in chapter.parts for job in part.figures]
        drawn = pool.map(draw, [(job, out / "figures") for job in jobs])
    problems += [Problem(runs, "incomplete", f"figure {d.key}: {d.problem}") for d in drawn if d.problem]
    header = facts.gather(used, studies, sizes, assessed) if used else None
    files = write_tables(chapters, out)
    files += [f"figures/{d.key}.{kind}" for d in drawn if d.svg for kind in ("svg", "png")]
    page = write_page(out, runs, header, chapters, {d.key: d for d in drawn}, used, problems)
    (out / MANIFEST).write_text("\n".join([page.name, *files]) + "\n", encoding="utf-8")
    return page


def affordable(runs: Sequence[Run], sizes: facts.Sizes) -> int:
    """Resamples: a thousand, fewer where the test parts of all runs together are large, never below two hundred."""
    tested = sum(part["test"] for run in runs for part in sizes[run.split_sha256].values())
    return int(np.clip(400_000_000 // max(tested, 1), 200, 1000))


def doubts(runs: Sequence[Run], assessed: dict[str, Assessment]) -> list[Problem]:
    """Runs whose predictions contradict their result (left out), or cannot be read."""
    problems = []
    for run in runs:
        assessment = assessed[str(run.folder)]
        if assessment.doubt:
            problems.append(Problem(run.folder, "damaged", assessment.doubt))
        elif assessment.unreadable and (run.folder / "predictions" / "test.npz").exists():
            reason = f"{assessment.unreadable}; its test metrics are used, intervals and calibration are not known"
            problems.append(Problem(run.folder, "incomplete", reason))
    return problems


class Workers:
    """Processes that share the work; with one, or where none can be started, this process does it."""

    def __init__(self, number: int) -> None:
        self.pool = (
            # One computing thread each: two processes that both use all cores wait for each other.
            ProcessPoolExecutor(number, multiprocessing.get_context("spawn"), threadpool_limits, (1,))
            if number > 1
            else None
        )

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *error: object) -> None:
        if self.pool:
            self.pool.shutdown(cancel_futures=True)

    def map(self, function: Callable[..., T], arguments: list[tuple[Any, ...]]) -> list[T]:
        """`function(*a)` of all arguments, in order."""
        if self.pool:
            try:
                return [task.result() for task in [self.pool.submit(function, *a) for a in arguments]]
            except BrokenProcessPool:  # a script without `if __name__ == "__main__"`, or no memory for more processes
                self.pool = None
        return [function(*a) for a in arguments]


def draw(job: Job, folder: Path) -> Drawn:
    """Draw one figure and save it; a run's damaged file costs its figure, not the report."""
    try:
        with drawing.style():
            figure = job.function(*job.arguments)
    except Damaged as error:
        return Drawn(job.key, "", str(error))
    return Drawn(job.key, drawing.save(figure, folder / job.key) if figure else "", "")


def prepare(out: Path) -> None:
    """Make the folders, and remove what an earlier report wrote here."""
    try:
        for folder in (out, out / "tables", out / "figures"):
            folder.mkdir(parents=True, exist_ok=True)
        old = (out / MANIFEST).read_text(encoding="utf-8").splitlines() if (out / MANIFEST).is_file() else []
        for name in old:
            if Path(name).parent.as_posix() in (".", "tables", "figures"):
                (out / name).unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"{out} cannot be written: {error.strerror}; give --out another folder") from None


def write_tables(chapters: Sequence[Section], out: Path) -> list[str]:
    """Every table in three formats, and a LaTeX document of all."""
    tables = [table for chapter in chapters for part in chapter.parts for table in part.tables]
    files = {f"{table.key}.{kind}": make(table) for table in tables for kind, make in FORMATS.items()}
    if tables:
        files["all.tex"] = render.latex_document(f"{table.key}.tex" for table in tables)
    for name, text in files.items():
        (out / "tables" / name).write_text(text, encoding="utf-8")
    return [f"tables/{name}" for name in files]


FORMATS = {"md": render.markdown, "csv": render.comma, "tex": render.latex}


def read_bench(path: Path) -> dict[str, list[tuple[int, float]]]:
    """Traffic against world size, as `ecgmatch bench scale --json` counted it: way and bank size -> (ranks, bytes)."""
    try:
        series: dict[str, list[tuple[int, float]]] = defaultdict(list)
        for row in json.loads(path.read_text(encoding="utf-8"))["bytes"]:
            if int(row["ranks"]) > 1:  # one rank receives nothing
                way = str(row["way"]).split(" of ")[0]  # "... in 2 nodes of 4": the nodes grow with the ranks
                series[f"{way}, {int(row['rows']):,} rows"].append((int(row["ranks"]), float(row["counted"])))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: not a file of `ecgmatch bench scale --json` ({error!r})") from None
    return dict(series)
