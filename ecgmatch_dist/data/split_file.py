"""split.json: the four lists of recordings that a run trains, validates and tests on, with a hash against changes.

Labels come from the codes in the shards, or from those of a label file, which the split then carries. The labelled, validation
and test parts hold known recordings only; what nobody has looked at is in the unlabelled part.
"""

import hashlib
import json
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ecgmatch_dist.data.label_file import Relabelled
from ecgmatch_dist.data.labels import UNKNOWN, known, load_scheme
from ecgmatch_dist.data.store import ShardStore
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.files.atomic import write_json
from ecgmatch_dist.files.strict import check_format, convert, read_object

FORMAT = 2
REMEDY = "make it with `ecgmatch split`"
PARTS = ("labelled", "unlabelled", "validation", "test")
KNOWN_PARTS = ("labelled", "validation", "test")
SINCE_2 = ("label_file", "label_file_sha256", "codes", "labels_sha256", "unannotated", "left_out")
"""Fields of format 2. A split that needs none of them is written in format 1, with the bytes that it always had."""


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
    """Ids "database/key" of each part, sorted."""
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

    def sealed(self) -> "Split":
        """With its hash."""
        return replace(self, sha256=digest(self.to_json()))

    def to_json(self) -> dict[str, Any]:
        value = asdict(self)
        defaults = {f.name: f.default_factory() if callable(f.default_factory) else f.default for f in fields(self)}
        for name in SINCE_2:
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
        if set(self.parts) != set(PARTS):
            raise UserError(f"{path}: its parts are {', '.join(self.parts)}; they should be {', '.join(PARTS)}")
        part_of: dict[str, str] = {}
        for part, ids in self.parts.items():
            for name in ids:
                if name in part_of:
                    raise UserError(f"{path}: {name} is in {part_of[name]} and in {part}; make the split again")
                part_of[name] = part

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
        return labels_of(store, self.scheme, self.codes)[store.rows(self.parts[part])]

    def all_labels(self, store: ShardStore) -> dict[str, NDArray[np.uint8]]:
        """Labels of every part, [n, C]. Refuses labels that have changed, and unknown recordings where labels are needed."""
        every = labels_of(store, self.scheme, self.codes)
        labels = {part: every[store.rows(ids)] for part, ids in self.parts.items()}
        if self.labels_sha256 and hash_labels(self.parts, labels) != self.labels_sha256:
            raise UserError(
                f"split {self.name}: the scheme {self.scheme} gives other labels than when the split was made; "
                "restore it, or make the split again"
            )
        for part in KNOWN_PARTS:
            if unknown := [name for name, ok in zip(self.parts[part], known(labels[part]), strict=True) if not ok]:
                raise UserError(
                    f"split {self.name}: {len(unknown):,} recordings of the {part} part have no diagnosis ({unknown[0]}, "
                    "...), and would count as healthy; make the split again"
                )
        return labels


def digest(value: dict[str, Any]) -> str:
    """Hash of all fields of a split but `sha256` and `format`."""
    rest = {key: entry for key, entry in value.items() if key not in ("sha256", "format")}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def hash_labels(parts: dict[str, list[str]], labels: dict[str, NDArray[np.uint8]]) -> str:
    found = hashlib.sha256()
    for part in PARTS:
        found.update("\n".join(parts[part]).encode() + labels[part].tobytes())
    return found.hexdigest()


def labels_of(store: ShardStore, scheme: str, relabelled: Relabelled | None = None) -> NDArray[np.uint8]:
    """Labels of all recordings of the store, [N, C], 1, 0 or UNKNOWN. Every distinct list of codes is encoded once."""
    rule = load_scheme(scheme)
    distinct, inverse = np.unique(codes_of(store, relabelled), return_inverse=True)
    labels = rule.states_all(distinct.tolist())[inverse]
    database = store.manifest["database"].to_numpy(str)
    for name, dataset in store.datasets.items():
        looked_for = rule.annotates.get(name, dataset.annotates)
        if looked_for and not set(looked_for) <= set(rule.short):
            raise UserError(
                f"{name}: it annotates {', '.join(looked_for)} of the scheme {dataset.scheme}; say in `annotates.{name}` of "
                f"the scheme {rule.name} which of its classes these are"
            )
        if looked_for:
            hidden = [c for c, short in enumerate(rule.short) if short not in looked_for]
            labels[np.ix_(database == name, hidden)] = UNKNOWN
    return labels


def codes_of(store: ShardStore, relabelled: Relabelled | None = None) -> NDArray[np.str_]:
    """Space-joined codes of all recordings of the store [N]: the shards', or the label file's for the databases it names."""
    codes = store.manifest["codes"].to_numpy(str)
    if not relabelled:
        return codes
    pairs = zip(store.manifest["database"], store.manifest["key"], codes, strict=True)
    return np.array([relabelled[db].get(key, "") if db in relabelled else own for db, key, own in pairs], str)
