"""The top of the page: the main findings, what was run on which data, what is missing, and what differs from the paper."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ecgmatch_dist.config import Config, methods
from ecgmatch_dist.data.split_file import PARTS
from ecgmatch_dist.report import display, paper
from ecgmatch_dist.report.arrange import main_settings
from ecgmatch_dist.report.assess import Assessments
from ecgmatch_dist.report.headline import committee_sentence, headline
from ecgmatch_dist.report.run_files import SplitSizes
from ecgmatch_dist.report.runs import FinishedRun, result_settings
from ecgmatch_dist.report.studies import Column, Study, column_of
from ecgmatch_dist.report.tables import MISSING

PAPER_SIGNAL = "500 Hz, 12 × 6144"


@dataclass(frozen=True)
class PageHeader:
    """Sentences and lists for the top of the page."""

    headlines: list[tuple[str, str]]
    """Sentences, each with the key of the table that its numbers are from."""
    run_summary: list[tuple[str, str]]
    """(name, value): number of runs, methods, seeds, time, ..."""
    dataset_rows: list[tuple[FinishedRun, list[str]]]
    """One table row per test set, and the run whose split was counted."""
    missing_results: list[str]
    settings_unlike_paper: list[str]
    settings_unlike_across_methods: list[str]
    paper_mismatches: list[str]
    """Why the paper's values are not shown beside ours, per test set."""


def make_header(
    runs: list[FinishedRun], studies: list[Study], split_sizes: SplitSizes, assessed: Assessments
) -> PageHeader:
    main = [study for study in studies if study.kind == "main"]
    by_name = {run.name: run for run in runs}
    return PageHeader(
        headlines=[
            (f"{sentence}{committee_sentence(study, by_name, assessed)}", study.key)
            for study in main
            if (sentence := headline(study, assessed, by_name))
        ],
        run_summary=run_summary(runs),
        dataset_rows=[dataset_row(study, column, split_sizes) for study in main for column in study.columns],
        missing_results=missing_results(runs, main),
        settings_unlike_paper=settings_unlike_paper(runs),
        settings_unlike_across_methods=settings_unlike_across_methods(runs),
        paper_mismatches=[
            f"{study.title}, {column.label}: {reason}"
            for study in main
            for column in study.columns
            if (reason := paper.mismatch(study, column, split_sizes))
        ],
    )


def run_summary(runs: list[FinishedRun]) -> list[tuple[str, str]]:
    methods = sorted({run.method for run in runs}, key=display.method_sort_key)
    seconds = [run.seconds for run in runs]
    started = sorted(run.environment.started[:10] for run in runs if run.environment.started)
    summary = [
        ("runs", str(len(runs))),
        ("methods", ", ".join(map(display.method, methods))),
        ("seeds", ", ".join(map(str, sorted({run.seed for run in runs})))),
        ("steps", first_to_last([f"{steps:,}" for steps in sorted({run.steps for run in runs})])),
        ("time", f"{duration(sum(seconds))} in all, {duration(float(np.median(seconds)))} per run"),
        ("ranks", distinct(str(run.world_size) for run in runs)),
        ("devices", distinct(device for run in runs for device in run.environment.devices)),
        ("software", distinct(map(software, runs))),
        ("started", first_to_last(started)),
    ]
    return [(name, value) for name, value in summary if value]


def distinct(values: Iterable[str], limit: int = 8) -> str:
    found = sorted(set(values) - {""})
    return ", ".join(found[:limit]) + (f" and {len(found) - limit} more" if len(found) > limit else "")


def software(run: FinishedRun) -> str:
    found = run.environment
    return f"ecgmatch-dist {found.version} ({found.git}), torch {found.torch}" if found.version else ""


def first_to_last(values: list[str]) -> str:
    return " to ".join(dict.fromkeys((values[0], values[-1]))) if values else ""


def duration(seconds: float) -> str:
    return f"{seconds / 3600:.1f} hours" if seconds >= 5400 else f"{seconds / 60:.1f} minutes"


