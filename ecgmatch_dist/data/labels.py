"""Label schemes: from diagnostic codes to multi-hot classes, each scheme a TOML file in `shards/labels/`."""

import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ecgmatch_dist import recipes
from ecgmatch_dist.errors import UserError


@dataclass(frozen=True)
class LabelScheme:
    """C classes. A recording is of each class of which it has a code; of class `normal` only with no other."""

    name: str
    classes: tuple[str, ...]
    short: tuple[str, ...]
    codes: tuple[frozenset[str], ...]
    normal: int | None
    drop_unlabelled: bool

    @cached_property
    def _classes_of(self) -> dict[str, list[int]]:
        classes_of: dict[str, list[int]] = {}
        for c, codes in enumerate(self.codes):
            for code in codes:
                classes_of.setdefault(code, []).append(c)
        return classes_of

    def encode(self, codes: Sequence[str]) -> NDArray[np.uint8]:
        """Codes of one recording -> uint8 [C]."""
        label = np.zeros(len(self.classes), np.uint8)
        distinct = set(codes)
        for code in distinct:
            label[self._classes_of.get(code, [])] = 1
        if self.normal is not None and len(distinct) != 1:
            label[self.normal] = 0
        return label

    def encode_all(self, codes: Iterable[str]) -> NDArray[np.uint8]:
        """Space-joined codes of n recordings -> uint8 [n, C]."""
        rows = [self.encode(joined.split()) for joined in codes]
        return np.stack(rows) if rows else np.zeros((0, len(self.classes)), np.uint8)

    def names(self, label: NDArray[np.uint8]) -> tuple[str, ...]:
        """uint8 [C] -> short names of the classes that are set."""
        return tuple(self.short[c] for c in np.flatnonzero(label))


def load_scheme(name_or_path: str) -> LabelScheme:
    """The scheme of that name in `shards/labels/`, or the one in a .toml file."""
    path = recipes.find("shards/labels", name_or_path)
    try:
        table = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not a TOML file ({error})") from None
    return _parse(table, path)


def _parse(table: dict[str, Any], path: Path) -> LabelScheme:
    check_keys(table, {"name": str, "unlabelled": str, "class": list}, str(path), required=("name", "class"))
    entries = table["class"]
    for number, entry in enumerate(entries, 1):
        known = {"name": str, "short": str, "codes": list, "only": bool}
        check_keys(entry, known, f"{path}: class {number}", required=("name", "short", "codes"))
        if " " in entry["short"] or not all(
            isinstance(code, str) and code.split() == [code] for code in entry["codes"]
        ):
            raise UserError(f"{path}: class {number}: `short` and each of `codes` must be a string without spaces")
    short = tuple(entry["short"] for entry in entries)
    only = [c for c, entry in enumerate(entries) if entry.get("only", False)]
    if len(set(short)) != len(short):
        raise UserError(f"{path}: two classes have the same `short` name")
    if len(only) > 1:
        raise UserError(f"{path}: `only = true` may stand in one class, not in {len(only)}")
    if table.get("unlabelled", "drop") not in ("drop", "keep"):
        raise UserError(f'{path}: unlabelled = "{table["unlabelled"]}": give "drop" or "keep"')
    return LabelScheme(
        name=table["name"],
        classes=tuple(entry["name"] for entry in entries),
        short=short,
        codes=tuple(frozenset(entry["codes"]) for entry in entries),
        normal=only[0] if only else None,
        drop_unlabelled=table.get("unlabelled", "drop") == "drop",
    )


def check_keys(table: object, known: dict[str, type], where: str, required: Sequence[str] = ()) -> None:
    """Refuse keys that are unknown, missing or of another type, with the field's name and the known ones."""
    if not isinstance(table, dict):
        raise UserError(f"{where}: a table is needed here, not {table!r}")
    for key, value in table.items():
        if key not in known:
            raise UserError(f"{where}: unknown key `{key}`; known are {', '.join(known)}")
        if type(value) is not known[key]:
            raise UserError(f"{where}: `{key}` must be a {known[key].__name__}, not {value!r}")
    for key in required:
        if key not in table:
            raise UserError(f"{where}: the key `{key}` is missing")
