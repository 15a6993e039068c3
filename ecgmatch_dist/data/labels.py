"""Label schemes: from diagnostic codes to classes. Each scheme is a TOML file in `shards/labels/`.

A label has three states. 1: the recording has the class. 0: somebody has looked, and it has not. UNKNOWN: nobody has said. A
recording without any code is unknown in every class; the code `none` says that it has certainly none of them; `?STT` says that
nobody has looked for the class STT. Unknown is never a 0: not in a loss, not in a metric, not in a count.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ecgmatch_dist import resources
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.files.strict import convert, read_toml

UNKNOWN = 255
"""In labels (uint8): nobody has said whether the recording has this class. A sum that forgets it is wrong by hundreds."""
NONE = "none"
"""The code of a recording that certainly has no class."""
NOT_ANNOTATED = "?"
"""Before the short name of a class, as a code: nobody has looked for it."""


def known(labels: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Labels [n, C] -> [n], True where somebody has looked for at least one class."""
    looked: NDArray[np.bool_] = (labels != UNKNOWN).any(1)
    return looked


def normal_form(code: str) -> str:
    """Codes and names are compared without case; spaces inside them count as `_`, since manifests join codes by spaces."""
    return "_".join(code.split()).casefold()


@dataclass(frozen=True)
class LabelScheme:
    """C classes. A recording has each class of which it has a code; class `normal` only if that is its only code.

    A class's short and full name count as codes of it."""

    name: str
    classes: tuple[str, ...]
    short: tuple[str, ...]
    codes: tuple[frozenset[str], ...]
    normal: int | None
    drop_unlabelled: bool
    ignored: frozenset[str] = frozenset()
    """Codes that belong to no class on purpose, or patterns of them (`*`): they are no mistake."""
    annotates: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Database -> short names of the classes that it annotates, where these are not all."""

    @cached_property
    def _classes_of(self) -> dict[str, list[int]]:
        classes_of: dict[str, list[int]] = {}
        for c, codes in enumerate(self.codes):
            for code in codes:
                classes_of.setdefault(normal_form(code), []).append(c)
        for c, names in enumerate(zip(self.short, self.classes, strict=True)):
            for name in names:  # a code that is another class's name stays what it is
                classes_of.setdefault(normal_form(name), [c])
        return classes_of

    def matches(self, code: str) -> bool:
        """Whether the scheme knows the code, or the name of a class."""
        return normal_form(code) in self._classes_of

    def has_no_class(self, code: str) -> bool:
        """Whether a code belongs to no class, and is not `none`."""
        return not code.startswith(NOT_ANNOTATED) and not self.matches(code) and normal_form(code) != NONE

    def is_ignored(self, code: str) -> bool:
        """Whether the scheme says that the code belongs to no class."""
        return any(fnmatchcase(normal_form(code), normal_form(pattern)) for pattern in self.ignored)

    def says_normal(self, codes: Iterable[str]) -> bool:
        """Whether a code is one of the class `normal`, which counts only if it stands alone."""
        return self.normal is not None and any(self.normal in self._classes_of.get(normal_form(c), ()) for c in codes)

    def encode(self, codes: Sequence[str]) -> NDArray[np.uint8]:
        """The classes that the codes of one recording give: uint8 [C], 1 or 0."""
        label = np.zeros(len(self.classes), np.uint8)
        distinct = {normal_form(code) for code in codes if not code.startswith(NOT_ANNOTATED)}
        for code in distinct:
            label[self._classes_of.get(code, [])] = 1
        if self.normal is not None and len(distinct) != 1:
            label[self.normal] = 0
        return label

    def states(self, codes: Sequence[str]) -> NDArray[np.uint8]:
        """Codes of one recording -> uint8 [C], 1, 0 or UNKNOWN."""
        if all(code.startswith(NOT_ANNOTATED) for code in codes):  # also without any code
            return np.full(len(self.classes), UNKNOWN, np.uint8)
        label = self.encode(codes)
        for code in codes:
            if code.startswith(NOT_ANNOTATED):
                for c in self._classes_of.get(normal_form(code[1:]), []):
                    label[c] = label[c] or UNKNOWN  # another code of the class may say that it is there
        return label

    def states_all(self, codes: Iterable[str]) -> NDArray[np.uint8]:
        """Space-joined codes of n recordings -> uint8 [n, C], 1, 0 or UNKNOWN."""
        rows = [self.states(joined.split()) for joined in codes]
        return np.stack(rows) if rows else np.zeros((0, len(self.classes)), np.uint8)

    def encode_all(self, codes: Iterable[str]) -> NDArray[np.uint8]:
        """Space-joined codes of n recordings -> uint8 [n, C]."""
        rows = [self.encode(joined.split()) for joined in codes]
        return np.stack(rows) if rows else np.zeros((0, len(self.classes)), np.uint8)

    def names(self, label: NDArray[np.uint8]) -> tuple[str, ...]:
        """uint8 [C] -> short names of the classes that are set."""
        return tuple(self.short[c] for c in np.flatnonzero(label))


@dataclass(frozen=True)
class ClassEntry:
    """One `[[class]]` of a scheme's file."""

    name: str
    short: str
    codes: tuple[str, ...]
    only: bool = False
    """The class needs its code to be the recording's only code."""


