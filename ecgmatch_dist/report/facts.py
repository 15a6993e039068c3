"""The page's honest header: what was run, on what data, what is missing, and what is not as in the paper."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np

from ecgmatch_dist.config import Config
from ecgmatch_dist.report import names, published
from ecgmatch_dist.report.evidence import Assessments, replicates
from ecgmatch_dist.report.records import recordings
from ecgmatch_dist.report.resample import interval
from ecgmatch_dist.report.runs import PARTS, Damaged, Problem, Run, settings
from ecgmatch_dist.report.studies import Column, Row, Study, column_of, main_settings, numbers
from ecgmatch_dist.report.tables import signed

Sizes = dict[str, dict[str, dict[str, int]]]
"""Recordings by the split's checksum, database and part."""


@dataclass(frozen=True)
class Facts:
    """Sentences and lists for the top of the page."""

    lede: list[tuple[str, str]]
    """Sentences, each with the key of the table that its numbers are from."""
    run: list[tuple[str, str]]
    data: list[tuple[Run, list[str]]]
    """A line for each database, and the run whose split was counted."""
    missing: list[str]
    unlike: list[str]
    """Settings that are not the paper's."""
    uneven: list[str]
    """Settings in which compared methods differ."""
    beside: list[str]
    """Why the paper's values stand, or do not stand, beside ours."""


def split_sizes(runs: list[Run], problems: list[Problem]) -> Sizes:
    """Read each split once, from the first run that used it."""
    sizes: Sizes = {}
    for run in runs:
        if run.split_sha256 in sizes:
            continue
        try:
            sizes[run.split_sha256] = recordings(run)
        except Damaged as error:
            problems.append(
                Problem(run.folder, "incomplete", f"{error}: the paper's values are not set beside this split")
            )
            sizes[run.split_sha256] = {}
    return sizes


def sizes_of(study: Study, column: Column, sizes: Sizes) -> dict[str, dict[str, int]]:
    """Recordings in the first split of a column."""
    return next((sizes[run.split_sha256] for row in study.rows for run in study.runs(row, column)), {})


def gather(runs: list[Run], studies: list[Study], sizes: Sizes, assessed: Assessments) -> Facts:
    main = [study for study in studies if study.kind == "main"]
    return Facts(
        lede=[
            (f"{sentence}{committee(study, runs)}", study.key)
            for study in main
            if (sentence := headline(study, assessed))
        ],
        run=what_was_run(runs),
        data=[data_row(study, column, sizes) for study in main for column in study.columns],
        missing=what_is_missing(runs, main),
        unlike=unlike_paper(runs),
        uneven=uneven(runs),
        beside=[
            f"{study.title}, {c.label}: {why}"
            for study in main
            for c in study.columns
            if (why := published.mismatch(study, c, sizes_of(study, c, sizes)))
        ],
    )


def headline(study: Study, assessed: Assessments) -> str:
    """How the control compares in MAP, in one sentence."""
    find = {row.key: row for row in study.rows}
    control = find.get(names.CONTROL)
    if control is None or len(study.rows) < 2:
        return ""
    if len(study.columns) == 1:
        column = study.columns[0]
        rivals = {
            row: mean for row in study.rows if row != control and (mean := mean_map(study, row, column)) is not None
        }
        ours = mean_map(study, control, column)
        if ours is None or not rivals:
            return ""
        rival = max(rivals, key=lambda row: rivals[row])
        text = f"{study.title} ({column.label}): {control.label} reaches a test MAP of {ours:.3f}, {rival.label} "
        text += f"{rivals[rival]:.3f}: {signed(ours - rivals[rival])}"
        ours_drawn, theirs = (replicates(study.runs(row, column), "map", assessed) for row in (control, rival))
        if seeds := sorted(set(ours_drawn) & set(theirs)):
            low, high = interval(np.mean([ours_drawn[s] - theirs[s] for s in seeds], axis=0))
            text += f", 95 % interval over test recordings {signed(low)} to {signed(high)}"
        return text + "."
    best = 0
    counted = 0
    for column in study.columns:
        means = {row.key: mean for row in study.rows if (mean := mean_map(study, row, column)) is not None}
        if names.CONTROL in means and len(means) > 1:
            counted += 1
            best += means[names.CONTROL] == max(means.values())
    return (
        f"{study.title}: {control.label} has the highest test MAP on {best} of {counted} databases." if counted else ""
    )


def committee(study: Study, runs: list[Run]) -> str:
    """Where several supervised runs began the control's bank, tables show the first of them: what the others reach."""
    controls = [run for (row, _), cell in study.cells.items() if row.key == names.CONTROL for run in cell]
    most = max((number for run in controls for number in numbers(run.settings.get("method.committee"))), default=1)
    splits = {run.split_sha256 for run in controls}
    members = [run for run in runs if run.method == "supervised" and (not run.tag or run.tag.startswith("member"))]
    maps = [run.test["map"] for run in members if run.split_sha256 in splits]
    if most < 2 or len(maps) <= len(splits) or None in maps:
        return ""
    return (
        f" Its bank began with the mean prediction of {most:g} supervised runs, of which the tables show the first: "
        f"alone they reach {min(maps):.3f} to {max(maps):.3f}, on average {np.mean(maps):.3f}."
    )


