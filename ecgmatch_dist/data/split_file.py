"""split.json: which recordings a run trains, validates and tests on, with a hash against changes.

Up to `MOST_NAMES` recordings it lists their names, part by part. Beyond that it holds one letter per recording, in the order of
the manifests: 10 million recordings are 10 MB, and need no search for names.

Labels come from the codes in the shards, or from those of a label file, which the split then carries. The labelled, validation
and test parts hold known recordings only; what nobody has looked at is in the unlabelled part.
"""

import hashlib
import json
from collections import Counter
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ecgmatch_dist.data.label_file import Relabelled
from ecgmatch_dist.data.labels import UNKNOWN, known, load_scheme
from ecgmatch_dist.data.store import Ints, ShardStore
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.files.atomic import write_json
from ecgmatch_dist.files.strict import check_format, convert, read_object

FORMAT = 3
REMEDY = "make it with `ecgmatch split`"
PARTS = ("labelled", "unlabelled", "validation", "test")
KNOWN_PARTS = ("labelled", "validation", "test")
SINCE_2 = ("label_file", "label_file_sha256", "codes", "labels_sha256", "unannotated", "left_out")
"""Fields of format 2. A split that needs none of them is written in format 1, with the bytes that it always had."""
MOST_NAMES = 100_000
"""Recordings in the shards up to which a split lists names, as in formats 1 and 2: people can read them, and a database that is
split again gives the bytes and the hash that it gave."""
LETTERS = "luvt-"
"""Of the four parts, and of a recording that is left out."""


