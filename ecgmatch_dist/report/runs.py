"""Find the finished runs in a folder. A folder that cannot be used is reported with the reason; it never ends the report."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from ecgmatch_dist.config import flatten, role
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.record.config_file import read_config
from ecgmatch_dist.record.environment import Environment, read_environment
from ecgmatch_dist.record.metrics_file import read_latest
from ecgmatch_dist.record.result import Result, read_result
from ecgmatch_dist.record.second_opinion import folder_of, read_together
from ecgmatch_dist.record.weights import read_notes
from ecgmatch_dist.terminal.waiting import track

MAX_DEPTH = 3
"""Levels of folders to search: a sweep may keep its runs in a folder of its own."""
OPTIONAL_FILES = ("environment.json", "predictions/test.npz", "metrics.jsonl")


@dataclass(frozen=True)
class Problem:
    """A folder that the report leaves out, wholly or in part."""

    folder: Path
    kind: Literal["damaged", "unfinished", "foreign", "duplicate", "incomplete"]
    reason: str


@dataclass(frozen=True, kw_only=True, eq=False)
class FinishedRun(Result):
    """A finished run and its folder."""

    folder: Path
    settings: dict[str, Any]
    """The settings that decide the result, without the seed: {"optim.lr": 0.03, ...}."""

    @cached_property
    def environment(self) -> Environment:
        try:
            return read_environment(self.folder / "environment.json")
        except UserError:
            return Environment()

    @cached_property
    def signal(self) -> str:
        """Sampling rate and length, from the notes of the kept weights; empty where they are not recorded."""
        try:
            notes = read_notes(self.folder / "best.safetensors")
        except UserError:
            return ""
        return f"{notes.preprocess.rate:g} Hz, 12 × {notes.preprocess.length:d}"


def find_runs(root: Path, report_folder: Path) -> tuple[list[FinishedRun], list[Problem]]:
    """All finished runs under `root`, sorted by name, and all other folders there. The report's own folder is skipped."""
    runs: list[FinishedRun] = []
    problems: list[Problem] = []
    first_copies: dict[tuple[str, str], FinishedRun] = {}
    known: dict[str, dict[str, Any]] = {}
    folders = find_run_folders(root, report_folder.resolve(), MAX_DEPTH, problems)
    for folder in track(folders, "read runs", len(folders)):
        try:
            run = read_run(folder, known)
        except UserError as error:
            kind: Literal["unfinished", "damaged"] = "damaged" if (folder / "result.json").exists() else "unfinished"
            problems.append(Problem(folder, kind, str(error).removeprefix(f"{folder}/")))
            continue
        first = first_copies.setdefault((run.split_sha256, run.fingerprint), run)
        if first is not run:
            reason = f"same split and settings as {first.folder.name}, which is used"
            problems.append(Problem(folder, "duplicate", reason))
            continue
        runs.append(run)
        if missing := [name for name in OPTIONAL_FILES if not (folder / name).is_file()]:
            reason = f"no {' and no '.join(missing)}: its test metrics are used, the rest is left out"
            problems.append(Problem(folder, "incomplete", reason))
    return sorted(runs, key=lambda run: run.name), sorted(problems, key=lambda p: (p.kind, str(p.folder)))


def with_trees(runs: Iterable[FinishedRun], problems: list[Problem]) -> list[FinishedRun]:
    """What each run and the trees that it has asked answer together, as a further run that began with it. Broken ones are added
    to `problems`."""
    found = []
    for run in runs:
        try:
            together = read_together(run.folder)
        except UserError as error:
            problems.append(Problem(run.folder, "incomplete", f"{error}; its answers with trees are left out"))
            continue
        if together and len(together.thresholds) == len(run.classes):
            both = replace(run, thresholds=together.thresholds, validation=together.validation, test=together.test)
            folder = folder_of(run.folder)
            found.append(replace(both, folder=folder, name=f"{run.name}/{folder.name}", started_from=run.name))
    return found


def find_run_folders(root: Path, skip: Path, depth: int, problems: list[Problem]) -> list[Path]:
    """Run folders at most `depth` levels below `root`. A folder without any becomes one of the `problems`."""
    if is_run(root):
        return [root]
    try:
        children = sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
    except OSError as error:
        problems.append(Problem(root, "damaged", f"cannot be read: {error.strerror}"))
        return []
    found: list[Path] = []
    for child in children:
        if child.resolve() == skip:
            continue
        child_problems: list[Problem] = []
        inside = find_run_folders(child, skip, depth - 1, child_problems) if depth > 1 or is_run(child) else []
        if not inside and not any(problem.kind == "damaged" for problem in child_problems):
            child_problems = [Problem(child, "foreign", "neither config.json nor result.json: not a run folder")]
        found += inside
        problems += child_problems
    return found


def is_run(folder: Path) -> bool:
    return (folder / "config.json").exists() or (folder / "result.json").exists()


def read_run(folder: Path, known: dict[str, dict[str, Any]]) -> FinishedRun:
    """The run in `folder`; a UserError says why there is none. `known`: settings of other runs, by their text. Runs of the same
    settings share one dictionary: of thousands of runs most are alike."""
    config = read_config(folder / "config.json")
    if not (folder / "result.json").exists():
        raise UserError(f"no result.json: the run is still training or was stopped ({last_step(folder)})")
    result = read_result(folder / "result.json")
    settings = result_settings(config.settings)
    if result.precision:
        settings["runtime.precision"] = result.precision  # the configuration may say `auto`
    if result.tag == "chosen":  # `ecgmatch sweep --chosen`: one recipe, although its weights differ between databases
        settings |= {key: "chosen by validation" for key in settings if key.startswith("method.lambda")}
    if settings.get("method.measurements") and not config.is_of_today():
        settings["method.measurements of"] = "another version"  # other numbers, by settings that are the same
    settings = known.setdefault(json.dumps(settings, sort_keys=True), settings)
    return FinishedRun(**{**vars(result), "name": folder.name}, folder=folder, settings=settings)


def result_settings(config: dict[str, Any]) -> dict[str, Any]:
    """The settings of a JSON configuration that decide the result, under dotted names."""
    flat = {key: value for key, value in flatten(config).items() if role(key, value) == "result"}
    return {key: json.dumps(value) if isinstance(value, list) else value for key, value in flat.items()}


def last_step(folder: Path) -> str:
    """The last recorded step of a run without result."""
    lines = read_latest(folder)
    return f"step {lines[-1].step}" if lines else "no step recorded"
