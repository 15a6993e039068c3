"""`ecgmatch split --labels FILE`: labels for recordings that are already in shards. A new label file needs no new build."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from ecgmatch_dist.data.annotations import Annotation, annotate, class_columns
from ecgmatch_dist.data.databases import LabelSource, safe_name
from ecgmatch_dist.data.index import file_sha256
from ecgmatch_dist.data.label_check import SHOWN
from ecgmatch_dist.data.label_table import LabelTable, read_table
from ecgmatch_dist.data.labels import LabelScheme
from ecgmatch_dist.data.segments import recording_of
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.files.plain import plain_line
from ecgmatch_dist.files.strict import read_toml

CODES = ("dx", "codes", "code", "labels", "label", "diagnosis", "diagnoses", "classes", "class", "scp_codes")
RECORD = (
    "record",
    "recording",
    "filename",
    "file_name",
    "file",
    "path",
    "ecg",
    "ecg_id",
    "record_name",
    "record_id",
    "key",
)
PATIENT = ("patient", "patient_id", "patientid", "pid", "subject", "subject_id")
FOLD = ("fold", "strat_fold")
Relabelled = dict[str, dict[str, str]]
"""Database -> recording -> space-joined codes. A recording of such a database that is not in it has no codes."""


@dataclass(frozen=True)
class LabelFile:
    name: str
    columns: str
    """Where it says what, in words."""
    sha256: str
    codes: Relabelled
    patients: dict[str, str]
    """Id "database/key" -> patient, where the file has that column."""
    strangers: tuple[str, ...]
    """Names in the file that no recording has."""


def read_label_file(path: Path, ids: Iterable[str], scheme: LabelScheme) -> LabelFile:
    """Labels for recordings `ids` ("database/key"). `path`: a table, or a .toml file that describes one (the keys of `[labels]`
    in a recipe). Columns that are not described are found by their names and by what they hold."""
    source = LabelSource(source="csv", record="", codes="", patient="", fold="")
    if path.suffix == ".toml":
        source = read_toml(path, LabelSource)
        path = path.parent / source.file
    ids = list(ids)
    find = finder(ids)
    table = read_table(path)
    source = complete(source, table, scheme, find)
    found = annotate(table, source, scheme, lambda cell: find(cell) or f"?{cell}")
    strangers = tuple(name[1:] for name in found if name.startswith("?"))
    known = {name: found[recording] for name in ids if (recording := recording_of(name)) in found}
    patients = {name: annotation.patient for name, annotation in known.items() if annotation.patient}
    return LabelFile(path.name, told(source, table, scheme), file_sha256(path), by_database(known), patients, strangers)


def by_database(annotations: dict[str, Annotation]) -> Relabelled:
    codes: Relabelled = {}
    for name, annotation in sorted(annotations.items()):
        database, _, key = name.partition("/")
        of_database = codes.setdefault(database, {})
        if annotation.codes:
            of_database[key] = " ".join(annotation.codes)
    return codes


def finder(ids: Iterable[str]) -> Callable[[str], str]:
    """A function from a cell ("chapman/JS00007", "JS00007", "g1/JS00007.hea", with or without spaces) to the id of a recording,
    without the number of a segment; empty: none."""
    of_key: dict[str, str] = {}
    shared: set[str] = set()
    every = {recording_of(name) for name in ids}
    for name in sorted(every):
        key = name.partition("/")[2]
        shared |= {key} if key in of_key else set()
        of_key[key] = name

    def find(cell: str) -> str:
        cell = cell.strip().replace("\\", "/")
        if cell in every:
            return cell
        last = cell.rpartition("/")[2]
        names = (last, last.rpartition(".")[0], recording_of(last))
        key = next((key for name in names if (key := safe_name(name)) in of_key), "")
        if key in shared:
            raise UserError(f"{cell}: recordings of several databases have this name; write {of_key[key]}")
        return of_key.get(key, "")

    return find


def complete_missing(
    source: LabelSource, table: LabelTable, scheme: LabelScheme, find: Callable[[str], str]
) -> LabelSource:
    """Fill in the columns that have the names of a recipe that says none, where the table has no column of that name. One
    column per class holds the labels, whatever else a column with a name like `diagnosis` says."""
    usual = LabelSource()
    one_hot = class_columns(table, source, scheme)

    def left_open(own: str, name: str) -> str:
        return "" if own == name and name not in table.columns else own

    source = replace(
        source,
        record=left_open(source.record, usual.record),
        codes=source.codes if one_hot else left_open(source.codes, usual.codes),
        patient=left_open(source.patient, usual.patient),
        fold=left_open(source.fold, usual.fold),
    )
    return complete(source, table, scheme, find)


def complete(source: LabelSource, table: LabelTable, scheme: LabelScheme, find: Callable[[str], str]) -> LabelSource:
    """Fill in the columns that `source` leaves open."""
    if not source.record:
        best = _names_recordings(table, source, find)
        if not best:
            some = ", ".join(next(iter(table.rows), {"": "nothing"}).values())
            raise UserError(
                f"{table.file}: no column names the recordings of these shards; its first row is {some:.60}; if one does, "
                "name it in the recipe or in a .toml file (`record = ...`, and see `rename` in shards/example_own.toml)"
            )
        source = replace(source, record=best)
    lower = {column.casefold(): column for column in reversed(table.columns)}

    def column(own: str, names: tuple[str, ...]) -> str:
        found = (lower[name] for name in names if name in lower and lower[name] != source.record)
        return own or next(found, "")

    source = replace(
        source,
        patient=column(source.patient, PATIENT),
        fold=column(source.fold, FOLD),
        codes=column(source.codes, CODES),
    )
    if source.codes or class_columns(table, source, scheme):
        return source
    hits = {
        column: sum(scheme.matches(cell) for cell in table.column(column))
        for column in table.columns
        if column not in (source.record, source.patient, source.fold)
    }
    best = max(hits, key=lambda column: hits[column], default="")
    if not best or not hits[best]:
        raise UserError(
            f"{table.file}: no column holds labels of the scheme {scheme.name}; there are {', '.join(table.columns)}; "
            f"call it `dx`, or name it in the recipe or in a .toml file (`codes = ...`)"
        )
    return replace(source, codes=best)


def _names_recordings(table: LabelTable, source: LabelSource, find: Callable[[str], str]) -> str:
    """The column that names most recordings; empty: none does. Numbers of rows, patients and ages may be names of files, too:
    a column with a usual name goes first, those that say something else are left out, and one that others contradict is not
    taken. Recordings may have the names of their patients, if nothing else names them."""
    described = {source.codes, source.patient, source.fold, source.age, source.sex}
    named = {column: [find(cell) for cell in table.column(column)] for column in table.columns}
    named = {column: names for column, names in named.items() if any(names)}
    patients = {column for column in named if column == source.patient or column.casefold() in PATIENT}
    others = {column for column in named if column in described or column.casefold() in (*CODES, *FOLD, "age", "sex")}
    usual = [column for column in named if column.casefold() in RECORD and column not in described]
    columns = usual or [column for column in named if column not in patients | others] or [*patients]
    if not columns:
        return ""
    cells = {column: sum(map(bool, named[column])) for column in columns}
    different = {column: len({*named[column]} - {""}) for column in columns}
    best = max(columns, key=lambda column: (different[column], cells[column]))
    for rival in columns:
        no_fewer = different[rival] >= different[best] or cells[rival] > cells[best]
        if no_fewer and any(a and b and a != b for a, b in zip(named[rival], named[best], strict=True)):
            raise UserError(
                f"{table.file}: its columns {best} and {rival} both name recordings, and not the same ones; say which it is "
                "in the recipe or in a .toml file (`record = ...`)"
            )
    return best


def told(source: LabelSource, table: LabelTable, scheme: LabelScheme) -> str:
    """Where a table says what, for people to check."""
    classes = class_columns(table, source, scheme)
    more = ", ..." if len(classes) > SHOWN else ""
    codes = source.codes if source.codes in table.columns else f"a column per class: {', '.join(classes[:SHOWN])}{more}"
    patients = f", patients in {source.patient}" if source.patient in table.columns else ""
    return plain_line(f"{table.file.name}: recordings in the column {source.record}, labels in {codes}{patients}")


def read_names(path: Path, ids: Iterable[str]) -> tuple[list[str], list[str]]:
    """A list of recordings, with or without a header and other columns -> their ids, and the lines that name none."""
    ids = list(ids)
    find, table = finder(ids), read_table(path)
    header = {column: column for column in table.columns}
    found, strangers = [], []
    for number, row in enumerate((header, *table.rows)):
        if name := next((name for cell in row.values() if (name := find(cell))), ""):
            found.append(name)
        elif number:  # the first line is a header unless it names a recording
            strangers.append(next(iter(row.values())))
    if not found:
        raise UserError(
            f"{path}: it names no recording of these shards ({', '.join(strangers[:SHOWN]) or 'it is empty'})"
        )
    listed = set(found)
    return sorted(name for name in ids if recording_of(name) in listed), strangers
