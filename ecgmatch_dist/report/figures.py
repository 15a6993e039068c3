"""Figures that compare methods and settings: critical differences, radar charts, sensitivity, cost."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from ecgmatch_dist.report import names
from ecgmatch_dist.report.drawing import RULE, colour, method_colour, panels
from ecgmatch_dist.report.statistics import Friedman, bonferroni_dunn
from ecgmatch_dist.report.studies import Column, Row, Study
from ecgmatch_dist.report.tables import Lookup


def critical_difference(rows: Sequence[Row], tests: dict[str, Friedman], n: int) -> Figure:
    """Mean ranks of all methods, one panel a metric; the band is one critical difference (Bonferroni-Dunn) from the control."""
    k = len(rows)
    control = next((i for i, row in enumerate(rows) if row.key == names.CONTROL), None)
    figure, axes = panels(len(names.METRICS), 3, 3.5, 1.0 + 0.2 * k, (1.25, 0.5, 0.15, 0.36))
    for axis, metric in zip(axes, names.METRICS, strict=True):
        ranks = tests[metric.key].ranks
        order = np.argsort(-ranks, kind="stable")
        height = np.arange(k)
        if control is not None:
            axis.axvspan(
                ranks[control],
                ranks[control] + bonferroni_dunn(k, n),
                color=method_colour(names.CONTROL),
                alpha=0.14,
                lw=0,
            )
        axis.hlines(height, 1, ranks[order], color=RULE, lw=1)
        axis.scatter(ranks[order], height, c=[method_colour(rows[i].key) for i in order], s=28, zorder=3)
        axis.set_yticks(height, [rows[i].label for i in order])
        axis.set_xlim(0.8, k + 0.2)
        axis.set_ylim(-0.5, k - 0.5)
        axis.set_xticks(range(1, k + 1))
        axis.set_title(metric.label)
        axis.grid(False)
        axis.tick_params(axis="y", length=0)
    for axis in axes[3:]:
        axis.set_xlabel("mean rank (1 is the best)")
    return figure


def average(study: Study, row: Row, columns: Sequence[Column], metric: str, value: Lookup) -> float:
    """Mean over databases of the mean over seeds; nan where a database is missing."""
    means = []
    for column in columns:
        values = [v for run in study.runs(row, column) if (v := value(run, metric)) is not None]
        means.append(float(np.mean(values)) if values else np.nan)
    return float(np.mean(means))


def radar(study: Study, value: Lookup) -> Figure | None:
    """Two augmentation pipelines: one panel a metric, one corner a method, averaged over databases.

    With fewer than three methods the corners are the databases of the first method."""
    pipelines = sorted({row.key.split("/")[1] for row in study.rows}, key=lambda name: (name != "ecgaugment", name))
    methods = sorted({row.key.split("/")[0] for row in study.rows}, key=lambda m: names.place(m, names.METHODS))
    find = {row.key: row for row in study.rows}
    corners: list[tuple[str, str, Sequence[Column]]] = [(names.method(m), m, study.columns) for m in methods]
    corners = [c for c in corners if all(f"{c[1]}/{p}" in find for p in pipelines)]
    if len(corners) < 3 and corners:
        corners = [(column.label, corners[0][1], (column,)) for column in study.columns]
    if len(corners) < 3 or len(pipelines) < 2:
        return None
    angles = np.linspace(0, 2 * np.pi, len(corners), endpoint=False)
    figure, axes = panels(len(names.METRICS), 3, 3.8, 3.3, (0.9, 0.5, 0.9, 0.8), below=0.3, polar=True)
    for axis, metric in zip(axes, names.METRICS, strict=True):
        everything = []
        for i, pipeline in enumerate(pipelines):
            points = [average(study, find[f"{m}/{pipeline}"], columns, metric.key, value) for _, m, columns in corners]
            everything += points
            closed = np.append(points, points[0])
            axis.plot(np.append(angles, angles[0]), closed, color=colour((0, 3, 2, 4)[i % 4]), label=pipeline)
            axis.fill(np.append(angles, angles[0]), closed, color=colour((0, 3, 2, 4)[i % 4]), alpha=0.12)
        axis.set_xticks(angles, [label for label, _, _ in corners])
        low, high = np.nanmin(everything), np.nanmax(everything)
        axis.set_ylim(max(0, low - 0.5 * (high - low)), high + 0.05 * (high - low) + 1e-9)
        axis.tick_params(axis="y", labelsize=7)
        axis.spines["polar"].set_color(RULE)
        axis.set_title(metric.title, y=1.2)
        axis.yaxis.set_major_locator(MaxNLocator(3))
        for text, angle in zip(axis.get_xticklabels(), angles, strict=True):
            side = np.cos(angle)
            text.set_horizontalalignment("left" if side > 0.1 else "right" if side < -0.1 else "center")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower left", ncols=len(pipelines))
    return figure


def sensitivity(study: Study, points: dict[float, Row], label: str, value: Lookup) -> Figure:
    """The six metrics over one setting, a line a database with the standard deviation over seeds."""
    figure, axes = panels(len(names.METRICS), 3, 3.4, 2.5, below=0.3)
    x = sorted(points)
    for axis, metric in zip(axes, names.METRICS, strict=True):
        for i, column in enumerate(study.columns):
            found = []
            for at in x:
                values = [v for run in study.runs(points[at], column) if (v := value(run, metric.key)) is not None]
                if values:
                    found.append((at, np.mean(values), np.std(values, ddof=1) if len(values) > 1 else 0.0))
            if found:
                at, mean, spread = np.array(found).T
                axis.errorbar(
                    at, mean, spread, color=colour(i), marker="o", ms=3.5, capsize=2, elinewidth=0.8, label=column.label
                )
        axis.set_title(metric.title)
        axis.set_xticks(x, [f"{at:g}" for at in x])
    for axis in axes[3:]:
        axis.set_xlabel(label)
    handles = [Line2D([], [], color=colour(i), marker="o", ms=3.5) for i in range(len(study.columns))]
    figure.legend(handles, [c.label for c in study.columns], loc="lower left", ncols=min(6, len(study.columns)))
    return figure


def settings_axes(study: Study) -> list[tuple[str, str, dict[float, Row]]]:
    """The curves that a study of K, ratio or loss weights has: (name, axis label, rows by value), at least two points each."""
    curves: dict[tuple[str, str], dict[float, Row]] = {}
    for row in study.rows:
        method = row.key.split("/")[0]
        label = names.method(method)
        if study.kind == "neighbours" and row.at:
            curves.setdefault((f"{method}-K", f"{label}: neighbours K"), {})[row.at[0]] = row
        elif study.kind == "ratio":
            curves.setdefault((f"{method}-ratio", f"{label}: share of labelled recordings"), {})[row.at[0]] = row
        elif study.kind == "weights" and row.at:
            u, f = row.at
            curves.setdefault((f"{method}-lambda_u-at-{f:g}", f"{label}: λ_u (λ_f = {f:g})"), {})[u] = row
            curves.setdefault((f"{method}-lambda_f-at-{u:g}", f"{label}: λ_f (λ_u = {u:g})"), {})[f] = row
    return [(name, label, rows) for (name, label), rows in curves.items() if len(rows) > 1]


def cost(series: dict[str, list[tuple[int, float]]]) -> Figure:
    """Bytes that a rank receives in a step over the number of ranks, in each placement of the bank."""
    figure, (axis,) = panels(1, 1, 8, 3.6, margins=(0.8, 0.5, 3.2, 0.36))
    for i, (name, points) in enumerate(sorted(series.items())):
        world, received = np.array(sorted(points)).T
        axis.plot(world, received, marker="o", ms=4, color=colour(i), label=name)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    ranks = sorted({world for points in series.values() for world, _ in points})
    axis.set_xticks(ranks, [str(n) for n in ranks])
    axis.yaxis.set_major_formatter(lambda value, _: f"{value / 1e6:g} MB")
    axis.set_xlabel("ranks")
    axis.set_ylabel("a rank, a step")
    axis.legend(loc="upper left", bbox_to_anchor=(1, 1))
    return figure