@dataclass(frozen=True, kw_only=True)
class SchemeFile:
    """The TOML file of a scheme."""

    name: str
    unlabelled: Literal["drop", "keep"] = "drop"
    """What to do with recordings that have no class."""
    ignored: tuple[str, ...] = ()
    """Codes that belong to no class on purpose; `*` and `[0-9]` as in file names."""
    annotates: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Database -> short names of the classes that it annotates; a database that is not named annotates all."""
    class_: tuple[ClassEntry, ...]
    """The key `class`, which Python does not allow as a name."""


def load_scheme(name_or_path: str) -> LabelScheme:
    """The scheme of that name in `shards/labels/`, or the one in a .toml file."""
    path = resources.find("shards/labels", name_or_path)
    file = _read(path)
    _check(file.class_, path)
    short = [entry.short for entry in file.class_]
    for database, names in file.annotates.items():
        check_annotates(names, short, f"{path}: annotates.{database}")
    only = [c for c, entry in enumerate(file.class_) if entry.only]
    return LabelScheme(
        name=file.name,
        classes=tuple(entry.name for entry in file.class_),
        short=tuple(entry.short for entry in file.class_),
        codes=tuple(frozenset(entry.codes) for entry in file.class_),
        normal=only[0] if only else None,
        drop_unlabelled=file.unlabelled == "drop",
        ignored=frozenset(file.ignored),
        annotates=file.annotates,
    )


def _read(path: Path) -> SchemeFile:
    table = read_toml(path, dict[str, Any])
    if "class" in table:
        table["class_"] = table.pop("class")
    try:
        return convert(table, SchemeFile, "")
    except UserError as error:
        raise UserError(f"{path}{str(error).replace('class_', 'class')}") from None


def _check(entries: Sequence[ClassEntry], path: Path) -> None:
    for number, entry in enumerate(entries, 1):
        if entry.short.split() != [entry.short] or any(not code.strip() for code in entry.codes):
            raise UserError(f"{path}: class {number}: `short` must be a text without spaces, and no code may be empty")
    if len({entry.short for entry in entries}) != len(entries):
        raise UserError(f"{path}: two classes have the same `short` name; rename one")
    if (count := sum(entry.only for entry in entries)) > 1:
        raise UserError(f"{path}: `only = true` may be in one class, not in {count}")


def check_annotates(names: Sequence[str], short: Sequence[str], where: str) -> None:
    if strange := [name for name in names if name not in short]:
        raise UserError(f"{where}: `{strange[0]}` is no class of the scheme; known are {', '.join(short)}")
