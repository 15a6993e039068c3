"""The paper's numbers (paper_values/*.csv), and whether a study of ours has the paper's setting."""

import csv
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from ecgmatch_dist.report import display
from ecgmatch_dist.report.run_files import SplitSizes
from ecgmatch_dist.report.statistics import Array
from ecgmatch_dist.report.studies import Column, Study

FOLDER = Path(__file__).parent / "paper_values"
FILES = {"main": "comparison", "ablation": "ablation", "similarity": "similarity"}
RATIOS = {"within": 0.05, "cross": 0.01, "mix": 0.01}
METHODS = ("mixmatch", "fixmatch", "flexmatch", "dst", "percentmatch", "softmatch", "ups", "ecgmatch")
"""The methods of the paper's main tables, which its statistics compare."""


@dataclass(frozen=True)
class Value:
    """A mean and, where it is known, a standard deviation."""

    mean: float
    std: float | None

    def __str__(self) -> str:
        return f"{self.mean:.3f}" if self.std is None else f"{self.mean:.3f}±{self.std:.3f}"


def read_csv(name: str) -> list[dict[str, str]]:
    with (FOLDER / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@cache
def table(kind: str) -> dict[tuple[str, str, str, str], Value]:
    """(protocol, database, row, metric) -> value; empty for studies that are not in the paper."""
    if kind not in FILES:
        return {}
    keys = ("protocol", "database", "row", "metric")
    rows = read_csv(FILES[kind])
    return {tuple(r[k] for k in keys): Value(float(r["mean"]), float(r["std"]) if r["std"] else None) for r in rows}  # type: ignore[misc]


@cache
def database_sizes() -> dict[str, int]:
    """Recordings with at least one of the five classes, per database."""
    return {row["database"]: int(row["recordings"]) for row in read_csv("databases")}


def mismatch(study: Study, column: Column, split_sizes: SplitSizes) -> str:
    """Why the paper's values cannot be compared with this column; empty if they can."""
    if study.kind not in FILES or study.protocol not in RATIOS:
        return "the paper has no such table"
    if study.scheme != "ecgmatch5":
        return f"the labels are {display.scheme(study.scheme)}, not {display.scheme('ecgmatch5')}"
    if study.ratio != RATIOS[study.protocol]:
        return f"the paper labels {display.percent(RATIOS[study.protocol])}"
    sizes = database_sizes()
    used = set(column.databases) | ({column.test_database} if column.test_database else set())
    if not used <= set(sizes):
        return f"the paper does not use {', '.join(sorted(used - set(sizes)))}"
    if column.protocol != "within" and used != set(sizes):
        return "the paper uses all four databases"
    recordings = next((split_sizes[run.split_sha256] for run in study.column_runs(column)), {})
    for database in sorted(used):
        have = sum(recordings.get(database, {}).values())
        if abs(have - sizes[database]) > 0.01 * sizes[database]:
            return f"{have:,} recordings of {display.database(database)}, the paper's {sizes[database]:,}"
    return ""


def value(study: Study, column: Column, row: str, metric: str) -> Value | None:
    """The paper's value of a metric; None where it prints none."""
    database = {"cross": column.test_database, "mix": "all"}.get(column.protocol, column.databases[0])
    return table(study.kind).get((column.protocol, database or "", row, metric))


def printed_f(protocol: str, metric: str) -> float | None:
    """F_F as the paper prints it."""
    rows = (r for r in read_csv("friedman") if (r["protocol"], r["metric"]) == (protocol, metric))
    return next((float(row["f_f"]) for row in rows), None)


def comparison(protocol: str, metric: str) -> Array:
    """The paper's means of one metric [4 databases, 8 methods]."""
    values = table("main")
    return np.array([[values[protocol, d, m, metric].mean for m in METHODS] for d in display.DATABASES])
