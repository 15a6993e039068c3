"""Recipes: one TOML file in `shards/` per database. It says where recordings and labels are, and which counts to expect."""

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from ecgmatch_dist import resources
from ecgmatch_dist.data.formats.leads import check_layout
from ecgmatch_dist.data.formats.recording import Layout
from ecgmatch_dist.data.labels import LabelScheme, check_annotates, load_scheme
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.files.strict import read_toml


@dataclass(frozen=True)
class Signals(Layout):
    """How the recordings are stored. `rate`, `unit` and `leads` say what the files do not say themselves."""

    format: Literal["", "wfdb", "csv", "npy", "hdf5", "edf", "dicom", "xml", "scp", "clinical"] = ""
    """Empty: by the suffix or the content of each file."""
    missing: Literal["refuse", "zero"] = "refuse"
    """A recording that lacks a lead which cannot be derived is rejected, or the lead is zero."""
    segments: Literal["first", "all"] = "first"
    """Of a recording that is longer than the shards' length: its beginning, or all of it in pieces of one patient."""


@dataclass(frozen=True)
class LabelSource:
    """Where the codes, patient, age and sex of a recording are. `record` ... `sex` name the columns of the table.

    A table may have several rows for a recording, one cell with its codes, or one column per class or code (0 and 1)."""

    source: Literal["header", "csv"] = "header"
    """"header": the comments `Dx`, `Age`, `Sex` of each header; "csv": a table."""
    file: str = ""
    """The table, relative to the folder of recordings."""
    statements: str = ""
    """PTB-XL's scp_statements.csv, which must agree with the scheme's codes."""
    record: str = "record"
    codes: str = "dx"
    patient: str = "patient"
    fold: str = "fold"
    age: str = "age"
    sex: str = "sex"
    sex_values: dict[str, str] = field(default_factory=dict)
    """The table's values of `sex` -> "Male" or "Female"."""
    empty: Literal["unknown", "none"] = "unknown"
    """An empty cell of codes means: nobody has looked (unknown), or somebody has, and found no class (none)."""
    map: dict[str, str] = field(default_factory=dict)
    """Your own words -> codes or names of classes of the scheme, separated by commas."""


@dataclass(frozen=True)
class Expected:
    """Counts that the database should have; None or empty where they are not known."""

    recordings: int | None = None
    kept: int | None = None
    classes: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Recipe:
    """One database. `example_own.toml` explains each key."""

    database: str
    title: str = ""
    url: str = ""
    licence: str = ""
    folders: tuple[str, ...] = ()
    files: tuple[str, ...] = ("**/*.hea",)
    rename: tuple[tuple[str, str], ...] = ()
    scheme: str = "ecgmatch5"
    unlabelled: Literal["drop", "keep", ""] = ""
    """Empty: as the scheme says."""
    annotates: tuple[str, ...] = ()
    """Short names of the classes that the database's readers look for; empty: all. Others are unknown, not absent."""
    signals: Signals = Signals()
    labels: LabelSource = LabelSource()
    expected: Expected = Expected()

    def load_scheme(self) -> LabelScheme:
        return load_scheme(self.scheme)

    def key(self, stem: str) -> str:
        """A recording's name from its file's name without suffix."""
        for pattern, replacement in self.rename:
            stem = re.sub(pattern, replacement, stem)
        return safe_name(stem)


def safe_name(name: str) -> str:
    """A name that may be in a tar and in a manifest: letters, digits, _ and -; anything else, as a blank or a dot, is a _."""
    return re.sub(r"[^\w-]", "_", name, flags=re.ASCII)


def load_recipe(name_or_path: str) -> Recipe:
    """The recipe of that name in `shards/`, or the one in a .toml file."""
    path = resources.find("shards", name_or_path)
    recipe = read_toml(path, Recipe)
    if recipe.scheme.endswith(".toml"):
        recipe = replace(recipe, scheme=str(path.parent / recipe.scheme))
    _check(recipe, path)
    return recipe


def _check(recipe: Recipe, path: Path) -> None:
    """What the types do not say."""
    if not re.fullmatch(r"\w+", recipe.database, re.ASCII):
        raise UserError(f'{path}: database = "{recipe.database}": use letters, digits and _ only')
    if recipe.labels.source == "csv" and not recipe.labels.file:
        raise UserError(f'{path}: labels.source = "csv" needs labels.file, the name of the table')
    check_layout(recipe.signals, f"{path}: signals.")
    for pattern, replacement in recipe.rename:
        try:
            re.sub(pattern, replacement, "")
        except (re.error, IndexError) as error:
            raise UserError(
                f"{path}: rename: [{pattern!r}, {replacement!r}] must be a regular expression and its replacement ({error})"
            ) from None
    short = recipe.load_scheme().short
    check_annotates(recipe.annotates, short, f"{path}: annotates")
    for name in recipe.expected.classes:
        if name not in short:
            raise UserError(
                f"{path}: expected.classes: `{name}` is no class of {recipe.scheme}; known are {', '.join(short)}"
            )
