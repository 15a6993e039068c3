"""`ecgmatch bench NAME`: measurements side by side with the usual alternatives, in one process."""

import importlib
import json
import pkgutil
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import tyro
from rich.console import Console
from rich.table import Table

from ecgmatch_dist.errors import UserError


@dataclass(frozen=True)
class Comparison:
    """One line of a benchmark: our median against that of an alternative."""

    what: str
    other: str
    ours_value: float
    other_value: float
    unit: str
    ratio: float
    """Above 1: ours is better."""
    note: str = ""


def main(args: list[str]) -> None:
    """The first word names the benchmark, the rest are its options."""
    known = sorted(module.name for module in pkgutil.iter_modules(__path__))
    if not args or args[0] in ("-h", "--help"):
        print(f"usage: ecgmatch bench NAME ...   (options: ecgmatch bench NAME --help)\n\n  {' '.join(known)}")
        return
    if args[0] not in known:
        raise UserError(f"no benchmark `{args[0]}`: there are {', '.join(known)}")
    module = importlib.import_module(f"ecgmatch_dist.bench.{args[0]}")
    tyro.cli(module.main, prog=f"ecgmatch bench {args[0]}", args=args[1:])


def turns(ways: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each way in each turn. The ways alternate, so that a slow moment hits all; the first turn is a warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(repeats + 1):
        for name, run in ways.items():
            start = time.perf_counter()
            run()
            if turn:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def interleave(ways: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median seconds of each way over its turns."""
    return {name: statistics.median(times) for name, times in turns(ways, repeats).items()}


def faster(what: str, other: str, count: int, ours: float, theirs: float, note: str = "") -> Comparison:
    """Rates of two ways that did `count` things in so many seconds."""
    return Comparison(what, other, count / ours, count / theirs, "1/s", theirs / ours, note)


def show(title: str, rows: list[Comparison], to: Path | None) -> None:
    """Print a table, and write the rows as JSON if a file is given."""
    table = Table(title=title, title_justify="left")
    for name in ("what", "ours", "instead", "theirs", "ratio"):
        table.add_column(name, justify="left" if name in ("what", "instead") else "right")
    for row in rows:
        values = [f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in (row.ours_value, row.other_value)]
        ours, theirs = (f"{value} {row.unit}" for value in values)
        table.add_row(row.what, ours, row.other, theirs, f"{row.ratio:.2f}")
    console = Console()
    console.print(table)
    for row in rows:
        if row.note:
            console.print(f"{row.what}: {row.note}", highlight=False)
    if to is not None:
        to.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