def dataset_row(study: Study, column: Column, split_sizes: SplitSizes) -> tuple[FinishedRun, list[str]]:
    """Protocol, databases, label scheme, signal, recordings in the four parts."""
    runs = study.column_runs(column)
    databases = split_sizes[runs[0].split_sha256].values()
    signal = sorted({run.signal for run in runs} - {""})
    counts = [f"{sum(counts[part] for counts in databases):,}" if databases else MISSING for part in PARTS]
    return runs[0], [
        study.title,
        column.label,
        display.scheme(column.scheme),
        "; ".join(signal) or "not recorded",
        *counts,
    ]


def missing_results(runs: list[FinishedRun], main: list[Study]) -> list[str]:
    """Missing seeds, methods and protocols; and splits that differ although they have the same name."""
    out = []
    for study in main:
        for row, column, seeds in study.missing():
            word = "seed" if len(seeds) == 1 else "seeds"
            out.append(f"{study.title}, {column.label}: {row.label} lacks {word} {', '.join(map(str, seeds))}")
    used = {run.method for run in runs}
    if methods := [display.method(key) for key in (*paper.METHODS, "supervised") if key not in used]:
        out.append(f"methods without any run: {', '.join(methods)}")
    tested = {run.protocol for run in runs}
    if protocols := [title for key, title in display.PROTOCOLS.items() if key not in tested]:
        out.append(f"protocols without any run: {', '.join(protocols)}")
    match len({run.seed for run in runs}):
        case 1:
            out.append("only 1 seed: the spread over seeds is not known")
        case 2:
            out.append("only 2 seeds")
    checksums: dict[tuple[str, Column], set[str]] = defaultdict(set)
    for run in runs:
        checksums[run.split, column_of(run)].add(run.split_sha256)
    out += [
        f"{name}: {len(found)} different splits of this name were compared"
        for (name, _), found in checksums.items()
        if len(found) > 1
    ]
    return out


def settings_unlike_paper(runs: list[FinishedRun]) -> list[str]:
    """The signal, common settings and ECGMatch's own, where they differ from the defaults, which are the paper's."""
    defaults = result_settings(Config().to_json()) | {"runtime.precision": "fp32"}  # our `auto` is in no paper
    del defaults["model.feature"]  # our default is the official code's
    found: dict[str, set[str]] = defaultdict(set)
    for (method, _, _), main in main_settings(runs).items():
        for key, value in main.items():
            comparable = key in defaults and (method == display.CONTROL or not key.startswith("method."))
            if comparable and is_used(method, key) and value != defaults[key]:
                found[key].add(f"{value}")
    lines = [f"{key} = {' or '.join(sorted(values))} (paper: {defaults[key]})" for key, values in sorted(found.items())]
    signals = sorted({run.signal for run in runs} - {"", PAPER_SIGNAL})
    return [f"signal = {' or '.join(signals)} (paper: {PAPER_SIGNAL})", *lines] if signals else lines


def settings_unlike_across_methods(runs: list[FinishedRun]) -> list[str]:
    """Common settings that are not the same for all methods of a protocol."""
    found: dict[tuple[str, str], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for (method, protocol, _), main in main_settings(runs).items():
        for key, value in main.items():
            if not key.startswith("method.") and is_used(method, key):
                found[protocol, key][str(value)].append(display.method(method))
    return [
        f"{protocol}: {key} = "
        + "; ".join(f"{value} ({', '.join(sorted(set(methods)))})" for value, methods in values.items())
        for (protocol, key), values in sorted(found.items())
        if len(values) > 1
    ]


def is_used(method: str, key: str) -> bool:
    """Whether a setting means something for this method. A start begins with random weights, in the paper too."""
    known = methods().get(method)
    if known is None:
        return True
    of_unlabelled = key == "optim.unlabelled_batch" or key.startswith("bank.")
    return not (known.is_start and key == "init") and (known.uses_unlabelled or not of_unlabelled)
