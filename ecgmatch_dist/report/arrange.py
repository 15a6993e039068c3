"""Arrange runs into studies: the comparison of methods, and what changes when one setting of a method does.

Each method has one main configuration per protocol and label scheme. The comparison shows the main configurations; every other
run belongs to the study of the settings in which it differs from them.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import Any

from ecgmatch_dist.config import Config
from ecgmatch_dist.report import display
from ecgmatch_dist.report.runs import FinishedRun, result_settings
from ecgmatch_dist.report.studies import STUDIES, Column, Row, Study, column_of

Settings = dict[str, Any]
MainSettings = dict[tuple[str, str, str], Settings]
"""(method, protocol, scheme) -> the main configuration."""

ABLATIONS = {
    ("method.lambda_u", 0): Row("lambda_u=0", "without pseudo-label generation", (1,)),
    ("method.refine", False): Row("refine=False", "without pseudo-label refinement", (2,)),
    ("method.lambda_f", 0): Row("lambda_f=0", "without label correlation alignment", (3,)),
}
LAMBDAS = {"method.lambda_u", "method.lambda_f"}
STUDY_OF_SETTING = {
    "method.similarity": "similarity",
    "augment.pipeline": "augmentation",
    "method.neighbours": "neighbours",
    "data.unlabelled": "unlabelled",
    "member": "committee",
}


def find_studies(runs: Iterable[FinishedRun]) -> list[Study]:
    """All studies that these runs allow, comparisons of methods first."""
    runs = list(runs)
    main = main_settings(runs)
    changed = {run.folder: differences(run, main) for run in runs}
    groups: dict[tuple[str, str, float | None, str], list[FinishedRun]] = defaultdict(list)
    for run in runs:
        for kind in study_kinds(changed[run.folder]):
            groups[kind, run.protocol, run.ratio, run.scheme].append(run)
        if not changed[run.folder]:
            groups["ratio", run.protocol, None, run.scheme].append(run)
    studies = []
    for (kind, protocol, ratio, scheme), members in groups.items():
        if kind == "ratio":
            members = with_several_ratios(members)
        elif kind != "main":  # add the main runs of the same methods and databases, to compare with
            where = {(run.method, column_of(run)) for run in members}
            unchanged = groups.get(("main", protocol, ratio, scheme), [])
            members = members + [run for run in unchanged if (run.method, column_of(run)) in where]
        if members:
            studies.append(arrange(kind, members, ratio, lambda run, kind=kind: row_of(kind, run, changed[run.folder])))  # type: ignore[misc]
    kinds = list(STUDIES)
    studies.sort(
        key=lambda s: (kinds.index(s.kind), display.sort_key(s.protocol, display.PROTOCOLS), s.ratio or 0, s.scheme)
    )
    return studies


def main_settings(runs: Iterable[FinishedRun]) -> MainSettings:
    """The most frequent configuration of the untagged runs, or of all runs where all are tagged.

    Of equally frequent ones, the one nearest to the defaults, which are the paper's."""
    defaults = result_settings(Config().to_json())
    groups: dict[tuple[str, str, str], list[FinishedRun]] = defaultdict(list)
    for run in runs:
        groups[run.method, run.protocol, run.scheme].append(run)
    out = {}
    for key, members in groups.items():
        candidates = [run for run in members if not run.tag] or members
        texts = [repr(sorted(run.settings.items())) for run in candidates]
        settings_by_text, count = dict(zip(texts, (run.settings for run in candidates), strict=True)), Counter(texts)
        distance = {text: sum(defaults.get(k, v) != v for k, v in s.items()) for text, s in settings_by_text.items()}
        out[key] = settings_by_text[min(settings_by_text, key=lambda text: (-count[text], distance[text], text))]
    return out


def differences(run: FinishedRun, main: MainSettings) -> Settings:
    """The settings of `run` that differ from its method's main ones."""
    base = main[run.method, run.protocol, run.scheme]
    return {k: run.settings.get(k) for k in sorted(base | run.settings) if base.get(k) != run.settings.get(k)}


