"""A sweep's TOML file -> its runs, each with its configuration, and the runs that they start from."""

import dataclasses
import itertools
import re
import string
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ecgmatch_dist import resources
from ecgmatch_dist.config import Config, fitted, flatten
from ecgmatch_dist.data.split_file import Split
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.files.strict import read_toml
from ecgmatch_dist.launch.overrides import change
from ecgmatch_dist.presets import PRESETS
from ecgmatch_dist.record.start_weights import pinned


@dataclass(frozen=True, kw_only=True)
class SweepFile:
    """A file of `launch/`, as it is written."""

    about: str = ""
    preset: str = "paper"
    split: str
    """Name of a split file, with {axes} of the grid."""
    grid: dict[str, Any]
    """Values of each axis."""
    settings: dict[str, Any] = field(default_factory=dict)
    """For all runs."""
    variants: list[dict[str, Any]] = field(default_factory=lambda: [{}])
    """Each is a set of settings; `tag` names it."""


@dataclass(frozen=True)
class Sweep:
    """A sweep whose grid, settings and variants have dotted keys ("optim.lr")."""

    name: str
    about: str
    preset: str
    split: str
    grid: dict[str, list[Any]]
    settings: dict[str, Any]
    variants: list[dict[str, Any]]


@dataclass(frozen=True)
class PlannedRun:
    """One run of a sweep."""

    name: str
    config: Config
    starts: tuple[str, ...]
    """Names of the runs that it starts from."""
    steps: int = 0
    """That it takes on its split; 0: at most `optim.steps`, the split file is missing."""


@dataclass(frozen=True)
class KnownSplit:
    """What is known of a split before its runs begin. Its file may be missing: then its file name is its name."""

    name: str
    sizes: tuple[int, int] | None
    """Labelled and unlabelled recordings."""

    @classmethod
    def read(cls, path: Path) -> "KnownSplit":
        if not path.is_file():
            return cls(path.stem, None)
        split = Split.load(path)
        return cls(split.name, (split.size("labelled"), split.size("unlabelled")))

    def steps(self, config: Config) -> int:
        """Of a run on this split; 0: not known."""
        if self.sizes is None:
            return 0 if config.optim.passes else config.optim.steps
        return fitted(config, *self.sizes).optim.steps


def load_sweep(name: str) -> Sweep:
    """The sweep of this name in launch/, or of a .toml file."""
    path = resources.find("launch", name)
    file = read_toml(path, SweepFile)
    grid = flatten(file.grid)
    for key, values in grid.items():
        if not isinstance(values, list) or not values or len(set(map(repr, values))) < len(values):
            raise UserError(f"{path}: grid.{key} = {values!r}: a list of different values")
    if missing := placeholders(file.split) - set(grid):
        raise UserError(f"{path}: the split `{file.split}` needs grid.{sorted(missing)[0]}")
    variants = [flatten(variant) for variant in file.variants]
    return Sweep(path.stem, file.about, file.preset, file.split, grid, flatten(file.settings), variants)


def placeholders(template: str) -> set[str]:
    """The axes in a split's name: "mix@0.01.s{seed}" -> {"seed"}."""
    try:
        fields = [field for field in string.Formatter().parse(template) if field[1] is not None]
    except ValueError as error:
        raise UserError(f"the split `{template}`: {error}; write {{axis}} for an axis of the grid") from None
    # Nothing beside the name: {seed:1000000000} would fill the memory with blanks.
    if any(not name or spec or conversion for _, name, spec, conversion in fields):
        raise UserError(f"the split `{template}`: write {{axis}} for an axis of the grid, and nothing else in braces")
    return {str(name) for _, name, _, _ in fields}


def configurations(sweep: Sweep, base: Config, splits: Path) -> list[tuple[Path, Config]]:
    """The split file and the configuration of each run, in the order of the grid. Unknown settings are refused here."""
    split_axes = placeholders(sweep.split)
    out = []
    for point in itertools.product(*sweep.grid.values()):
        values = dict(zip(sweep.grid, point, strict=True))
        path = splits / f"{sweep.split.format(**{k: v for k, v in values.items() if k in split_axes})}.json"
        unchanged = change(base, "method", values["method"]) if "method" in values else base
        axes = {k: v for k, v in values.items() if k not in split_axes and k != "method"}
        for variant in sweep.variants:
            config = unchanged
            for key, value in (axes | {k: v for k, v in variant.items() if k != "tag"}).items():
                config = change(config, key, value)
            changed = [f"{k.rpartition('.')[2]}={v}" for k, v in axes.items() if change(unchanged, k, v) != unchanged]
            tag = ",".join(filter(None, [str(variant.get("tag", "")), *changed]))
            # A point that changes nothing is the method itself. Without a tag, other sweeps share its run.
            out.append((path, dataclasses.replace(config, tag=tag if config != unchanged else "", split=path)))
    return out


def plan_runs(
    sweep: Sweep,
    base: Config,
    splits: Path,
    adapt: Callable[[list[tuple[Path, Config]]], list[tuple[Path, Config]]] = list,
) -> list[PlannedRun]:
    """All runs, each after those that it starts from; one that several others start from appears once. `adapt` may change the
    configurations."""
    runs: dict[str, PlannedRun] = {}
    supervised = pinned(change(base, "method", "supervised").settled())
    plain = {supervised.fingerprint(), *(supervised.start().fingerprint() for _ in range(supervised.starts))}
    known_splits: dict[Path, KnownSplit] = {}

    def add(config: Config, split: KnownSplit, starts: tuple[str, ...] = ()) -> str:
        name = config.run_name(split.name)
        known = runs.setdefault(name, PlannedRun(name, config, starts, split.steps(config)))
        if known.config.fingerprint() != config.fingerprint():
            raise UserError(f"sweep {sweep.name}: two different runs would be called {name}; give the variants tags")
        return name

    def add_chain(config: Config, split: KnownSplit, tag: str) -> str:
        """Add a run of the variant `tag` after all that it starts from."""
        starts = []
        for member in range(config.starts):
            # Starts that the sweep does not change go without its tag, so that all runs share them.
            start = config.start(member)
            tags = ["" if config.start().fingerprint() in plain else tag, start.tag]
            starts.append(add_chain(dataclasses.replace(start, tag=",".join(filter(None, tags))), split, tag))
        return add(config, split, tuple(starts))

    for path, config in adapt(configurations(sweep, base, splits)):
        if path not in known_splits:
            known_splits[path] = KnownSplit.read(path)
        config = pinned(config.settled())
        tag = "" if config.method.is_start and config.fingerprint() in plain else config.tag
        add_chain(dataclasses.replace(config, tag=tag), known_splits[path], tag)

    def links(run: PlannedRun) -> int:
        """Length of the chain that ends with this run."""
        return 1 + max((links(runs[start]) for start in run.starts), default=0)

    return sorted(runs.values(), key=links)


def base_config(sweep: Sweep, preset: str, shards: str, runs: Path, changes: tuple[str, ...]) -> Config:
    """The preset, changed by the sweep's settings for all runs, then by `--set key=value` (the value as in TOML)."""
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
    """A value of --set: as in TOML, but simple words need no quotes."""
    if re.fullmatch(r"[A-Za-z_][\w./-]*", text) and text not in ("true", "false", "inf", "nan"):
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"--set ...={text}: {error}; texts that are not one word need quotes") from error
