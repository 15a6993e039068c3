"""Reading a folder of runs. What cannot be used is named with the reason, never dropped silently, and never ends the report."""

import json
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError, safe_open

DEPTH = 3
"""Folders below the given one in which runs are looked for: a sweep may keep its runs in a folder of its own."""
METRICS = ("map", "macro_auc", "macro_gbeta", "ranking_loss", "hamming_loss", "coverage")
PARTS = ("labelled", "unlabelled", "validation", "test")


class Damaged(Exception):
    """Why a run folder cannot be used."""


@dataclass(frozen=True)
class Problem:
    """A folder that is not, or not wholly, in the report."""

    folder: Path
    kind: Literal["damaged", "unfinished", "foreign", "duplicate", "incomplete"]
    reason: str


@dataclass(frozen=True, eq=False)
class Run:
    """A finished run, as its folder tells."""

    folder: Path
    name: str
    split: str
    split_sha256: str
    protocol: str
    databases: tuple[str, ...]
    test_database: str | None
    ratio: float
    seed: int
    scheme: str
    classes: tuple[str, ...]
    method: str
    tag: str
    steps: int
    best_step: int
    seconds: float
    world_size: int
    thresholds: tuple[float, ...]
    started_from: str | None
    meaning: str
    test: dict[str, Any]
    """The metrics on the test part; a number, or None where a metric is not defined."""
    settings: dict[str, Any]
    """The configuration as {"optim.lr": 0.03, ...}, without what does not change a result."""

    @cached_property
    def environment(self) -> dict[str, Any]:
        try:
            return read_object(self.folder / "environment.json")
        except Damaged:
            return {}

    @cached_property
    def signal(self) -> str:
        """Sampling rate and length, from the kept weights' notes; empty where they are not recorded."""
        try:
            with safe_open(self.folder / "best.safetensors", framework="numpy") as file:
                notes = {name: json.loads(value) for name, value in (file.metadata() or {}).items()}
            notes |= notes.get("preprocess", {})
            return f"{notes['rate']:g} Hz, 12 × {notes['length']:d}"
        except (OSError, SafetensorError, ValueError, KeyError, TypeError):
            return ""


def find_runs(root: Path, skip: Path) -> tuple[list[Run], list[Problem]]:
    """All finished runs under `root` by name, and everything there that is not one. `skip`: the report's own folder."""
    runs: list[Run] = []
    problems: list[Problem] = []
    seen: dict[tuple[str, str], Run] = {}
    for folder in run_folders(root, skip.resolve(), DEPTH, problems):
        try:
            run = read_run(folder)
        except Damaged as error:
            kind: Literal["unfinished", "damaged"] = "damaged" if (folder / "result.json").exists() else "unfinished"
            problems.append(Problem(folder, kind, str(error)))
            continue
        same = seen.setdefault((run.split_sha256, run.meaning), run)
        if same is not run:
            problems.append(
                Problem(folder, "duplicate", f"same split and settings as {same.folder.name}, which is used")
            )
            continue
        runs.append(run)
        if missing := [
            part
            for part in ("environment.json", "predictions/test.npz", "metrics.jsonl")
            if not (folder / part).is_file()
        ]:
            problems.append(
                Problem(
                    folder,
                    "incomplete",
                    f"no {' and no '.join(missing)}: its test metrics are used, the rest is left out",
                )
            )
    return sorted(runs, key=lambda run: run.name), sorted(problems, key=lambda p: (p.kind, str(p.folder)))


def run_folders(root: Path, skip: Path, depth: int, problems: list[Problem]) -> list[Path]:
    """Folders with a configuration or a result, at most `depth` levels below `root`; what holds none becomes a problem."""
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
        inner: list[Problem] = []
        inside = run_folders(child, skip, depth - 1, inner) if depth > 1 or is_run(child) else []
        if not inside and not any(problem.kind == "damaged" for problem in inner):
            inner = [Problem(child, "foreign", "neither config.json nor result.json: not a run folder")]
        found, problems[len(problems) :] = found + inside, inner
    return found


