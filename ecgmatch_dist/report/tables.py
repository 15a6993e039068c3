"""Tables as data: the content of each cell, the runs behind it, and the paper's value beside it. `formats.py` writes them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np

from ecgmatch_dist.report import display, paper
from ecgmatch_dist.report.paper import Value
from ecgmatch_dist.report.run_files import SplitSizes
from ecgmatch_dist.report.runs import FinishedRun
from ecgmatch_dist.report.studies import Column, Row, Study

MISSING = "–"
RunValue = Callable[[FinishedRun], float | None]
"""A run's value of some metric; None where it is not known."""
PaperValue = Callable[[Row], Value | None]
"""The paper's value for a row; None where it has none."""


@dataclass(frozen=True)
class Cell:
    """A text, the number behind it, and its runs."""

    text: str
    kind: Literal["label", "value", "paper", "difference", "missing", "text"] = "text"
    value: float | None = None
    std: float | None = None
    bold: bool = False
    runs: tuple[FinishedRun, ...] = ()
    missing_seeds: tuple[int, ...] = ()
    """Seeds that other rows of the column have."""
    runs_below: bool = False
    """The page lists the runs under the table instead of in the cell."""

    @property
    def folders(self) -> tuple[Path, ...]:
        return tuple(run.folder for run in self.runs)


@dataclass(frozen=True)
class Block:
    """One metric of a table, or its only part. The first column names the row."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True)
class Table:
    """Blocks with the same rows."""

    key: str
    title: str
    note: str
    blocks: tuple[Block, ...]

    @cached_property
    def run_lists(self) -> dict[tuple[Path, ...], tuple[str, tuple[FinishedRun, ...]]]:
        """The lists of runs under the table: folders -> (anchor on the page, runs)."""
        cells = (cell for block in self.blocks for row in block.rows for cell in row)
        found = {cell.folders: cell.runs for cell in cells if cell.runs_below and len(cell.runs) > 1}
        return {folders: (f"{self.key}-from-{i}", runs) for i, (folders, runs) in enumerate(found.items())}


@dataclass(frozen=True)
class Heading:
    """A column of results: one metric on one test set."""

    label: str
    greater_is_better: bool
    column: Column
    value: RunValue
    paper: PaperValue


def text_table(
    key: str, title: str, note: str, blocks: Iterable[tuple[str, list[str], list[list[str | Cell]]]]
) -> Table:
    """A table of blocks (title, header, rows). Texts become cells, the first of a row its label."""

    def to_cells(row: list[str | Cell]) -> tuple[Cell, ...]:
        return tuple(c if isinstance(c, Cell) else Cell(c, "text" if i else "label") for i, c in enumerate(row))

    made = tuple(Block(name, tuple(header), tuple(map(to_cells, rows))) for name, header, rows in blocks)
    return Table(key, title, note, made)


def results_table(study: Study, split_sizes: SplitSizes) -> Table:
    """The six test metrics, beside the paper's values on those columns whose setting is the paper's."""
    comparable = {column for column in study.columns if not paper.mismatch(study, column, split_sizes)}
    rows = study.rows
    if study.kind == "main" and comparable:  # also methods that only the paper has
        theirs = {row for _, _, row, _ in paper.table("main")} - {row.key for row in rows}
        rows = (*rows, *(Row(key, display.method(key)) for key in theirs))
        rows = tuple(sorted(rows, key=lambda row: display.method_sort_key(row.key)))

    def heading(label: str, metric: display.Metric, column: Column) -> Heading:
        def printed(row: Row) -> Value | None:
            return paper.value(study, column, row.key, metric.key) if column in comparable else None

        return Heading(label, metric.greater_is_better, column, lambda run: run.test.get(metric.key), printed)

    return Table(study.key, study.title, "", metric_blocks(study, rows, display.METRICS, heading))


def calibration_table(study: Study, value: Callable[[FinishedRun, str], float | None]) -> Table:
    """Calibration error and Brier score; `value`: of a run and a metric."""

    def heading(label: str, metric: display.Metric, column: Column) -> Heading:
        return Heading(label, metric.greater_is_better, column, lambda run: value(run, metric.key), no_paper_value)

    blocks = metric_blocks(study, study.rows, display.CALIBRATION, heading)
    return Table(f"calibration-{study.key}", study.title, "", blocks)


def per_class_table(study: Study, column: Column) -> Table:
    """Average precision and G-beta of each class on one column."""
    rows = [row for row in study.rows if study.runs(row, column)]

    def heading(metric: display.Metric, short: str) -> Heading:
        def value(run: FinishedRun) -> float | None:
            return getattr(run.test.per_class.get(short), metric.key, None)

        return Heading(short, metric.greater_is_better, column, value, no_paper_value)

    classes = study.column_runs(column)[0].classes
    blocks = [
        results_block(m.title, "Method", study, rows, [heading(m, short) for short in classes])
        for m in display.OF_CLASS
    ]
    key = display.slug(f"classes-{study.key}-{column.slug}")
    return Table(key, f"{study.title}: {column.label}", "", tuple(blocks))


def no_paper_value(row: Row) -> None:
    return None


def metric_blocks(
    study: Study,
    rows: Sequence[Row],
    metrics: Sequence[display.Metric],
    heading: Callable[[str, display.Metric, Column], Heading],
) -> tuple[Block, ...]:
    """One block per metric, with a column per database. A study of one database has one block with a column per metric."""
    corner = "Method" if study.kind == "main" else "Setting"
    if len(study.columns) == 1:
        column = study.columns[0]
        return (results_block(column.label, corner, study, rows, [heading(m.title, m, column) for m in metrics]),)
    return tuple(
        results_block(m.title, corner, study, rows, [heading(c.label, m, c) for c in study.columns]) for m in metrics
    )


def results_block(title: str, corner: str, study: Study, rows: Iterable[Row], headings: Sequence[Heading]) -> Block:
    """Our values, the best in bold. A heading with paper values gets two more columns: the paper's and the difference."""
    rows = tuple(row for row in rows if any(study.runs(row, h.column) or h.paper(row) for h in headings))
    has_paper = [any(heading.paper(row) for row in rows) for heading in headings]
    columns = [mark_best([results_cell(study, row, h) for row in rows], h.greater_is_better) for h in headings]
    lines = []
    for i, row in enumerate(rows):
        line = [Cell(row.label, "label")]
        for heading, column, with_paper in zip(headings, columns, has_paper, strict=True):
            line.append(column[i])
            if with_paper:
                line += paper_cells(column[i], heading.paper(row))
        lines.append(tuple(line))
    header = [corner]
    for heading, with_paper in zip(headings, has_paper, strict=True):
        header += [heading.label, "paper", "Δ"] if with_paper else [heading.label]
    return Block(title, tuple(header), tuple(lines))


