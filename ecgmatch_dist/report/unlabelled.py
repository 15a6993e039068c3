"""What more unlabelled recordings bring: runs that differ in their number, or in the databases that they come from."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from ecgmatch_dist.report import display
from ecgmatch_dist.report.drawing import INK, colour, panels
from ecgmatch_dist.report.run_files import SplitSizes
from ecgmatch_dist.report.runs import FinishedRun
from ecgmatch_dist.report.studies import Column, Study, column_of
from ecgmatch_dist.report.tables import Cell, Table, signed, text_table

NOTE = (
    "Mean test MAP over the labelled sets that every line of the same test set has, so that they can be compared. Gain: over "
    "the run that each of them started from; in brackets the smallest and the largest."
)
STUDY = "unlabelled"


@dataclass(frozen=True)
class Amount:
    """Runs with the same number of unlabelled recordings, one per labelled set, and their starts."""

    databases: tuple[str, ...]
    """Of the unlabelled recordings."""
    recordings: int
    """Mean over the labelled sets."""
    runs: tuple[FinishedRun, ...]
    starts: tuple[FinishedRun | None, ...]

    @property
    def scores(self) -> list[float]:
        return [run.test.map for run in self.runs]

    @property
    def gains(self) -> list[float]:
        """Empty where a start is not among the runs."""
        starts = [start.test.map for start in self.starts if start]
        return [a - b for a, b in zip(self.scores, starts, strict=True)] if len(starts) == len(self.runs) else []


@dataclass(frozen=True)
class Comparison:
    """A method on one test set, with several numbers of unlabelled recordings."""

    method: str
    column: Column
    """Of its fewest databases."""
    ratio: float
    amounts: tuple[Amount, ...]

    @property
    def title(self) -> str:
        return f"{self.column.label}, {display.percent(self.ratio)} labelled"


def find_comparisons(studies: Iterable[Study], runs: Sequence[FinishedRun], sizes: SplitSizes) -> list[Comparison]:
    """One for each method and test set that was trained with several numbers of unlabelled recordings."""
    by_name = {(run.split_sha256, run.name): run for run in runs}
    groups: dict[tuple[str, str, str, str, float], dict[tuple[tuple[str, ...], int], list[FinishedRun]]] = {}
    for study in studies:
        for (_, column), members in study.cells.items() if study.kind in ("main", STUDY) else ():
            for run in members:
                if run.started_from:  # others train without unlabelled recordings
                    group = groups.setdefault(
                        (run.method, column.protocol, column.scheme, tested(column), run.ratio), defaultdict(list)
                    )
                    group[column.databases, int(run.settings.get("data.unlabelled", 0))].append(run)
    found = []
    for (method, *_, ratio), group in groups.items():
        unique = {key: {run.seed: run for run in members} for key, members in group.items()}
        seeds = set.intersection(*(set(members) for members in unique.values()))
        amounts = [
            amount_of(databases, limit, [members[seed] for seed in sorted(seeds)], by_name, sizes)
            for (databases, limit), members in unique.items()
        ]
        known = sorted((a for a in amounts if a), key=lambda a: (len(a.databases), a.databases, a.recordings))
        if len({(a.databases, a.recordings) for a in known}) > 1:
            found.append(Comparison(method, column_of(known[0].runs[0]), ratio, tuple(known)))
    return sorted(found, key=lambda c: (c.column.sort_key, c.ratio, display.method_sort_key(c.method)))


def tested(column: Column) -> str:
    """The database of the test part: what comparisons with other unlabelled databases have in common."""
    return column.test_database or "+".join(column.databases)


def amount_of(
    databases: tuple[str, ...],
    limit: int,
    runs: Sequence[FinishedRun],
    by_name: dict[tuple[str, str], FinishedRun],
    sizes: SplitSizes,
) -> Amount | None:
    """None if the splits cannot be read, or no labelled set is left."""
    there = [sum(parts["unlabelled"] for parts in sizes.get(run.split_sha256, {}).values()) for run in runs]
    if not runs or not all(there):
        return None
    recordings = round(float(np.mean([min(n, limit or n) for n in there])))
    starts = tuple(by_name.get((run.split_sha256, run.started_from or "")) for run in runs)
    return Amount(databases, recordings, tuple(runs), starts)


def comparison_table(comparisons: Iterable[Comparison]) -> Table:
    header = ["Method", "test set", "unlabelled from", "recordings", "sets", "MAP", "gain over the start"]
    rows: list[list[str | Cell]] = []
    for comparison in comparisons:
        for amount in comparison.amounts:
            mean, gains = float(np.mean(amount.scores)), amount.gains
            gain = f"{signed(float(np.mean(gains)))} [{signed(min(gains))}, {signed(max(gains))}]" if gains else "–"
            rows.append(
                [
                    display.method(comparison.method),
                    comparison.title,
                    ", ".join(map(display.database, amount.databases)),
                    f"{amount.recordings:,}",
                    str(len(amount.runs)),
                    Cell(f"{mean:.3f}", "value", mean, runs=amount.runs),
                    gain,
                ]
            )
    return text_table("unlabelled", "What do more unlabelled recordings bring?", NOTE, [("MAP ↑", header, rows)])


def comparison_figure(comparisons: Sequence[Comparison]) -> Figure:
    """One panel per method and test set: test MAP over the number of unlabelled recordings, a line per choice of databases."""
    figure, axes = panels(len(comparisons), 3, 3.4, 2.6, (0.55, 0.5, 0.15, 0.36), below=0.3)
    names: dict[str, int] = {}
    for axis, comparison in zip(axes, comparisons, strict=False):
        for databases in dict.fromkeys(amount.databases for amount in comparison.amounts):
            amounts = [amount for amount in comparison.amounts if amount.databases == databases]
            name = "its own database" if databases == comparison.column.databases else "other databases, too"
            line = colour(names.setdefault(name, len(names)))
            x = [amount.recordings for amount in amounts]
            for scores in zip(*(amount.scores for amount in amounts), strict=True):
                axis.plot(x, scores, "-", color=line, lw=0.7, alpha=0.5)
            axis.plot(x, [np.mean(amount.scores) for amount in amounts], "o-", color=line, ms=4, lw=2)
        starts = [start.test.map for start in comparison.amounts[0].starts if start]
        if starts:
            axis.axhline(float(np.mean(starts)), color=INK, lw=0.8, ls=":")
        axis.set_xscale("log")
        axis.xaxis.set_major_locator(LogLocator(10, (1, 2, 5), numticks=9))
        axis.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.set_title(f"{display.method(comparison.method)}: {comparison.column.label}")
        axis.set_xlabel("unlabelled recordings")
    axes[0].set_ylabel("test MAP")
    lines = [axes[0].plot([], [], "o-", color=colour(i), label=name)[0] for name, i in names.items()]
    figure.legend(lines, list(names), loc="lower left", ncols=2)
    return figure