def study_kinds(difference: Settings) -> list[str]:
    """The studies that a run with these differences belongs to."""
    if not difference:
        return ["main"]
    kinds = []
    if len(difference) == 1 and next(iter(difference.items())) in ABLATIONS:
        kinds.append("ablation")
    if set(difference) <= LAMBDAS:
        kinds.append("weights")
    if len(difference) == 1 and (kind := STUDY_OF_SETTING.get(next(iter(difference)))):
        kinds.append(kind)
    return kinds or ["other"]


def row_of(kind: str, run: FinishedRun, difference: Settings) -> Row:
    """The row of `run` in a study of this kind."""
    method, s = display.method(run.method), run.settings
    if kind == "main":
        return Row(run.method, method)
    if kind == "ablation":
        changed = next(iter(difference.items()), None)
        return ABLATIONS[changed] if changed else Row("full", method, (4,))
    if kind == "similarity":
        return Row(str(s.get("method.similarity")), str(s.get("method.similarity")))
    if kind == "augmentation":
        pipeline = s.get("augment.pipeline")
        return Row(f"{run.method}/{pipeline}", f"{method}, {pipeline}")
    if kind == "neighbours":
        K = s.get("method.neighbours")
        return Row(f"{run.method}/{K}", f"{method}, K = {K}", as_numbers(K))
    if kind == "unlabelled":
        n = as_numbers(s.get("data.unlabelled", 0))
        name = f"{n[0]:,.0f}" if n and n[0] else "all"
        return Row(f"{run.method}/{name}", f"{method}, {name}", n if n and n[0] else (float("inf"),))
    if kind == "weights":
        u, f = s.get("method.lambda_u"), s.get("method.lambda_f")
        return Row(f"{run.method}/{u}/{f}", f"{method}, λ_u = {u}, λ_f = {f}", as_numbers(u, f))
    if kind == "committee":
        start = tuple(number + 1 for number in as_numbers(s.get("member", 0)))
        name = f"{start[0]:g}" if start else str(s.get("member"))
        return Row(f"{run.method}/{name}", f"{method}, start {name}", start)
    if kind == "ratio":
        return Row(f"{run.method}/{run.ratio}", f"{method}, {display.percent(run.ratio)}", (run.ratio,))
    text = ", ".join(f"{key.removeprefix('method.')} = {value}" for key, value in difference.items())
    label = f"{method} ({': '.join(filter(None, (run.tag, text)))})" if text else method
    return Row(f"{run.method}/{text}", label)


def as_numbers(*values: object) -> tuple[float, ...]:
    """The values as numbers. Empty if any is not a number: another version may have other settings."""
    found = tuple(float(value) for value in values if isinstance(value, int | float))
    return found if len(found) == len(values) else ()


def arrange(kind: str, runs: Iterable[FinishedRun], ratio: float | None, row: Callable[[FinishedRun], Row]) -> Study:
    """A study of `runs`, all of one protocol and scheme."""
    cells: dict[tuple[Row, Column], list[FinishedRun]] = defaultdict(list)
    for run in sorted(runs, key=lambda run: (run.seed, run.name)):
        cells[row(run), column_of(run)].append(run)

    def sort_key(row: Row) -> tuple[Any, ...]:
        return (display.method_sort_key(row.key.split("/")[0])[0], row.values, row.key)

    first = next(iter(cells))[1]
    columns = tuple(sorted({column for _, column in cells}, key=lambda column: column.sort_key))
    rows = tuple(sorted({row for row, _ in cells}, key=sort_key))
    frozen = {key: tuple(value) for key, value in cells.items()}
    return Study(kind, first.protocol, first.scheme, ratio, columns, rows, frozen)


def with_several_ratios(runs: list[FinishedRun]) -> list[FinishedRun]:
    """Runs whose method was trained with several label ratios on the same database."""
    ratios: dict[tuple[str, Column], set[float]] = defaultdict(set)
    for run in runs:
        ratios[run.method, column_of(run)].add(run.ratio)
    return [run for run in runs if len(ratios[run.method, column_of(run)]) > 1]
