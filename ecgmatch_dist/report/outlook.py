"""What more labels would buy: a learning curve through the runs with several numbers of labels, and its forecast."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from ecgmatch_dist.forecast import LEAST, Forecast, Range, forecast
from ecgmatch_dist.report import display
from ecgmatch_dist.report.drawing import INK, method_colour, panels
from ecgmatch_dist.report.run_files import SplitSizes
from ecgmatch_dist.report.runs import FinishedRun
from ecgmatch_dist.report.studies import Column, Study
from ecgmatch_dist.report.tables import MISSING, Cell, Table, text_table

TIMES = (2, 10)
NOTE = (
    f"Fitted to the test MAP of all runs: L - C n^-a, n labelled recordings. It takes {LEAST} numbers of labels. In brackets: "
    "90 %, by the scatter of the runs and the doubt about the curve. It holds for labels of the same kind, and these settings."
)


@dataclass(frozen=True)
class Outlook:
    """The runs of a method on one test set, and the curve through them."""

    method: str
    column: Column
    runs: tuple[FinishedRun, ...]
    labels: tuple[int, ...]
    fit: Forecast | None

    @property
    def scores(self) -> list[float]:
        return [run.test.map for run in self.runs]


def find_outlooks(studies: Iterable[Study], sizes: SplitSizes) -> list[Outlook]:
    """One for each method and test set that was trained with several label ratios."""
    groups: dict[tuple[str, Column], list[tuple[int, FinishedRun]]] = defaultdict(list)
    for study in studies:
        if study.kind != "ratio":
            continue
        for (_, column), runs in study.cells.items():
            for run in runs:
                labelled = sum(parts["labelled"] for parts in sizes.get(run.split_sha256, {}).values())
                if labelled and not display.is_probe(run.method):
                    groups[run.method, column].append((labelled, run))
    found = []
    for (method, column), points in groups.items():
        points.sort(key=lambda point: (point[0], point[1].seed))
        labels, runs = tuple(n for n, _ in points), tuple(run for _, run in points)
        found.append(Outlook(method, column, runs, labels, forecast(labels, [run.test.map for run in runs])))
    return sorted(found, key=lambda o: (o.column.sort_key, display.method_sort_key(o.method)))


def outlook_table(outlooks: Iterable[Outlook]) -> Table:
    header = ["Method", "test set", "labelled", "MAP there", *(f"{times} times the labels" for times in TIMES), "limit"]
    rows: list[list[str | Cell]] = []
    for outlook in outlooks:
        most, fit = max(outlook.labels), outlook.fit
        here = float(np.mean([score for n, score in zip(outlook.labels, outlook.scores, strict=True) if n == most]))
        forecasts = [_cell(fit.score(times * most)) if fit else Cell(MISSING, "missing") for times in TIMES]
        limit = _cell(fit.limit()) if fit else Cell(MISSING, "missing")
        amounts = f"{min(outlook.labels):,} to {most:,}"
        names = display.method(outlook.method), outlook.column.label, amounts
        rows.append([*names, Cell(f"{here:.3f}", "value", here), *forecasts, limit])
    return text_table("outlook", "What would more labels buy?", NOTE, [("MAP ↑", header, rows)])


def _cell(found: Range) -> Cell:
    return Cell(f"{found.value:.3f} [{found.low:.3f}, {found.high:.3f}]", "value", found.value)


def outlook_figure(outlooks: list[Outlook]) -> Figure:
    """One panel per test set: the runs, the curves, and their forecast up to ten times the labels."""
    columns = list(dict.fromkeys(outlook.column for outlook in outlooks))
    figure, axes = panels(len(columns), 3, 3.4, 2.6, (0.55, 0.5, 0.15, 0.36), below=0.3)
    for axis, column in zip(axes, columns, strict=False):
        for outlook in (o for o in outlooks if o.column == column):
            colour = method_colour(outlook.method)
            axis.scatter(outlook.labels, outlook.scores, s=10, color=colour, label=display.method(outlook.method))
            if outlook.fit:
                n = np.geomspace(min(outlook.labels), TIMES[-1] * max(outlook.labels), 40)
                ranges = [outlook.fit.score(value) for value in n]
                axis.plot(n, [r.value for r in ranges], color=colour)
                axis.fill_between(n, [r.low for r in ranges], [r.high for r in ranges], color=colour, alpha=0.12, lw=0)
        axis.axvline(max(n for o in outlooks if o.column == column for n in o.labels), color=INK, lw=0.6, ls=":")
        axis.set_xscale("log")
        axis.xaxis.set_major_locator(LogLocator(10, (1, 2, 5), numticks=9))
        axis.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.set_title(column.label)
        axis.set_xlabel("labelled recordings")
    axes[0].set_ylabel("test MAP")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower left", ncols=min(4, len(labels)))
    return figure
