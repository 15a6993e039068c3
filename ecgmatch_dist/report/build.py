"""From a folder of runs to a folder with the report: read, assess, tabulate, draw, write."""

import json
import multiprocessing
import os
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from ecgmatch_dist.config import methods
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.files.atomic import naming, write_text
from ecgmatch_dist.report import display, drawing, formats
from ecgmatch_dist.report.arrange import find_studies
from ecgmatch_dist.report.assess import Assessments, assess
from ecgmatch_dist.report.claims import claims_table
from ecgmatch_dist.report.header import make_header
from ecgmatch_dist.report.page import DrawnFigure, write_page
from ecgmatch_dist.report.run_files import SplitSizes, split_sizes
from ecgmatch_dist.report.runs import FinishedRun, Problem, find_runs, with_trees
from ecgmatch_dist.report.sections import CLAIMS_INTRO, FigureTask, Part, Section, make_sections
from ecgmatch_dist.terminal.waiting import track

MANIFEST = "files.txt"
"""Lists the files of a report, so that the next one in the same folder removes them and nothing else."""
WRITTEN = re.compile(r"index\.html|tables/[^/]+\.(md|csv|tex)|figures/[^/]+\.(svg|png)")
"""What a report writes. The list may be somebody's own, of files that are his own."""
PARALLEL_FROM = 12
"""With fewer runs, starting a second process takes longer than it saves."""
FORMATS = {"md": formats.to_markdown, "csv": formats.to_csv, "tex": formats.to_latex}
T = TypeVar("T")


def build_report(
    runs: Path,
    out: Path,
    bench: Path | None = None,
    replicates: int = 0,
    workers: int = 0,
    also_rank: Sequence[str] = (),
    check_claims: bool = False,
) -> Path:
    """Write the report on all runs under `runs` into `out`; return its page. `replicates`, `workers`: 0 for automatic.

    `also_rank`: methods to rank beside the paper's. `check_claims`: judge the paper's claims by these runs."""
    if unknown := [name for name in also_rank if name not in methods()]:
        raise UserError(f"--rank {unknown[0]}: known methods are {', '.join(methods())}")
    if probes := list(filter(display.is_probe, also_rank)):
        raise UserError(f"--rank {probes[0]}: its results are a linear probe of a start, not a rival; leave it out")
    if not runs.is_dir():
        raise UserError(f"{runs}: no such folder; give the folder that `ecgmatch train` wrote its runs to")
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file: give --out the name of a folder")
    found, problems = find_runs(runs, out)
    refuse_an_empty_report(runs, out, found, problems)
    costs = read_bench(bench) if bench else {}
    old = prepare_folder(out)
    sizes = split_sizes(found, problems)
    replicates = replicates or choose_replicates(found, sizes)
    with Workers(workers or (min(2, os.cpu_count() or 1) if len(found) >= PARALLEL_FROM else 1)) as pool:
        groups: dict[str, list[FinishedRun]] = defaultdict(list)
        answers = with_trees(found, problems)
        for run in (*found, *answers):
            groups[run.split_sha256].append(run)
        by_split = pool.map(assess, [(group, replicates) for group in groups.values()], "intervals")
        assessed = {folder: assessment for part in by_split for folder, assessment in part.items()}
        problems += prediction_problems([*found, *answers], assessed)
        answers = [run for run in answers if not assessed[str(run.folder)].contradiction]
        used = [run for run in found if not assessed[str(run.folder)].contradiction]
        studies = find_studies(used)
        sections = make_sections(studies, sizes, assessed, replicates, costs, also_rank, answers)
        if check_claims:
            table = claims_table(studies, assessed, {run.name: run for run in used})
            sections.insert(0, Section("claims", "The paper's claims", CLAIMS_INTRO, [Part("", [table])]))
        tasks = [task for section in sections for part in section.parts for task in part.figures]
        tables = make_tables(sections)
        coming = [f"figures/{task.key}.{kind}" for task in tasks for kind in ("svg", "png")]
        # The next report removes what a killed one has left.
        write_text(out / MANIFEST, "\n".join(sorted({*old, *coming, *tables})) + "\n")
        with naming(out):
            drawn = pool.map(draw, [(task, out / "figures") for task in tasks], "figures")
            for name, text in tables.items():
                (out / name).write_text(text, encoding="utf-8")
    problems += [Problem(runs, "incomplete", f"figure {d.key}: {d.problem}") for d in drawn if d.problem]
    header = make_header(used, studies, sizes, assessed) if used else None
    files = [*tables, *(f"figures/{d.key}.{kind}" for d in drawn if d.svg for kind in ("svg", "png"))]
    page = write_page(out, runs, header, sections, {d.key: d for d in drawn}, used, problems)
    for name in {*old, *coming} - {page.name, *files}:
        (out / name).unlink(missing_ok=True)
    write_text(out / MANIFEST, "\n".join([page.name, *files]) + "\n")
    return page


