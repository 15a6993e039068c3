"""Codes, patient, age, sex and fold of recordings: from the comments of a header, or from a table of labels."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from ecgmatch_dist.data.databases import LabelSource, Recipe
from ecgmatch_dist.data.label_table import LabelTable, read_table
from ecgmatch_dist.data.labels import NONE, NOT_ANNOTATED, LabelScheme, normal_form
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.files.plain import plain_cell

YES = {"1", "x", "y", "yes", "true", "t", "ja", "+"}
NO = {"0", "n", "no", "false", "f", "nein"}
NOTHING = {"", "unknown", "nan", "na", "n/a", "null", "?", "-"}
"""Cells that say that nobody has looked."""


@dataclass(frozen=True)
class Annotation:
    codes: tuple[str, ...]
    patient: str = ""
    age: str = ""
    sex: str = ""
    fold: str = ""


def parse_comments(comments: Sequence[str]) -> Annotation:
    """Header comments such as `#Dx: 1,2` or `# Dx: 1,2`."""
    fields: dict[str, str] = {}
    for comment in comments:
        name, _, value = comment.strip(" \t#").partition(":")
        fields[name.strip().lower()] = value
    return Annotation(
        parse_codes(fields.get("dx", "")), "", _age(fields.get("age", "")), _sex(fields.get("sex", ""), {})
    )


def parse_codes(text: str) -> tuple[str, ...]:
    """Codes separated by commas, semicolons or spaces, or the keys of a {'code': likelihood} table as in PTB-XL."""
    text = text.strip()
    if text.startswith("{"):
        try:
            keys = json.loads(text.replace("'", '"'))
        except (ValueError, RecursionError):
            raise UserError(
                f"codes `{text[:60]}`: give codes separated by commas, or a {{'code': likelihood}} table"
            ) from None
        return tuple(code for key in keys if (code := as_code(key)))
    words = re.split(r"[\s,;]+", text)
    return tuple(as_code(code) for code in words if code and code.lower() not in ("unknown", "nan"))


def as_code(text: str) -> str:
    """A code as the tables of shards hold it: without spaces, control characters and spreadsheet formulas."""
    return plain_cell("_".join(text.split()))


def _age(text: str) -> str:
    try:
        age = float(text.replace(",", "."))  # Excel's decimal comma
    except ValueError:
        return ""
    return f"{age:g}" if np.isfinite(age) else ""


def _sex(text: str, values: dict[str, str]) -> str:
    text = values.get(text.strip(), text.strip())
    return {"m": "Male", "male": "Male", "f": "Female", "w": "Female", "female": "Female"}.get(text.lower(), "")


def read_annotations(
    recipe: Recipe,
    source: LabelSource,
    file: Path,
    stem: Callable[[str], str] = lambda cell: Path(cell).stem,
    find_columns: Callable[[LabelSource, LabelTable], LabelSource] = lambda source, _: source,
) -> dict[str, Annotation]:
    """Read the table of labels: name of a recording -> annotation. Rows of the same recording are joined. `stem` takes folder
    and suffix from a cell; `find_columns` fills in what `source` leaves open."""
    table = read_table(file)
    return annotate(table, find_columns(source, table), recipe.load_scheme(), lambda cell: recipe.key(stem(cell)))


def annotate(
    table: LabelTable, source: LabelSource, scheme: LabelScheme, name: Callable[[str], str]
) -> dict[str, Annotation]:
    """Annotations by recording; `name` makes a recording's name from its cell."""
    one_hot = () if source.codes in table.columns else class_columns(table, source, scheme)
    for column in (source.record, source.codes):
        if column not in table.columns and not (one_hot and column == source.codes):
            raise UserError(f"{table.file}: no column `{column}`; there are {', '.join(table.columns) or 'none'}")
    says_no = any(row[column].casefold() in NO for row in table.rows for column in one_hot)
    annotations: dict[str, Annotation] = {}
    for row, line in zip(table.rows, table.lines, strict=True):
        where = f"{table.file}: line {line}"
        codes = (
            read_marks({column: row[column] for column in one_hot}, says_no, source.empty, where)
            if one_hot
            else read_cell(row[source.codes], scheme, source)
        )
        new = _annotate(row, source, codes)
        key = name(row[source.record])
        annotations[key] = join(annotations[key], new, f"{where}: {key}") if key in annotations else new
    return annotations