@dataclass(frozen=True)
class Split:
    """Which recordings are labelled, unlabelled, validation and test. All ranks and all methods read the same file."""

    name: str
    protocol: str
    databases: tuple[str, ...]
    test_database: str | None
    ratio: float
    seed: int
    scheme: str
    stratified: bool
    parts: dict[str, list[str]]
    """Ids "database/key" of each part, sorted. Empty in format 3."""
    counts: dict[str, dict[str, int]]
    """Recordings of each part, in total and per class."""
    manifests: dict[str, str]
    """manifest_sha256 of each database's shards."""
    sha256: str = ""
    """Of the canonical JSON of all other fields but `format`."""
    format: int = 1
    label_file: str = ""
    """Name of the file that the labels came from; empty: from the shards."""
    label_file_sha256: str = ""
    codes: Relabelled = field(default_factory=dict)
    """The label file's codes, of each database that it names."""
    labels_sha256: str = ""
    """Of the labels of all parts: another scheme of the same name is noticed."""
    unannotated: dict[str, dict[str, int]] = field(default_factory=dict)
    """Part -> class -> recordings in which nobody has looked for it."""
    left_out: dict[str, int] = field(default_factory=dict)
    """Reason -> recordings of the shards that are in no part."""
    letters: dict[str, str] = field(default_factory=dict)
    """Format 3: of each database, a letter of `LETTERS` for each row of its manifest."""

    def sealed(self) -> "Split":
        """With its hash."""
        return replace(self, sha256=digest(self.to_json()))

    def to_json(self) -> dict[str, Any]:
        value = asdict(self)
        defaults = {f.name: f.default_factory() if callable(f.default_factory) else f.default for f in fields(self)}
        for name in (*SINCE_2, "letters"):
            if value[name] == defaults[name]:
                del value[name]
        return value

    def save(self, path: Path) -> None:
        """Write the file. Refuses to overwrite a different split."""
        if path.exists() and Split.load(path).sha256 != self.sha256:
            raise UserError(f"{path}: there is another split of this name; delete it, or choose another folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> "Split":
        """Read a split. Refuses a file that was changed since it was made."""
        value = read_object(Path(path), REMEDY)
        check_format(value, FORMAT, path, REMEDY, oldest=1)
        split = convert(value, cls, str(path))
        if digest(value) != split.sha256:
            raise UserError(f"{path}: its content does not match its hash; {REMEDY}")
        split.check_parts(path)
        return split

    def check_parts(self, path: object) -> None:
        """Exactly the four parts, and no recording in two of them."""
        if self.format == 3:
            self._check_letters(path)
            return
        if set(self.parts) != set(PARTS):
            raise UserError(f"{path}: its parts are {', '.join(self.parts)}; they should be {', '.join(PARTS)}")
        part_of: dict[str, str] = {}
        for part, ids in self.parts.items():
            for name in ids:
                if name in part_of:
                    raise UserError(f"{path}: {name} is in {part_of[name]} and in {part}; make the split again")
                part_of[name] = part

    def _check_letters(self, path: object) -> None:
        if self.parts or {*self.letters} != {*self.databases}:
            raise UserError(
                f"{path}: a split of format 3 has letters for each of its databases, and no names; {REMEDY}"
            )
        for database, text in self.letters.items():
            if strange := text.strip(LETTERS)[:1]:
                raise UserError(f"{path}: letters.{database} holds {strange!r:.20}, not one of {LETTERS}; {REMEDY}")
        for letter, part in zip(LETTERS, PARTS, strict=False):
            found = sum(text.count(letter) for text in self.letters.values())
            if found != self.counts.get(part, {}).get("recordings"):
                raise UserError(f"{path}: {found:,} recordings are {part}, but its counts say another number; {REMEDY}")

    @property
    def learnt_from(self) -> tuple[str, ...]:
        """The databases, but for the one of cross, which is for the test alone."""
        return tuple(name for name in self.databases if name != self.test_database)

    def size(self, part: str) -> int:
        """Recordings of a part."""
        return len(self.parts[part]) if self.parts else self.counts[part]["recordings"]

    def rows(self, store: ShardStore) -> dict[str, Ints]:
        """Part -> its rows in the store [n], in the order of their ids."""
        if self.parts:
            return {part: store.rows(self.parts[part]) for part in PARTS}
        letters = [self.letters[database].encode() for database in store.databases]
        for database, text, table in zip(store.databases, letters, store.tables, strict=True):
            if len(text) != len(table):
                raise UserError(
                    f"split {self.name}: {len(text):,} recordings of {database}, but there are {len(table):,}; {REMEDY}"
                )
        order = store.order()
        placed = np.frombuffer(b"".join(letters), np.uint8)[order]
        return {part: order[placed == ord(letter)] for letter, part in zip(LETTERS, PARTS, strict=False)}

    def count_by_database(self) -> dict[str, dict[str, int]]:
        """Database -> part -> recordings."""
        if self.parts:
            found = {part: Counter(name.partition("/")[0] for name in ids) for part, ids in self.parts.items()}
            named = dict.fromkeys(database for counts in found.values() for database in counts)
            return {database: {part: found[part][database] for part in PARTS} for database in named}
        pairs = tuple(zip(LETTERS, PARTS, strict=False))
        return {
            database: {part: text.count(letter) for letter, part in pairs} for database, text in self.letters.items()
        }

    def check(self, store: ShardStore) -> None:
        """Refuse shards that are not those the split was made from."""
        for database, expected in self.manifests.items():
            if database not in store.datasets:
                raise UserError(
                    f"split {self.name}: it needs the database `{database}`, which the store has not opened"
                )
            if store.datasets[database].manifest_sha256 != expected:
                raise UserError(
                    f"split {self.name}: the shards of `{database}` are not those it was made from; "
                    "use those, or make the split again"
                )

    def labels(self, store: ShardStore, part: str) -> NDArray[np.uint8]:
        """Labels of a part, [n, C], 1, 0 or UNKNOWN, in the order of its ids."""
        return labels_of(store, self.scheme, self.codes)[self.rows(store)[part]]

    def all_labels(self, store: ShardStore, rows: dict[str, Ints] | None = None) -> dict[str, NDArray[np.uint8]]:
        """Labels of every part, [n, C]; `rows`: its rows, if they are at hand. Refuses labels that have changed, and unknown
        recordings where labels are needed."""
        every, rows = labels_of(store, self.scheme, self.codes), rows or self.rows(store)
        labels = {part: every[some] for part, some in rows.items()}
        if self.labels_sha256 and hash_labels(self.parts, labels) != self.labels_sha256:
            raise UserError(
                f"split {self.name}: the scheme {self.scheme} gives other labels than when the split was made; "
                "restore it, or make the split again"
            )
        for part in KNOWN_PARTS:
            if (unknown := np.flatnonzero(~known(labels[part]))).size:
                raise UserError(
                    f"split {self.name}: {unknown.size:,} recordings of the {part} part have no diagnosis "
                    f"({store.ids(rows[part][unknown[:1]])[0]}, ...), and would count as healthy; make the split again"
                )
        return labels


def digest(value: dict[str, Any]) -> str:
    """Hash of all fields of a split but `sha256` and `format`."""
    rest = {key: entry for key, entry in value.items() if key not in ("sha256", "format")}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def hash_labels(parts: dict[str, list[str]], labels: dict[str, NDArray[np.uint8]]) -> str:
    """Of the labels, and of the names if the split lists them."""
    found = hashlib.sha256()
    for part in PARTS:
        found.update("\n".join(parts.get(part, ())).encode() + labels[part].tobytes())
    return found.hexdigest()


def labels_of(store: ShardStore, scheme: str, relabelled: Relabelled | None = None) -> NDArray[np.uint8]:
    """Labels of all recordings of the store, [N, C], 1, 0 or UNKNOWN. Every distinct list of codes is encoded once."""
    rule = load_scheme(scheme)
    distinct, numbers = codes_of(store, relabelled)
    labels = rule.states_all(distinct)[numbers]
    for name, dataset, start, stop in zip(
        store.databases, store.datasets.values(), store.starts[:-1], store.starts[1:], strict=True
    ):
        looked_for = rule.annotates.get(name, dataset.annotates)
        if looked_for and not set(looked_for) <= set(rule.short):
            raise UserError(
                f"{name}: it annotates {', '.join(looked_for)} of the scheme {dataset.scheme}; say in `annotates.{name}` of "
                f"the scheme {rule.name} which of its classes these are"
            )
        if looked_for:
            hidden = [c for c, short in enumerate(rule.short) if short not in looked_for]
            labels[start:stop, hidden] = UNKNOWN
    return labels


def codes_of(store: ShardStore, relabelled: Relabelled | None = None) -> tuple[list[str], NDArray[np.int32]]:
    """Space-joined codes of all recordings of the store, the shards' or the label file's for the databases it names: the
    different ones, and their numbers [N]."""
    values, numbers = store.coded("codes")
    if not relabelled:
        return values, numbers
    for i, database in enumerate(store.databases):
        if database in relabelled:
            own = relabelled[database]
            distinct = sorted({"", *own.values()})
            number = {codes: len(values) + n for n, codes in enumerate(distinct)}
            numbers[store.starts[i] : store.starts[i + 1]] = number[""]
            found = store.tables[i].find(list(own))
            there = found >= 0
            numbers[store.starts[i] + found[there]] = np.array([number[c] for c in own.values()], np.int32)[there]
            values += distinct
    return values, numbers