def refuse_an_empty_report(runs: Path, out: Path, found: Sequence[FinishedRun], problems: Sequence[Problem]) -> None:
    """A mistyped folder must not replace a report. Where all runs are unfinished, a page may say so if none is there yet."""
    if found:
        return
    if all(problem.kind == "foreign" for problem in problems):
        raise UserError(f"{runs}: no run folder in it; give the folder that `ecgmatch train` wrote its runs to")
    if (out / MANIFEST).exists():
        first = problems[0]
        raise UserError(
            f"{runs}: no finished run in it, and {out} holds a report, which stays as it is; first of {len(problems)} "
            f"problems: {first.folder.name}: {first.reason}"
        )


def choose_replicates(runs: Sequence[FinishedRun], sizes: SplitSizes) -> int:
    """A thousand resamples; fewer for many runs, or many test recordings over all runs, but at least two hundred."""
    tested = sum(part["test"] for run in runs for part in sizes[run.split_sha256].values())
    return int(np.clip(min(400_000_000 // max(tested, 1), 1_000_000 // max(len(runs), 1)), 200, 1000))


def prediction_problems(runs: Sequence[FinishedRun], assessed: Assessments) -> list[Problem]:
    """Runs whose predictions contradict their result (left out), or cannot be read."""
    problems = []
    for run in runs:
        assessment = assessed[str(run.folder)]
        if assessment.contradiction:
            problems.append(Problem(run.folder, "damaged", assessment.contradiction))
        elif assessment.unreadable and (run.folder / "predictions" / "test.npz").exists():
            reason = f"{assessment.unreadable}; its test metrics are used, intervals and calibration are left out"
            problems.append(Problem(run.folder, "incomplete", reason))
    return problems


class Workers:
    """A pool of processes. With one, or where none can be started, this process does the work."""

    def __init__(self, number: int) -> None:
        self.pool = (
            # One thread per process: two processes that both use all cores slow each other down.
            ProcessPoolExecutor(number, multiprocessing.get_context("spawn"), threadpool_limits, (1,))
            if number > 1
            else None
        )

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *error: object) -> None:
        if self.pool:
            self.pool.shutdown(cancel_futures=True)

    def map(self, function: Callable[..., T], arguments: list[tuple[Any, ...]], what: str) -> list[T]:
        """`function(*a)` of all arguments, in order; a bar tells how many of `what` are done."""
        if self.pool:
            try:
                tasks = [self.pool.submit(function, *a) for a in arguments]
                return [task.result() for task in track(tasks, what, len(tasks))]
            except BrokenProcessPool:  # a script without `if __name__ == "__main__"`, or no memory for more processes
                self.pool = None
        return [function(*a) for a in track(arguments, what, len(arguments))]


def draw(task: FigureTask, folder: Path) -> DrawnFigure:
    """Draw and save one figure. A damaged file of a run loses the figure, not the report."""
    try:
        with drawing.style():
            figure = task.function(*task.arguments)
    except UserError as error:
        return DrawnFigure(task.key, "", str(error))
    return DrawnFigure(task.key, drawing.save(figure, folder / task.key) if figure else "", "")


def prepare_folder(out: Path) -> list[str]:
    """Make the folders. Returns the files of an earlier report, which stays until the new one is there."""
    try:
        for folder in (out, out / "tables", out / "figures"):
            folder.mkdir(parents=True, exist_ok=True)
        listed = (out / MANIFEST).read_text(encoding="utf-8", errors="replace") if (out / MANIFEST).is_file() else ""
        probe = out / f".{MANIFEST}"  # before the work of minutes
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(f"{out} cannot be written: {error.strerror}; give --out another folder") from None
    return [name for name in listed.splitlines() if WRITTEN.fullmatch(name)]


def make_tables(sections: Sequence[Section]) -> dict[str, str]:
    """Every table in three formats, and a LaTeX document of all: file -> text."""
    tables = [table for section in sections for part in section.parts for table in part.tables]
    files = {f"tables/{table.key}.{suffix}": render(table) for table in tables for suffix, render in FORMATS.items()}
    if tables:
        files["tables/all.tex"] = formats.latex_document(f"{table.key}.tex" for table in tables)
    return files


def read_bench(path: Path) -> dict[str, list[tuple[int, float]]]:
    """Bytes by number of ranks from `ecgmatch bench scale --json`: placement and bank size -> [(ranks, bytes), ...]."""
    try:
        series: dict[str, list[tuple[int, float]]] = defaultdict(list)
        for row in json.loads(path.read_text(encoding="utf-8"))["bytes"]:
            if int(row["ranks"]) > 1:  # one rank receives nothing
                way = str(row["way"]).split(" of ")[0]  # "... in 2 nodes of 4": the nodes grow with the ranks
                series[f"{way}, {int(row['rows']):,} rows"].append((int(row["ranks"]), float(row["counted"])))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: not a file of `ecgmatch bench scale --json` ({error!r})") from None
    return dict(series)
