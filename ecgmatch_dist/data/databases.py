"""Databases as recipes: one TOML file in `shards/` says where recordings and labels lie and what to expect of them."""

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ecgmatch_dist import recipes
from ecgmatch_dist.data.labels import LabelScheme, check_keys, load_scheme
from ecgmatch_dist.errors import UserError


@dataclass(frozen=True)
class LabelSource:
    """Where codes, patient, age and sex of a recording stand. Fields `record` ... `sex` are the columns' names."""

    source: str = "header"
    """"header": the comments `Dx`, `Age`, `Sex` of each header; "csv": a table."""
    file: str = ""
    """The table, relative to the folder of recordings."""
    statements: str = ""
    """PTB-XL's scp_statements.csv, against which the scheme's codes are checked."""
    record: str = "record"
    codes: str = "dx"
    patient: str = "patient"
    fold: str = "fold"
    age: str = "age"
    sex: str = "sex"
    sex_values: dict[str, str] = field(default_factory=dict)
    """What the table's values of `sex` mean."""


@dataclass(frozen=True)
class Expected:
    """What the database should give; None or empty where it is not known beforehand."""

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
    unlabelled: str = ""
    labels: LabelSource = LabelSource()
    expected: Expected = Expected()

    def load_scheme(self) -> LabelScheme:
        return load_scheme(self.scheme)

    def key(self, stem: str) -> str:
        """A recording's name from its header's file name without suffix."""
        for pattern, replacement in self.rename:
            stem = re.sub(pattern, replacement, stem)
        return stem


RECIPE_KEYS: dict[str, type] = {
    **dict.fromkeys(("database", "title", "url", "licence", "scheme", "unlabelled"), str),
    **dict.fromkeys(("folders", "files", "rename"), list),
    **dict.fromkeys(("labels", "expected"), dict),
}
LABEL_KEYS: dict[str, type] = {
    **dict.fromkeys(("source", "file", "statements", "record", "codes", "patient", "fold", "age", "sex"), str),
    "sex_values": dict,
}
EXPECTED_KEYS: dict[str, type] = {"recordings": int, "kept": int, "classes": dict}


def load_recipe(name_or_path: str) -> Recipe:
    """The recipe of that name in `shards/`, or the one in a .toml file."""
    path = recipes.find("shards", name_or_path)
    try:
        table = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not a TOML file ({error})") from None
    return _parse(table, path)


def _parse(table: dict[str, Any], path: Path) -> Recipe:
    check_keys(table, RECIPE_KEYS, str(path), required=("database",))
    labels, expected = table.get("labels", {}), table.get("expected", {})
    check_keys(labels, LABEL_KEYS, f"{path}: [labels]")
    check_keys(expected, EXPECTED_KEYS, f"{path}: [expected]")
    if not re.fullmatch(r"\w+", table["database"], re.ASCII):
        raise UserError(f'{path}: database = "{table["database"]}": use letters, digits and _ only')
    source = LabelSource(**labels)
    if source.source not in ("header", "csv"):
        raise UserError(f'{path}: [labels] source = "{source.source}": give "header" or "csv"')
    if source.source == "csv" and not source.file:
        raise UserError(f'{path}: [labels] source = "csv" needs `file`')
    if table.get("unlabelled", "") not in ("", "drop", "keep"):
        raise UserError(f'{path}: unlabelled = "{table["unlabelled"]}": give "drop" or "keep"')
    scheme = table.get("scheme", Recipe.scheme)
    if scheme.endswith(".toml"):
        scheme = str(path.parent / scheme)
    recipe = Recipe(
        **{key: table[key] for key in ("database", "title", "url", "licence", "unlabelled") if key in table},
        folders=_strings(table.get("folders", Recipe.folders), "folders", path),
        files=_strings(table.get("files", Recipe.files), "files", path),
        rename=tuple(_pair(pair, path) for pair in table.get("rename", ())),
        scheme=scheme,
        labels=source,
        expected=Expected(**expected),
    )
    short = recipe.load_scheme().short
    for name in recipe.expected.classes:
        if name not in short:
            raise UserError(
                f"{path}: [expected] classes: `{name}` is no class of {scheme}; known are {', '.join(short)}"
            )
    return recipe


def _strings(values: Sequence[object], key: str, path: Path) -> tuple[str, ...]:
    if not all(isinstance(value, str) for value in values):
        raise UserError(f"{path}: `{key}` must be a list of strings, not {values!r}")
    return tuple(str(value) for value in values)


def _pair(pair: object, path: Path) -> tuple[str, str]:
    if not isinstance(pair, list) or [type(word) for word in pair] != [str, str]:
        raise UserError(f"{path}: `rename` must be a list of [regular expression, replacement], not {pair!r}")
    try:
        re.sub(pair[0], pair[1], "")
    except (re.error, IndexError) as error:
        raise UserError(f"{path}: `rename`: {pair!r}: {error}") from None
    return pair[0], pair[1]
