"""`ecgmatch choose`: the best settings of a finished sweep by validation, and a file of them that other sweeps take."""

import dataclasses
import re
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console
from rich.table import Table

from ecgmatch_dist.config import Config, flatten
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.files.atomic import write_text
from ecgmatch_dist.files.plain import plain_markup
from ecgmatch_dist.files.strict import check_format, read_toml
from ecgmatch_dist.launch.overrides import change
from ecgmatch_dist.launch.submissions import finished
from ecgmatch_dist.launch.sweep_plan import PlanEntry, read_plan
from ecgmatch_dist.record.result import read_result

FORMAT = 1
TAG = "chosen"
"""Of the runs with chosen settings. The report shows them as one row, although the settings differ between databases."""
HEAD = "# Made by `ecgmatch choose --write`: the settings with the highest mean validation MAP. Test results were not used.\n"


@dataclass(frozen=True)
class Choice:
    """The chosen settings of a method on one setting: a split without its seed."""

    setting: str
    method: str
    validation_map: float
    seeds: int
    of: int
    """Number of candidates."""
    settings: dict[str, Any]
    """{"method.lambda_u": 0.8, ...}."""


@dataclass(frozen=True)
class ChosenFile:
    """The file, as it is written."""

    format: int
    chosen: list[Choice] = field(default_factory=list)


def setting_of(split: Path) -> str:
    """splits/cross-ptbxl@0.01.s20.json -> cross-ptbxl@0.01."""
    return re.sub(r"\.s\d+$", "", split.name.removesuffix(".json"))


def make_choices(entries: Sequence[PlanEntry], runs: Path) -> list[Choice]:
    """The best candidate of each setting and method. All runs must be finished: the best of some is another choice."""
    compared = [entry for entry in entries if entry.starts]  # supervised starts are no candidates
    if missing := [entry.run for entry in compared if not finished(runs, entry.run)]:
        raise UserError(
            f"--write: {len(missing)} of {len(compared)} runs are not finished, the first is {missing[0]}; "
            "the same `ecgmatch sweep` command runs them"
        )
    groups: dict[tuple[str, str], dict[str, list[PlanEntry]]] = defaultdict(lambda: defaultdict(list))
    for entry in compared:
        groups[setting_of(Path(entry.config["split"])), entry.method][entry.tag].append(entry)
    out = []
    for (setting, method), candidates in sorted(groups.items()):
        scores = {
            tag: statistics.mean(read_result(runs / entry.run / "result.json").validation.map for entry in found)
            for tag, found in candidates.items()
        }
        best = max(scores, key=lambda tag: (scores[tag], tag == ""))  # of equal ones the method's own settings
        of_each = [flatten({"method": found[0].config["method"]}) for found in candidates.values()]
        varied = [key for key in of_each[0] if len({repr(settings[key]) for settings in of_each}) > 1]
        own = flatten({"method": candidates[best][0].config["method"]})
        chosen = {key: own[key] for key in varied}
        out.append(Choice(setting, method, scores[best], len(candidates[best]), len(scores), chosen))
    return out


def write_choices(path: Path, choices: Sequence[Choice]) -> None:
    """Write the choices, and keep those of other settings and methods that the file has."""
    known = {(c.setting, c.method): c for c in (read_choices(path) if path.exists() else ())}
    known |= {(choice.setting, choice.method): choice for choice in choices}
    lines = [HEAD, f"format = {FORMAT}\n"]
    for choice in (known[key] for key in sorted(known)):
        lines.append(
            f'\n[[chosen]]\nsetting = "{choice.setting}"\nmethod = "{choice.method}"\n'
            f"validation_map = {choice.validation_map:.6f}\nseeds = {choice.seeds}\nof = {choice.of}\n[chosen.settings]\n"
        )
        lines += [f'"{key}" = {toml_value(value)}\n' for key, value in choice.settings.items()]
    write_text(path, "".join(lines))


def toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else repr(value)


def read_choices(path: Path) -> tuple[Choice, ...]:
    file = read_toml(path, ChosenFile)
    check_format({"format": file.format}, FORMAT, path, "`ecgmatch choose --write` makes a new one")
    return tuple(file.chosen)


def apply_choices(planned: Sequence[tuple[Path, Config]], choices: Sequence[Choice]) -> list[tuple[Path, Config]]:
    """The runs of a comparison of methods, each with the settings that were chosen for its method and setting."""
    by_place = {(choice.setting, choice.method): choice.settings for choice in choices}
    searched = {choice.method for choice in choices}
    out = []
    for path, config in planned:
        if config.tag:
            raise UserError(
                f"--chosen: this sweep varies settings itself (tag {config.tag}); it is for within, cross and mix"
            )
        if config.method.name in searched:
            place = (setting_of(path), config.method.name)
            if place not in by_place:
                raise UserError(
                    f"--chosen: no choice for {place[1]} on {place[0]}; run the search there, or leave it out"
                )
            for key, value in by_place[place].items():
                config = change(config, key, value)
            config = dataclasses.replace(config, tag=TAG)
        out.append((path, config))
    if not any(config.tag for _, config in out):
        raise UserError("--chosen: the file has no method of this sweep")
    return out


def choose(sweep: tyro.conf.Positional[str], /, runs: Path = Path("runs"), write: Path | None = None) -> None:
    """Rank the settings of a sweep by their mean validation MAP over its splits. Test results are not used.

    Args:
        sweep: Name of a submitted sweep, or its file.
        runs: Folder of runs that it was submitted into.
        write: Write the best settings of each method on each setting to this file, for `ecgmatch sweep within --chosen FILE`.
            Choices that the file has for other methods and settings stay.
    """
    name, missing = Path(sweep).stem, 0
    values: dict[tuple[str, str], list[float]] = defaultdict(list)
    entries = read_plan(name, runs)
    for entry in entries:
        if not finished(runs, entry.run):
            missing += 1
            continue
        values[entry.method, entry.tag].append(read_result(runs / entry.run / "result.json").validation.map)
    if not values:
        raise UserError(f"{runs}: no run of the sweep {name} is finished")
    most = max(map(len, values.values()))
    ranked = sorted(values.items(), key=lambda item: (-len(item[1]), -statistics.mean(item[1])))
    table = Table(title=f"{name}: mean validation MAP", title_justify="left")
    for column in ("method", "settings", "MAP", "runs"):
        table.add_column(column, justify="right" if column in ("MAP", "runs") else "left")
    for (method, tag), scores in ranked:
        note = "" if len(scores) == most else f" of {most}"
        table.add_row(
            method, plain_markup(tag or "(defaults)"), f"{statistics.mean(scores):.4f}", f"{len(scores)}{note}"
        )
    Console().print(table)
    if missing:
        print(f"{missing} runs are not finished: only settings with all {most} splits can be compared")
    if write:
        choices = make_choices(entries, runs)
        write_choices(write, choices)
        print(f"{len(choices)} choices in {write}: ecgmatch sweep within --chosen {write}      (and cross, mix)")