def class_columns(table: LabelTable, source: LabelSource, scheme: LabelScheme) -> tuple[str, ...]:
    """Columns that are named like a class or a code of the scheme: one mark per recording."""
    others = {source.record, source.patient, source.fold, source.age, source.sex}
    return tuple(column for column in table.columns if column not in others and scheme.matches(column))


def read_cell(text: str, scheme: LabelScheme, source: LabelSource) -> tuple[str, ...]:
    """Codes, names of classes or own words of one cell, separated by comma, semicolon, bar, tab or line break. Words that are
    separated by spaces alone are several codes if the scheme knows one of them or all are numbers, else one free text."""
    if text.startswith("{"):
        return parse_codes(text)
    own = {normal_form(word): meaning for word, meaning in source.map.items()}
    found: list[str] = []
    for piece in re.split(r"[,;|\t\r\n]+", text):
        if normal_form(piece) in own:
            found += [part.strip() for part in own[normal_form(piece)].split(",")]
            continue
        words = piece.split()
        several = not scheme.matches(piece) and (
            any(scheme.matches(w) for w in words) or all(w.isdigit() for w in words)
        )
        found += words if several else [piece]
    codes = tuple(as_code(code) for code in found)
    codes = tuple(code for code in codes if code and code.casefold() not in NOTHING)
    return codes or ((NONE,) if source.empty == "none" else ())


def read_marks(marks: dict[str, str], says_no: bool, empty: Literal["unknown", "none"], where: str) -> tuple[str, ...]:
    """One row of marks -> codes. A blank means "not looked for" where the table says no elsewhere (`says_no`); in a table of
    crosses alone it means no, unless the row has none at all."""
    yes: list[str] = []
    no: list[str] = []
    blank: list[str] = []
    for column, mark in marks.items():
        word = mark.casefold().removesuffix(".0").removesuffix(",0")
        if word not in YES | NO | NOTHING | {""}:
            raise UserError(f"{where}: column {column} holds `{mark}`; write 1, 0, or nothing where nobody has looked")
        (yes if word in YES else no if word in NO else blank).append("_".join(column.split()))
    if empty == "none" or (yes and not says_no):
        no, blank = no + blank, []
    if not yes and not no:
        return ()
    return (*(yes or [NONE]), *(NOT_ANNOTATED + column for column in blank))


def join(old: Annotation, new: Annotation, where: str) -> Annotation:
    """Two rows of one recording: the codes of both, and what only one of them says of the patient."""
    joined = {}
    for field in ("patient", "age", "sex", "fold"):
        first, second = getattr(old, field), getattr(new, field)
        if first and second and first != second:
            raise UserError(f"{where} has rows with {field} {first} and {second}; correct one")
        joined[field] = first or second
    codes = tuple(dict.fromkeys((*old.codes, *new.codes)))
    found = any(code != NONE and not code.startswith(NOT_ANNOTATED) for code in codes)
    return Annotation(tuple(code for code in codes if not (found and code == NONE)), **joined)


def _annotate(row: dict[str, str], source: LabelSource, codes: tuple[str, ...]) -> Annotation:
    patient, fold = (plain_cell(row.get(column) or "") for column in (source.patient, source.fold))
    return Annotation(
        codes,
        patient.removesuffix(".0"),  # pandas writes whole numbers as 1.0 in a column with gaps
        _age(row.get(source.age) or ""),
        _sex(row.get(source.sex) or "", source.sex_values),
        fold.removesuffix(".0"),
    )


def check_statements(scheme: LabelScheme, file: Path) -> None:
    """PTB-XL's scp_statements.csv must give each diagnostic code the same class as the scheme."""
    table = read_table(file)
    if "diagnostic_class" not in table.columns:
        raise UserError(f"{file}: no column `diagnostic_class`; it belongs to PTB-XL's release")
    for code, name in zip(table.column(table.columns[0]), table.column("diagnostic_class"), strict=True):
        if name and scheme.names(scheme.encode([code])) != (name,):
            raise UserError(f"{file}: {code} is of class {name}, but not in the scheme {scheme.name}")
