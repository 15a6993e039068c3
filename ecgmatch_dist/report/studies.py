"""A study is one table of runs: rows are methods or settings, columns are test sets, and each cell holds one run per seed."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ecgmatch_dist.report import display
from ecgmatch_dist.report.runs import FinishedRun

STUDIES = {
    "main": "Methods compared",
    "ablation": "Ablation: one part taken away",
    "similarity": "Similarity that measures label correlation",
    "augmentation": "Augmentation: random against fixed sequence",
    "neighbours": "Number of neighbours K",
    "weights": "Weights of the two losses",
    "ratio": "Share of labelled recordings",
    "unlabelled": "Number of unlabelled recordings",
    "committee": "Supervised runs that begin the bank together",
    "other": "Other settings",
}
"""The kinds of studies and their titles, in the report's order."""


@dataclass(frozen=True)
class Column:
    """What a method is trained and tested on: a split without its label ratio and seed."""

    protocol: str
    scheme: str
    databases: tuple[str, ...]
    test_database: str | None

    @property
    def label(self) -> str:
        if self.protocol == "cross" and self.test_database:
            trained = "" if self.leave_one_out else f" (from {', '.join(map(display.database, self.trained))})"
            return display.database(self.test_database) + trained
        if self.protocol == "within" and self.test_database:
            others = [display.database(d) for d in self.databases if d != self.test_database]
            return f"{display.database(self.test_database)} (unlabelled: {', '.join(others)}, too)"
        if len(self.databases) < 4:
            return " + ".join(map(display.database, self.databases))
        return f"All {len(self.databases)}"

    @property
    def slug(self) -> str:
        trained = "+".join(self.trained)
        if self.protocol == "cross" and self.test_database:
            return self.test_database if self.leave_one_out else f"{self.test_database}-from-{trained}"
        return trained

    @property
    def trained(self) -> tuple[str, ...]:
        """The databases of the training part. A split names the tested one among its databases, too."""
        unseen = self.test_database if self.protocol == "cross" else None
        return tuple(name for name in self.databases if name != unseen)

    @property
    def leave_one_out(self) -> bool:
        """Trained on all of the paper's four databases but the tested one."""
        return {*self.databases, self.test_database} == set(display.DATABASES)

    @property
    def sort_key(self) -> tuple[Any, ...]:
        tested = (self.test_database,) if self.test_database else self.databases
        return (
            display.sort_key(self.protocol, display.PROTOCOLS),
            [display.sort_key(d, display.DATABASES) for d in tested],
            self.databases,
        )


@dataclass(frozen=True)
class Row:
    """A method, or a method with certain settings."""

    key: str
    """The row's name in paper_values/*.csv; "method/setting" in a study of several methods."""
    label: str
    values: tuple[float, ...] = ()
    """The settings that the row stands for (K, the ratio, both lambdas). Rows are sorted by them."""


@dataclass(frozen=True)
class Study:
    """Runs of one protocol and label scheme, arranged in rows and columns."""

    kind: str
    protocol: str
    scheme: str
    ratio: float | None
    """None where the rows differ in it."""
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    cells: dict[tuple[Row, Column], tuple[FinishedRun, ...]]

    @property
    def key(self) -> str:
        ratio = "" if self.ratio is None else f"-{self.ratio}"
        scheme = "" if self.scheme == "ecgmatch5" else f"-{self.scheme}"
        return display.slug(f"{self.kind}-{self.protocol}{ratio}{scheme}")

    @property
    def title(self) -> str:
        ratio = "" if self.ratio is None else f", {display.percent(self.ratio)} labelled"
        scheme = "" if self.scheme == "ecgmatch5" else f", {display.scheme(self.scheme)}"
        return f"{display.PROTOCOLS.get(self.protocol, self.protocol)}{ratio}{scheme}"

    @property
    def control(self) -> Row | None:
        """The row of the method that the others are tested against."""
        return next((row for row in self.rows if row.key == display.CONTROL), None)

    def runs(self, row: Row, column: Column) -> tuple[FinishedRun, ...]:
        return self.cells.get((row, column), ())

    def column_runs(self, column: Column) -> tuple[FinishedRun, ...]:
        return tuple(run for row in self.rows for run in self.runs(row, column))

    @cached_property
    def _seeds(self) -> dict[Column, tuple[int, ...]]:
        """Once for all: each cell of a table asks, and a look at all rows for each would take the square of their number."""
        return {column: tuple(sorted({run.seed for run in self.column_runs(column)})) for column in self.columns}

    def seeds(self, column: Column) -> tuple[int, ...]:
        """The seeds of all rows of this column."""
        return self._seeds[column]

    def missing(self) -> list[tuple[Row, Column, tuple[int, ...]]]:
        """Cells without some of the seeds that other rows of their column have."""
        gaps = []
        for row in self.rows:
            for column in self.columns:
                have = {run.seed for run in self.runs(row, column)}
                if lacking := tuple(seed for seed in self.seeds(column) if seed not in have):
                    gaps.append((row, column, lacking))
        return gaps


def column_of(run: FinishedRun) -> Column:
    return Column(run.protocol, run.scheme, run.databases, run.test_database or labelled_database(run))


def labelled_database(run: FinishedRun) -> str | None:
    """Of a split within one database that takes unlabelled recordings of others, too: the one; else None. Its name tells."""
    if run.protocol != "within" or len(run.databases) == 1:
        return None
    return next((name for name in run.databases if run.split.startswith(f"within-{name}+")), None)
