"""What a sweep consists of: its TOML file -> runs, each with its configuration, and the supervised runs they start from."""

import dataclasses
import itertools
import re
import string
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ecgmatch_dist import recipes
from ecgmatch_dist.config import Config
from ecgmatch_dist.data.splits import Split
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.launch.settings import change, flatten, settled
from ecgmatch_dist.methods.configs import Supervised
from ecgmatch_dist.presets import PRESETS

KEYS = ("about", "preset", "split", "grid", "settings", "variants")


@dataclass(frozen=True)
class Sweep:
    """A file of `launch/`: `split` is the name of a split file with {axes}, `grid` the values of each axis."""

    name: str
    about: str
    preset: str
    split: str
    grid: dict[str, list[Any]]
    settings: dict[str, Any] = field(default_factory=dict)
    """For all runs, by dotted keys."""
    variants: list[dict[str, Any]] = field(default_factory=lambda: [{}])
    """Each is a set of settings by dotted keys; `tag` names it."""


@dataclass(frozen=True)
class Run:
    """One run of a sweep."""

    name: str
    config: Config
    starts: tuple[str, ...]
    """Names of the supervised runs that it starts from."""


def load(name: str) -> Sweep:
    """The sweep of this name in launch/, or of a .toml file."""
    path = recipes.find("launch", name)
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path}: {error}") from error
    if unknown := set(table) - set(KEYS):
        raise UserError(f"{path}: unknown key `{sorted(unknown)[0]}`; known are {', '.join(KEYS)}")
    for key in ("split", "grid"):
        if key not in table:
            raise UserError(f"{path}: `{key}` is missing")
    grid = flatten(table["grid"])
    for key, values in grid.items():
        if not isinstance(values, list) or not values or len(set(map(repr, values))) < len(values):
            raise UserError(f"{path}: grid.{key} = {values!r}: a list of different values")
    sweep = Sweep(
        name=path.stem,
        about=str(table.get("about", "")),
        preset=str(table.get("preset", "paper")),
        split=str(table["split"]),
        grid=grid,
        settings=flatten(table.get("settings", {})),
        variants=[flatten(variant) for variant in table.get("variants", [{}])],
    )
    if missing := placeholders(sweep.split) - set(grid):
        raise UserError(f"{path}: the split `{sweep.split}` needs grid.{sorted(missing)[0]}")
    return sweep


def placeholders(template: str) -> set[str]:
    return {name for _, name, _, _ in string.Formatter().parse(template) if name}


def configurations(sweep: Sweep, base: Config, splits: Path) -> list[tuple[Path, Config]]:
    """The split file and the configuration of each run, in the order of the grid; unknown keys fail here."""
    where = placeholders(sweep.split)
    out = []
    for point in itertools.product(*sweep.grid.values()):
        values = dict(zip(sweep.grid, point, strict=True))
        path = splits / f"{sweep.split.format(**{k: v for k, v in values.items() if k in where})}.json"
        at = change(base, "method", values["method"]) if "method" in values else base
        axes = {k: v for k, v in values.items() if k not in where and k != "method"}
        for variant in sweep.variants:
            config = at
            for key, value in (axes | {k: v for k, v in variant.items() if k != "tag"}).items():
                config = change(config, key, value)
            changed = [f"{k.rpartition('.')[2]}={v}" for k, v in axes.items() if change(at, k, v) != at]
            tag = ",".join(filter(None, [str(variant.get("tag", "")), *changed]))
            # A point that changes nothing is the method itself: it is shared with the sweeps that compare methods.
            out.append((path, dataclasses.replace(config, tag=tag if config != at else "", split=path)))
    return out


def plan(sweep: Sweep, base: Config, splits: Path, need_splits: bool = True) -> list[Run]:
    """All runs, supervised ones first; those that several others start from appear once.

    `need_splits` false: do without the split files, as far as their names tell.
    """
    runs: dict[str, Run] = {}
    usual = {_plain(settled(change(base, "method", "supervised"))).meaning()}
    named: dict[Path, str] = {}

    def add(config: Config, split: str, starts: tuple[str, ...] = ()) -> str:
        name = config.run_name(split)
        known = runs.setdefault(name, Run(name, config, starts))
        if known.config.meaning() != config.meaning():
            raise UserError(f"sweep {sweep.name}: two different runs would be called {name}; give the variants tags")
        return name

    for path, config in configurations(sweep, base, splits):
        if path not in named:
            named[path] = Split.load(path).name if need_splits or path.is_file() else path.stem
        config, starts = settled(config), []
        for member in range(config.committee):
            # The supervised runs of unchanged settings share one name, whatever else the sweep varies.
            start = config.supervised(member)
            tags = ["" if config.supervised(0).meaning() in usual else config.tag, start.tag]
            starts.append(add(dataclasses.replace(start, tag=",".join(filter(None, tags))), named[path]))
        if isinstance(config.method, Supervised) and config.meaning() in usual:
            config = _plain(config)
        add(config, named[path], tuple(starts))
    return sorted(runs.values(), key=lambda run: bool(run.starts))


def _plain(config: Config) -> Config:
    return dataclasses.replace(config, tag="")


def base_config(sweep: Sweep, preset: str, shards: str, runs: Path, changes: tuple[str, ...]) -> Config:
    """The preset, the sweep's settings for all runs, and `--set key=value` from the command line (the value as in TOML)."""
    preset = preset or sweep.preset
    if preset not in PRESETS:
        raise UserError(f"preset {preset}: known are {', '.join(PRESETS)}")
    config = dataclasses.replace(PRESETS[preset](), shards=shards, runs=runs)
    for key, value in sweep.settings.items():
        config = change(config, key, value)
    for text in changes:
        key, equals, value = text.partition("=")
        if not equals:
            raise UserError(f"--set {text}: key=value, as in optim.steps=1000")
        config = change(config, key.strip(), parse_value(value.strip()))
    return config


def parse_value(text: str) -> Any:
    if re.fullmatch(r"[A-Za-z_][\w./-]*", text) and text not in ("true", "false", "inf", "nan"):
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"--set ...={text}: {error}; texts with other signs need quotes") from error