def results_cell(study: Study, row: Row, heading: Heading) -> Cell:
    """Mean and standard deviation over the seeds of this row and column."""
    known = [(run, value) for run in study.runs(row, heading.column) if (value := heading.value(run)) is not None]
    seeds = {run.seed for run, _ in known}
    missing_seeds = tuple(seed for seed in study.seeds(heading.column) if seed not in seeds)
    ours = mean_and_std([value for _, value in known])
    if ours is None:
        has_runs = any(study.runs(row, column) for column in study.columns)
        return Cell(MISSING, "missing", missing_seeds=missing_seeds if has_runs else ())
    runs = tuple(run for run, _ in known)
    return Cell(str(ours), "value", ours.mean, ours.std, runs=runs, missing_seeds=missing_seeds)


def mean_and_std(values: Sequence[float]) -> Value | None:
    """Mean and sample standard deviation (n - 1) over seeds; one seed has no deviation."""
    if not values:
        return None
    return Value(float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else None)


def mark_best(cells: list[Cell], greater_is_better: bool) -> list[Cell]:
    """The best cells in bold, if there are at least two values.

    Values that round to the same are equally good. What is no rival does not compete."""
    rival = [not c.runs or any(display.competes(run.method) for run in c.runs) for c in cells]
    values = [round(c.value, 3) if c.value is not None and r else None for c, r in zip(cells, rival, strict=True)]
    known = [value for value in values if value is not None]
    if len(known) < 2:
        return cells
    best = max(known) if greater_is_better else min(known)
    return [replace(c, bold=value == best) for c, value in zip(cells, values, strict=True)]


def paper_cells(ours: Cell, theirs: Value | None) -> list[Cell]:
    """The paper's value, and ours minus it."""
    if theirs is None:
        return [Cell(MISSING, "paper"), Cell("", "difference")]
    printed = Cell(str(theirs), "paper", theirs.mean, theirs.std)
    if ours.value is None:
        return [printed, Cell("", "difference")]
    difference = ours.value - theirs.mean
    return [printed, Cell(signed(difference), "difference", difference, runs=ours.runs, runs_below=True)]


def signed(value: float) -> str:
    """+0.012, −0.012 or 0.000."""
    text = f"{value:+.3f}".replace("-", "−")
    return "0.000" if text[1:] == "0.000" else text


def excludes_zero(bounds: tuple[float, float]) -> bool:
    """Whether an interval excludes zero as it is printed: a bound that is shown as 0.000 does not."""
    return round(bounds[0], 3) > 0 or round(bounds[1], 3) < 0
