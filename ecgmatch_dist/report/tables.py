"""Tables as data: what stands in each cell, which runs it comes from, what the paper has there. Rendering is `render.py`'s."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np

from ecgmatch_dist.report import names, published
from ecgmatch_dist.report.published import Value
from ecgmatch_dist.report.runs import Run
from ecgmatch_dist.report.studies import STUDIES, Column, Row, Study

MISSING = "–"
Lookup = Callable[[Run, str], float | None]
"""(run, metric) -> its value; None where it is not known."""


@dataclass(frozen=True)
class Cell:
    """A text, the number behind it, and where it comes from."""

    text: str
    kind: Literal["label", "value", "paper", "difference", "missing", "text"] = "text"
    value: float | None = None
    std: float | None = None
    strong: bool = False
    runs: tuple[Run, ...] = ()
    lacking: tuple[int, ...] = ()
    """Seeds that other rows of the column have."""
    listed: bool = False
    """Made from all its runs together: the page names them under the table, not in the cell."""

    @property
    def folders(self) -> tuple[Path, ...]:
        return tuple(run.folder for run in self.runs)


@dataclass(frozen=True)
class Block:
    """One metric of a table, or the only part of it. The first column names the row."""

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
    def sources(self) -> dict[tuple[Path, ...], tuple[str, tuple[Run, ...]]]:
        """The sets of runs behind listed cells: an anchor of the page, and the runs."""
        cells = (cell for block in self.blocks for row in block.rows for cell in row)
        found = {cell.folders: cell.runs for cell in cells if cell.listed and len(cell.runs) > 1}
        return {folders: (f"{self.key}-from-{i}", runs) for i, (folders, runs) in enumerate(found.items())}


@dataclass(frozen=True)
class Heading:
    """A column of results: its name, the direction of its metric, how to find its value and the paper's."""

    label: str
    greater_is_better: bool
    column: Column
    value: Callable[[Run], float | None]
    paper: Callable[[Row], Value | None]


def summary(values: Sequence[float]) -> Value | None:
    """Mean and sample standard deviation (n - 1) over seeds; one seed has no deviation."""
    if not values:
        return None
    return Value(float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else None)


def block(title: str, corner: str, study: Study, rows: Iterable[Row], headings: Sequence[Heading]) -> Block:
    """Cells of `rows` under `headings`, the best of ours strong, the paper's and the difference beside them."""
    rows = tuple(row for row in rows if any(study.runs(row, h.column) or h.paper(row) for h in headings))
    beside = [any(heading.paper(row) for row in rows) for heading in headings]
    columns = [strongest([cell(study, row, h) for row in rows], h.greater_is_better) for h in headings]
    lines = []
    for i, row in enumerate(rows):
        line = [Cell(row.label, "label")]
        for heading, column, with_paper in zip(headings, columns, beside, strict=True):
            line.append(column[i])
            if with_paper:
                line += paper_cells(column[i], heading.paper(row))
        lines.append(tuple(line))
    header = [corner]
    for heading, with_paper in zip(headings, beside, strict=True):
        header += [heading.label, "paper", "Δ"] if with_paper else [heading.label]
    return Block(title, tuple(header), tuple(lines))


def cell(study: Study, row: Row, heading: Heading) -> Cell:
    """Our value: over the runs of this row and column that have one."""
    have = [(run, value) for run in study.runs(row, heading.column) if (value := heading.value(run)) is not None]
    seeds = {run.seed for run, _ in have}
    lacking = tuple(seed for seed in study.seeds(heading.column) if seed not in seeds)
    ours = summary([value for _, value in have])
    if ours is None:
        ran = any(study.runs(row, column) for column in study.columns)
        return Cell(MISSING, "missing", lacking=lacking if ran else ())
    return Cell(str(ours), "value", ours.mean, ours.std, runs=tuple(run for run, _ in have), lacking=lacking)


def strongest(cells: list[Cell], greater_is_better: bool) -> list[Cell]:
    """The same cells, the best marked; nothing is best alone. What rounds to the same is equally good, and the upper bound,
    which knows all labels, does not compete."""
    bound = [bool(c.runs) and all(run.method == names.UPPER_BOUND for run in c.runs) for c in cells]
    values = [None if c.value is None or b else round(c.value, 3) for c, b in zip(cells, bound, strict=True)]
    known = [value for value in values if value is not None]
    if len(known) < 2:
        return cells
    best = max(known) if greater_is_better else min(known)
    return [replace(c, strong=value is not None and value == best) for c, value in zip(cells, values, strict=True)]


def paper_cells(ours: Cell, paper: Value | None) -> list[Cell]:
    if paper is None:
        return [Cell(MISSING, "paper"), Cell("", "difference")]
    beside = Cell(str(paper), "paper", paper.mean, paper.std)
    if ours.value is None:
        return [beside, Cell("", "difference")]
    difference = ours.value - paper.mean
    return [beside, Cell(signed(difference), "difference", difference, runs=ours.runs, listed=True)]


def signed(value: float) -> str:
    """+0.012, −0.012 or 0.000."""
    text = f"{value:+.3f}".replace("-", "−")
    return "0.000" if text[1:] == "0.000" else text


def results(
    study: Study, metrics: Sequence[names.Metric], value: Lookup, matches: Callable[[Column], bool], kind: str = ""
) -> Table:
    """One block a metric with a column a database; a study of one column has its metrics side by side instead."""
    rows = study.rows
    if not kind and study.kind == "main" and any(map(matches, study.columns)):
        ours = {row.key for row in rows}
        theirs = {row for _, _, row, _ in published.table("main")} - ours
        rows = tuple(
            sorted((*rows, *(Row(k, names.method(k)) for k in theirs)), key=lambda r: names.place(r.key, names.METHODS))
        )

    def heading(label: str, metric: names.Metric, column: Column) -> Heading:
        def paper(row: Row) -> Value | None:
            return published.value(study, column, row.key, metric.key) if not kind and matches(column) else None

        return Heading(label, metric.greater_is_better, column, lambda run: value(run, metric.key), paper)

    corner = "Method" if study.kind == "main" else "Setting"
    if len(study.columns) == 1:
        column = study.columns[0]
        blocks = [block(column.label, corner, study, rows, [heading(m.title, m, column) for m in metrics])]
    else:
        blocks = [block(m.title, corner, study, rows, [heading(c.label, m, c) for c in study.columns]) for m in metrics]
    return Table(f"{kind}{'-' * bool(kind)}{study.key}", study.title, "", tuple(blocks))


def per_class(study: Study, column: Column) -> Table:
    """Average precision and G-beta of each class on one column."""
    classes = next(run.classes for row in study.rows for run in study.runs(row, column))
    rows = [row for row in study.rows if study.runs(row, column)]

    def heading(metric: names.Metric, short: str) -> Heading:
        def value(run: Run) -> float | None:
            found = run.test["per_class"].get(short, {}).get(metric.key)
            return None if found is None else float(found)

        return Heading(short, metric.greater_is_better, column, value, lambda row: None)

    blocks = [block(m.title, "Method", study, rows, [heading(m, short) for short in classes]) for m in names.OF_CLASS]
    return Table(names.slug(f"classes-{study.key}-{column.slug}"), f"{study.title}: {column.label}", "", tuple(blocks))


def study_heading(study: Study) -> str:
    return STUDIES.get(study.kind, "Methods compared")
