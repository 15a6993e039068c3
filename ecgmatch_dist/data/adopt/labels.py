"""Which table beside the recordings holds their labels, what its columns are, and which classes its words make."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path

from ecgmatch_dist import resources
from ecgmatch_dist.data.adopt.survey import Archive
from ecgmatch_dist.data.annotations import NO, NOTHING, YES
from ecgmatch_dist.data.databases import safe_name
from ecgmatch_dist.data.formats.read import stem
from ecgmatch_dist.data.label_file import CODES, FOLD, PATIENT
from ecgmatch_dist.data.label_table import LabelTable, read_table
from ecgmatch_dist.data.labels import load_scheme, normal_form
from ecgmatch_dist.errors import UserError

COLUMNS = {
    "patient": (*PATIENT, "patient id", "patient no", "patientnr", "patienten-id", "mrn", "case", "fallnummer"),
    "fold": FOLD,
    "age": ("age", "alter", "patient_age", "age_years", "edad", "idade"),
    "sex": ("sex", "gender", "geschlecht", "sexo", "sexe"),
}
CODE_NAMES = (*CODES, "befund", "befunde", "diagnose", "diagnosen", "interpretation", "statement", "statements", "finding",
              "findings", "result", "rhythm", "annotation")  # fmt: skip
NORMAL = re.compile(
    r"(normal\w*|norm|unauff\w+|healthy|o\.?b\.?|gesund|n)( (ecg|ekg|signals?|sinus rhythm))?", re.IGNORECASE
)
FEW = 10
"""Words of fewer recordings than this make no class."""
ALIKE = 0.85
"""Words that share so much are perhaps one word: LVH and LVHH, not AF and AFL."""


@dataclass(frozen=True)
class Labels:
    """A table of labels, and its columns by their role; without a file: the labels in the headers."""

    file: Path | None = None
    record: str = ""
    codes: str = ""
    marks: tuple[str, ...] = ()
    """Columns with one mark per class."""
    others: dict[str, str] = field(default_factory=dict)
    """patient, fold, age, sex -> column."""
    named: frozenset[str] = frozenset()
    """Recordings that it names."""
    strangers: tuple[str, ...] = ()
    empty: int = 0
    """Rows without any label."""
    words: Counter[str] = field(default_factory=Counter)
    """Label -> rows."""


def find_labels(archive: Archive, doubts: list[str]) -> Labels:
    """The table that names the most recordings."""
    best, hits = Labels(), 0
    for path in archive.tables:
        try:
            table = read_table(path)
        except UserError as error:
            doubts.append(str(error))
            continue
        found = {
            column: sum(_key(cell) in archive.names for cell in set(table.column(column))) for column in table.columns
        }
        record = max(found, key=lambda column: found[column], default="")
        if not record or not found[record]:
            doubts.append(f"{path.name}: no column names the recordings, so it is left out")
        elif found[record] > hits:
            if best.file:
                doubts.append(f"{best.file.name} names {hits:,} recordings too, but fewer than {path.name}")
            best, hits = _columns(table, record, archive.names), found[record]
        else:
            doubts.append(f"{path.name} names {found[record]:,} recordings too; {best.file and best.file.name} is used")
    return best


def _key(cell: str) -> str:
    return safe_name(stem(cell)) if cell else ""


def _columns(table: LabelTable, record: str, names: set[str]) -> Labels:
    left = [column for column in table.columns if column != record]
    others: dict[str, str] = {}
    for role, known in COLUMNS.items():
        if column := next((column for column in left if column.casefold().strip() in known), ""):
            others[role] = column
            left.remove(column)
    by_name = {column.casefold().strip(): column for column in left}
    codes = next((by_name[name] for name in CODE_NAMES if name in by_name), "")
    marks = () if codes else tuple(column for column in left if _is_marks(table.column(column)))
    if not codes and not marks:
        codes = max((column for column in left), key=lambda column: _repeats(table.column(column)), default="")
    words: Counter[str] = Counter()
    empty = 0
    for row in table.rows:
        if marks:
            mine = [column for column in marks if row[column].casefold().removesuffix(".0") in YES]
            empty += all(row[column].casefold() in NOTHING | {""} for column in marks)
        else:
            cells = re.split(r"[,;|\t\r\n]+", row[codes]) if codes else []
            mine = [word.strip() for word in cells if word.strip().casefold() not in NOTHING]
            empty += not mine
        words.update(list(dict.fromkeys(mine)))  # each once; equally frequent ones stay in the order of the table
    keys = [_key(cell) for cell in table.column(record)]
    strangers = tuple(cell for cell, key in zip(table.column(record), keys, strict=True) if key not in names)
    return Labels(table.file, record, codes, marks, others, frozenset(keys) & names, strangers, empty, words)


def _is_marks(cells: list[str]) -> bool:
    values = {cell.casefold().removesuffix(".0") for cell in cells}
    return bool(values & YES) and values <= YES | NO | NOTHING | {""}


def _repeats(cells: list[str]) -> float:
    """How much a column looks like one of diagnoses: words that come again and again. Numbers do not."""
    filled = [cell for cell in cells if cell]
    if not filled or all(re.fullmatch(r"[0-9.,:/ -]+", cell) for cell in filled):
        return 0.0
    return 1 - len(set(filled)) / len(filled)


USED = 1 / 3  # of a scheme's classes: below, most columns of its tables would be empty


def fitting_scheme(words: Counter[str]) -> str:
    """The scheme of `shards/labels/` that knows more than half of the labels and of which enough classes occur; empty: none."""
    total, best = sum(words.values()), ("", 0)
    for path in sorted(resources.folder("shards").glob("labels/*.toml"), key=lambda path: path.stem != "ecgmatch5"):
        scheme = load_scheme(path.stem)
        parts = {word: [part for part in (word, *word.split()) if scheme.matches(part)] for word in words}
        known = sum(count for word, count in words.items() if parts[word])
        used = len({c for some in parts.values() for part in some for c in scheme.encode([part]).nonzero()[0]})
        if used >= USED * len(scheme.classes):
            best = max(best, (path.stem, known), key=lambda pair: pair[1])
    return best[0] if total and best[1] > total / 2 else ""


@dataclass(frozen=True)
class Class:
    name: str
    short: str
    count: int
    only: bool


def classes_of(words: Counter[str]) -> tuple[list[Class], Counter[str]]:
    """One class per label that is frequent enough, and the labels that are not."""
    enough = [(word, count) for word, count in words.most_common() if count >= FEW] or words.most_common(2)
    used: set[str] = set()
    classes: list[Class] = []
    for word, count in enough:
        short = _short(word, used)
        used.add(short.casefold())
        only = NORMAL.fullmatch(word.strip()) is not None and not any(c.only for c in classes)
        classes.append(Class(word, short, count, only))
    chosen = {normal_form(word) for word, _ in enough}
    return classes, Counter({word: n for word, n in sorted(words.items()) if normal_form(word) not in chosen})


def near_misses(rare: Counter[str], classes: Sequence[Class]) -> list[str]:
    """Rare labels that are spelt almost like a class, as `LVHH 1: LVH?`. Codes of digits are alike without being typos."""
    names, found = {normal_form(one.name): one.name for one in classes}, []
    for word, n in rare.most_common():
        near = get_close_matches(normal_form(word), names, 1, ALIKE) if re.search(r"[^\W\d]", word) else []
        found += [f"{word} {n:,}: {names[name]}?" for name in near]
    return found


def _short(word: str, used: set[str]) -> str:
    """A name for tables: the word itself if it is short, otherwise its first letters or initials."""
    plain = re.sub(r"[^\w]+", "_", word).strip("_") or "class"
    parts = plain.split("_")
    short = plain if len(plain) <= 10 else "".join(part[:1].upper() for part in parts) if len(parts) > 2 else plain[:10]
    number = 2
    base = short
    while short.casefold() in used:
        short, number = f"{base}{number}", number + 1
    return short