def is_run(folder: Path) -> bool:
    return (folder / "config.json").exists() or (folder / "result.json").exists()


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object from a file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise Damaged(f"no {path.name}") from None
    except OSError as error:
        raise Damaged(f"{path.name} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # broken JSON and broken UTF-8 are both ValueErrors
        raise Damaged(f"{path.name} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise Damaged(f"{path.name} holds a {type(value).__name__}, not an object")
    return value


def read_run(folder: Path) -> Run:
    """The run in `folder`; Damaged says why it is none."""
    config = read_object(folder / "config.json")
    if not (folder / "result.json").exists():
        raise Damaged(f"no result.json: the run is going on or was stopped ({last_step(folder)})")
    result = read_object(folder / "result.json")
    names, text = (
        strings(result, "classes"),
        {key: field(result, key, str) for key in ("split", "split_sha256", "protocol", "scheme", "method")},
    )
    thresholds = field(result, "thresholds", list)
    if len(thresholds) != len(names):
        raise Damaged(f"result.json: {len(thresholds)} thresholds for {len(names)} classes")
    return Run(
        folder=folder,
        name=folder.name,
        **text,
        databases=tuple(strings(result, "databases")),
        test_database=None if result.get("test_database") is None else field(result, "test_database", str),
        ratio=number(result, "ratio"),
        seed=field(result, "seed", int),
        classes=tuple(names),
        tag=str(result.get("tag") or ""),
        steps=field(result, "steps", int),
        best_step=field(result, "best_step", int),
        seconds=number(result, "seconds"),
        world_size=field(result, "world_size", int),
        thresholds=tuple(number({"thresholds": value}, "thresholds") for value in thresholds),
        started_from=result.get("started_from") if isinstance(result.get("started_from"), str) else None,
        meaning=field(result, "config_meaning", str),
        test=metrics(field(result, "test", dict), names),
        settings=settings(config),
    )


def field(value: dict[str, Any], key: str, kind: type) -> Any:
    """value[key], which must be there and of this kind."""
    if key not in value:
        raise Damaged(f"result.json has no `{key}`")
    if not isinstance(value[key], kind) or isinstance(value[key], bool):
        raise Damaged(f"result.json: `{key}` is {value[key]!r:.60}, not a {kind.__name__}")
    return value[key]


def number(value: dict[str, Any], key: str) -> float:
    entry = field(value, key, int if isinstance(value.get(key), int) else float)
    if not math.isfinite(entry):
        raise Damaged(f"result.json: `{key}` is {entry}, not a finite number")
    return float(entry)


def strings(value: dict[str, Any], key: str) -> list[str]:
    entries: list[str] = field(value, key, list)
    if not entries or not all(isinstance(entry, str) for entry in entries):
        raise Damaged(f"result.json: `{key}` must be names, at least one")
    return entries


def metrics(test: dict[str, Any], classes: list[str]) -> dict[str, Any]:
    """The test metrics, checked: numbers, or None where a metric is undefined."""
    for name in METRICS:
        if test.get(name, "absent") is not None:
            number(test, name)
    of_class = field(test, "per_class", dict)
    for short in classes:
        values = field(of_class, short, dict)
        for name in ("ap", "gbeta"):
            if values.get(name) is not None:
                number(values, name)
    return test


NOT_RESULT = (
    "split",
    "shards",
    "runs",
    "name",
    "tag",
    "seed",
    "meaning",
    "runtime",
    "bank.shard_group",
    "bank.backend",
    "bank.overlap",
)


def settings(config: dict[str, Any], where: str = "") -> dict[str, Any]:
    """Nested settings as one level of dotted names, without folders, names, seeds and the way of execution."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{where}{key}"
        if name in NOT_RESULT:
            continue
        if isinstance(value, dict):
            flat |= settings(value, f"{name}.")
        else:
            flat[name] = json.dumps(value) if isinstance(value, list) else value
    return flat


def last_step(folder: Path) -> str:
    """How far a run without result has come."""
    try:
        with (folder / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, (folder / "metrics.jsonl").stat().st_size - 65536))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return "no step recorded"
    for line in reversed(lines):
        try:
            return f"step {json.loads(line)['step']}"
        except (ValueError, KeyError, TypeError):
            continue
    return "no step recorded"