def mean_map(study: Study, row: Row, column: Column) -> float | None:
    values = [run.test["map"] for run in study.runs(row, column) if run.test["map"] is not None]
    return float(np.mean(values)) if values else None


def what_was_run(runs: list[Run]) -> list[tuple[str, str]]:
    def listed(values: Any, limit: int = 8) -> str:
        found = sorted({str(value) for value in values if value not in (None, "")})
        return ", ".join(found[:limit]) + (f" and {len(found) - limit} more" if len(found) > limit else "")

    methods = sorted({run.method for run in runs}, key=lambda key: names.place(key, names.METHODS))
    seconds = [run.seconds for run in runs]
    started = sorted(str(run.environment["started"])[:10] for run in runs if run.environment.get("started"))
    facts = [
        ("runs", str(len(runs))),
        ("methods", ", ".join(map(names.method, methods))),
        ("seeds", ", ".join(map(str, sorted({run.seed for run in runs})))),
        ("steps", span([f"{steps:,}" for steps in sorted({run.steps for run in runs})])),
        ("time", f"{duration(sum(seconds))} in all, {duration(float(np.median(seconds)))} a run"),
        ("ranks", listed(run.world_size for run in runs)),
        ("devices", listed(device for run in runs for device in aslist(run.environment.get("devices")))),
        ("software", listed(map(software, runs))),
        ("started", span(started)),
    ]
    return [(name, value) for name, value in facts if value]


def aslist(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def software(run: Run) -> str:
    found = run.environment
    return f"ecgmatch-dist {found.get('version')} ({found.get('git')}), torch {found.get('torch')}" if found else ""


def span(values: list[str]) -> str:
    """First to last."""
    return " to ".join(dict.fromkeys((values[0], values[-1]))) if values else ""


def duration(seconds: float) -> str:
    return f"{seconds / 3600:.1f} hours" if seconds >= 5400 else f"{seconds / 60:.1f} minutes"


def data_row(study: Study, column: Column, sizes: Sizes) -> tuple[Run, list[str]]:
    """Protocol, databases, label scheme, signal, recordings in the four parts."""
    runs = [run for row in study.rows for run in study.runs(row, column)]
    parts = sizes[runs[0].split_sha256].values()
    signal = sorted({run.signal for run in runs} - {""})
    counts = [f"{sum(of[part] for of in parts):,}" if parts else "–" for part in PARTS]
    return runs[0], [study.title, column.label, column.scheme, "; ".join(signal) or "not recorded", *counts]


def what_is_missing(runs: list[Run], main: list[Study]) -> list[str]:
    out = []
    for study in main:
        for row, column, seeds in study.missing():
            word = "seed" if len(seeds) == 1 else "seeds"
            out.append(f"{study.title}, {column.label}: {row.label} lacks {word} {', '.join(map(str, seeds))}")
    rivals = [
        names.method(key) for key in (*published.METHODS, "supervised") if key not in {run.method for run in runs}
    ]
    if rivals:
        out.append(f"methods without any run: {', '.join(rivals)}")
    absent = [title for key, title in names.PROTOCOLS.items() if key not in {run.protocol for run in runs}]
    if absent:
        out.append(f"protocols without any run: {', '.join(absent)}")
    few = sorted({run.seed for run in runs})
    if len(few) < 3:
        out.append(
            f"only {len(few)} seed{'s' * (len(few) > 1)}: the spread over seeds is not known"
            if len(few) < 2
            else "only 2 seeds"
        )
    splits: dict[tuple[Any, ...], set[str]] = defaultdict(set)
    for run in runs:
        splits[run.split, column_of(run)].add(run.split_sha256)
    out += [
        f"{name}: {len(found)} different splits of this name were compared"
        for (name, _), found in splits.items()
        if len(found) > 1
    ]
    return out


def unlike_paper(runs: list[Run]) -> list[str]:
    """Shared settings, and ECGMatch's own, that differ from the paper's."""
    paper = settings(Config().to_json())
    found: dict[str, set[str]] = defaultdict(set)
    for (method, _, _), main in main_settings(runs).items():
        for key, value in main.items():
            if key in paper and value != paper[key] and (method == names.CONTROL or not key.startswith("method.")):
                found[key].add(f"{value}")
    return [f"{key} = {' or '.join(sorted(values))} (paper: {paper[key]})" for key, values in sorted(found.items())]


def uneven(runs: list[Run]) -> list[str]:
    """Settings outside the method that are not the same for all methods of a protocol."""
    found: dict[tuple[str, str], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for (method, protocol, _), main in main_settings(runs).items():
        for key, value in main.items():
            if not key.startswith("method."):
                found[protocol, key][str(value)].append(names.method(method))
    return [
        f"{protocol}: {key} = " + "; ".join(f"{value} ({', '.join(sorted(set(who)))})" for value, who in values.items())
        for (protocol, key), values in sorted(found.items())
        if len(values) > 1
    ]
