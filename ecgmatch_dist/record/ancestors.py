"""The models that a model began with (`--weights`), and what each of them has learnt from.

A run names the model before it in config.json, with a checksum. An exported folder lists all models before it. So one follows
the runs from one to the next until there is none, or until a folder is exported or gone.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ecgmatch_dist.config import DIGITS, WITH_TREES, parted
from ecgmatch_dist.data import archive
from ecgmatch_dist.data.index import file_sha256
from ecgmatch_dist.data.split_file import Split
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.files.plain import plain_line
from ecgmatch_dist.measurements import trees_file
from ecgmatch_dist.record.hub import INCLUDED, LICENCES, model_folder, weights_file

KEY = "begun_with"
"""In config.json of an exported model: the models before it, the nearest first."""
ARCHIVE = "archive"
"""In config.json of an exported model, and of each one before it: `from_archive`; where it is missing, it has not."""
BEGAN = "The weights began with "
"""In a model card."""


@dataclass(frozen=True)
class Ancestor:
    """A model before another one."""

    name: str
    """Without its folder, which may be private. Empty: nobody says whether there was a model."""
    databases: tuple[str, ...] = ()
    """What it has learnt from; empty: cannot be told."""
    folder: Path | None = None
    """Where it is; None: gone, or known by what an exported model says."""
    archive: bool = False
    """Whether it has also learnt from recordings of `data.archive`, whose databases nobody knows."""


def ancestors(folder: Path) -> list[Ancestor]:
    """The models before the one in `folder`, the nearest first. The last one may be unknown."""
    found: list[Ancestor] = []
    been: set[Path] = set()
    while folder.resolve() not in been:  # settings that somebody has changed could name each other in a circle
        been.add(folder.resolve())
        settings = _settings(folder)
        if settings is None:
            return [*found, Ancestor("")]
        if weights_file(folder)[1]:
            return found + _listed(settings.get(KEY))
        weights = str(settings.get("weights", ""))  # versions without the setting began with no model
        if not weights:
            return found
        before = _find(*parted(weights), folder.parent)
        found.append(before)
        if before.folder is None:
            return found
        folder = before.folder
    return found


def to_file(models: Sequence[Ancestor]) -> list[dict[str, Any]]:
    """For config.json of an exported model."""
    return [
        {"name": model.name, "databases": list(model.databases)} | ({ARCHIVE: True} if model.archive else {})
        for model in models
    ]


def attribution(models: Sequence[Ancestor]) -> str:
    """Where the weights began, and under which terms: a sentence or two for the model card. Empty: with no other model."""
    known = [model for model in models if model.name]
    told = []
    if known:
        told.append(f"{BEGAN}{', which began with '.join(map(_described, known))}.")
        told.append("Sources and licences of what it learnt from apply to these weights, too.")
    for name in dict.fromkeys(model.name for model in known if model.name in LICENCES):
        told.append(f"{name} comes with ecgmatch_dist under {LICENCES[name]}; its README.md names its sources.")
    if len(known) < len(models):
        told.append("Whether there was another model before cannot be told.")
    return " ".join(told)


def trained_on(folder: Path) -> tuple[str, ...]:
    """Databases that a model has learnt from, as its folder says: the split of a run, config.json of an exported model. Empty:
    unknown."""
    if (folder / "split.json").is_file():
        return Split.load(folder / "split.json").learnt_from
    return _names((_settings(folder) or {}).get("databases"))


def from_archive(folder: Path) -> bool:
    """Whether a model has also learnt from recordings of `data.archive`. A supervised run reads none of them, but its start may
    have."""
    settings = _settings(folder) or {}
    data = settings.get("data")
    named = isinstance(data, dict) and bool(data.get("archive"))
    read = (folder / archive.NAME).is_file() or settings.get("selfsupervised", "none") != "none"
    return settings.get(ARCHIVE) is True or (named and read)


def file_checksum(path: Path) -> str:
    return file_sha256(path)[:DIGITS]


def _find(name: str, checksum: str, beside: Path) -> Ancestor:
    """The model of this name and checksum. Folders move together: it may also lie beside the run that began with it."""
    last = Path(name).name or name
    wanted = checksum.partition(WITH_TREES)[0]
    for place in (name, beside / last, INCLUDED / last):
        try:
            folder, called = model_folder(place, fetch=False)
            if wanted not in ("", *_checksums(weights_file(folder)[0])):
                continue  # another model has this name now
        except (UserError, OSError):
            continue
        return Ancestor(plain_line(called), _trained_on(folder), folder, from_archive(folder))
    return Ancestor(plain_line(last))


def _checksums(weights: Path) -> tuple[str, ...]:
    """Of the weights, and of weights and trees in one, as some runs of before 0.2.0 have it."""
    trees = weights.with_name(trees_file.NAME)
    both = weights.read_bytes() + (trees.read_bytes() if trees.is_file() else b"")
    return file_checksum(weights), hashlib.sha256(both).hexdigest()[:DIGITS]


def _trained_on(folder: Path) -> tuple[str, ...]:
    try:
        return trained_on(folder)
    except UserError:  # a split that is broken says nothing about the run that is asked for
        return ()


def _settings(folder: Path) -> dict[str, Any] | None:
    """config.json as it is; None: there is none that can be read."""
    try:
        value = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _listed(value: object) -> list[Ancestor]:
    """The models that an exported one lists. An older version did not list them, a strange file lists something else."""
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        return [Ancestor("")]
    return [
        Ancestor(
            plain_line(str(entry.get("name", ""))), _names(entry.get("databases")), archive=entry.get(ARCHIVE) is True
        )
        for entry in value
    ]


def _names(value: object) -> tuple[str, ...]:
    return tuple(plain_line(str(name)) for name in value) if isinstance(value, list) else ()


def _described(model: Ancestor) -> str:
    return f"{model.name} (trained on {', '.join(model.databases)})" if model.databases else model.name
