"""Figures that compare methods and settings: critical differences, radar charts, sensitivity, cost."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter
from numpy.typing import NDArray

from ecgmatch_dist.config import methods
from ecgmatch_dist.report import display
from ecgmatch_dist.report.drawing import INK, RULE, colour, method_colour, panels
from ecgmatch_dist.report.statistics import Friedman, bonferroni_dunn
from ecgmatch_dist.report.studies import Column, Row, Study


def critical_difference(rows: Sequence[Row], tests: dict[str, Friedman], n: int) -> Figure:
    """Mean ranks of all methods, one panel per metric; the band is one critical difference (Bonferroni-Dunn) wide."""
    k = len(rows)
    control = next((i for i, row in enumerate(rows) if row.key == display.CONTROL), None)
    figure, axes = panels(len(display.METRICS), 3, 3.5, 1.0 + 0.2 * k, (1.25, 0.5, 0.15, 0.36))
    for axis, metric in zip(axes, display.METRICS, strict=True):
        ranks = tests[metric.key].ranks
        order = np.argsort(-ranks, kind="stable")
        height = np.arange(k)
        if control is not None:
            axis.axvspan(
                ranks[control],
                ranks[control] + bonferroni_dunn(k, n),
                color=method_colour(display.CONTROL),
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


def average(study: Study, row: Row, columns: Sequence[Column], metric: str) -> float:
    """Mean over databases of the mean over seeds; nan where a database is missing."""
    cells = [study.runs(row, column) for column in columns]
    return float(np.mean([np.mean([run.test.get(metric) for run in runs]) if runs else np.nan for runs in cells]))


def augmentation_methods(study: Study) -> tuple[list[str], list[str]]:
    """Methods with runs of every pipeline, and the pipelines. The supervised starts of other methods' runs are by-products:
    they count only where nothing else was run."""
    pipelines = sorted({row.key.split("/")[1] for row in study.rows}, key=lambda name: (name != "ecgaugment", name))
    names = sorted({row.key.split("/")[0] for row in study.rows}, key=display.method_sort_key)
    keys = {row.key for row in study.rows}
    names = [name for name in names if all(f"{name}/{pipeline}" in keys for pipeline in pipelines)]
    known = methods()
    return [name for name in names if name not in known or not known[name].is_start] or names, pipelines


def augmentation(study: Study) -> Figure | None:
    """Augmentation pipelines: one panel per metric, one corner per method, averaged over databases as in the paper.

    One or two methods have no area: they get bars. None where no method has two pipelines."""
    names, pipelines = augmentation_methods(study)
    if not names or len(pipelines) < 2:
        return None
    row_of = {row.key: row for row in study.rows}
    polar = len(names) >= 3
    margins = (0.9, 0.5, 0.9, 0.8) if polar else (0.5, 0.5, 0.15, 0.36)
    height = 3.3 if polar else 2.5
    figure, axes = panels(len(display.METRICS), 3, 3.8 if polar else 3.4, height, margins, below=0.3, polar=polar)
    for axis, metric in zip(axes, display.METRICS, strict=True):
        series = {
            pipeline: [average(study, row_of[f"{name}/{pipeline}"], study.columns, metric.key) for name in names]
            for pipeline in pipelines
        }
        (draw_radar if polar else draw_bars)(axis, [display.method(name) for name in names], series)
        axis.set_title(metric.title, y=1.2 if polar else None)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower left", ncols=len(pipelines))
    return figure


def pipeline_colour(i: int) -> str:
    return colour((0, 3, 2, 4)[i % 4])


def limits(series: dict[str, list[float]]) -> tuple[float, float]:
    """An axis on which differences can be seen; it does not start at zero."""
    points = [point for values in series.values() for point in values]
    low, high = np.nanmin(points), np.nanmax(points)
    return max(0.0, low - 0.5 * (high - low)), high + 0.05 * (high - low) + 1e-9


def draw_radar(axis: Any, corners: list[str], series: dict[str, list[float]]) -> None:
    angles = np.linspace(0, 2 * np.pi, len(corners), endpoint=False)
    for i, (name, points) in enumerate(series.items()):
        closed = np.append(points, points[0])
        axis.plot(np.append(angles, angles[0]), closed, color=pipeline_colour(i), label=name)
        axis.fill(np.append(angles, angles[0]), closed, color=pipeline_colour(i), alpha=0.12)
    axis.set_xticks(angles, corners)
    axis.set_ylim(*limits(series))
    axis.tick_params(axis="y", labelsize=7)
    axis.spines["polar"].set_color(RULE)
    axis.yaxis.set_major_locator(MaxNLocator(3))
    for text, angle in zip(axis.get_xticklabels(), angles, strict=True):
        side = np.cos(angle)
        text.set_horizontalalignment("left" if side > 0.1 else "right" if side < -0.1 else "center")


def draw_bars(axis: Any, groups: list[str], series: dict[str, list[float]]) -> None:
    width = 0.8 / len(series)
    for i, (name, points) in enumerate(series.items()):
        at = np.arange(len(groups)) + (i - (len(series) - 1) / 2) * width
        axis.bar(at, points, 0.9 * width, color=pipeline_colour(i), label=name)
    axis.set_xticks(range(len(groups)), groups)
    axis.set_ylim(*limits(series))
    axis.grid(axis="x", visible=False)


def sensitivity(study: Study, points: dict[float, Row], label: str) -> Figure:
    """The six metrics over one setting: averaged over databases as in the paper, single databases as thin lines."""
    figure, axes = panels(len(display.METRICS), 3, 3.4, 2.5, below=0.3)
    several = len(study.columns) > 1
    for axis, metric in zip(axes, display.METRICS, strict=True):
        for i, column in enumerate(study.columns):
            found = curve(study, points, [column], metric.key)
            if several and len(found):
                axis.plot(found[:, 0], found[:, 1], color=colour(i), lw=0.8, marker="o", ms=2)
        found = curve(study, points, study.columns, metric.key)
        if len(found):
            settings, mean, spread = found.T
            look: dict[str, Any] = {"marker": "o", "ms": 3.5, "capsize": 2, "elinewidth": 0.8}
            axis.errorbar(settings, mean, spread, color=INK if several else colour(0), lw=2, **look)
        axis.set_title(metric.title)
        axis.set_xticks(sorted(points), [f"{setting:g}" for setting in sorted(points)])
    for axis in axes[3:]:
        axis.set_xlabel(label)
    lines = [Line2D([], [], color=INK, lw=2, marker="o", ms=3.5)] if several else []
    lines += [Line2D([], [], color=colour(i), lw=0.8 if several else 1.6) for i in range(len(study.columns))]
    names = [f"mean of {len(study.columns)} databases"] if several else []
    figure.legend(lines, names + [c.label for c in study.columns], loc="lower left", ncols=min(6, len(lines)))
    return figure


def curve(study: Study, points: dict[float, Row], columns: Sequence[Column], metric: str) -> NDArray[np.float64]:
    """(setting, mean over databases and seeds, standard deviation over seeds of the mean over databases) [settings, 3].

    A setting that lacks a database is left out: its mean would be over easier or harder data than that of the others."""
    found = []
    for setting, row in sorted(points.items()):
        by_seed: list[dict[int, float]] = [
            {run.seed: run.test.get(metric) for run in study.runs(row, column)} for column in columns
        ]
        if not all(by_seed):
            continue
        seeds = set.intersection(*(set(values) for values in by_seed))
        means = [float(np.mean([values[seed] for values in by_seed])) for seed in sorted(seeds)]
        mean = float(np.mean([np.mean(list(values.values())) for values in by_seed]))
        found.append((setting, mean, float(np.std(means, ddof=1)) if len(means) > 1 else 0.0))
    return np.array(found, np.float64).reshape(-1, 3)


def settings_axes(study: Study) -> list[tuple[str, str, dict[float, Row]]]:
    """The curves of a study of K, ratio or loss weights: (name, axis label, rows by value), without stray points."""
    curves: dict[tuple[str, str], dict[float, Row]] = {}
    for row in study.rows:
        method = row.key.split("/")[0]
        label = display.method(method)
        if study.kind == "neighbours" and row.values:
            curves.setdefault((f"{method}-K", f"{label}: neighbours K"), {})[row.values[0]] = row
        elif study.kind == "ratio":
            curves.setdefault((f"{method}-ratio", f"{label}: share of labelled recordings"), {})[row.values[0]] = row
        elif study.kind == "weights" and row.values:
            u, f = row.values
            curves.setdefault((f"{method}-lambda_u-at-{f:g}", f"{label}: λ_u (λ_f = {f:g})"), {})[u] = row
            curves.setdefault((f"{method}-lambda_f-at-{u:g}", f"{label}: λ_f (λ_u = {u:g})"), {})[f] = row
    least = 3 if study.kind == "weights" else 2  # the point of another sweep beside the main one is no curve of weights
    return [(name, label, rows) for (name, label), rows in curves.items() if len(rows) >= least]


def cost(series: dict[str, list[tuple[int, float]]]) -> Figure:
    """Bytes received per rank and step over the number of ranks, for each placement of the bank."""
    figure, (axis,) = panels(1, 1, 8, 3.6, margins=(0.8, 0.5, 3.2, 0.36))
    for i, (name, points) in enumerate(sorted(series.items())):
        world, received = np.array(sorted(points)).T
        axis.plot(world, received, marker="o", ms=4, color=colour(i), label=name)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    ranks = sorted({world for points in series.values() for world, _ in points})
    axis.set_xticks(ranks, [str(n) for n in ranks])
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_minor_formatter(NullFormatter())  # the default writes formulas, and `text.parse_math` is off
    axis.yaxis.set_major_formatter(lambda value, _: f"{value / 1e6:g} MB")
    axis.set_xlabel("ranks")
    axis.set_ylabel("per rank and step")
    axis.legend(loc="upper left", bbox_to_anchor=(1, 1))
    return figure
