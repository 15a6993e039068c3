"""The three protocols: labelled, unlabelled, validation and test lists, made once and kept in one hashed file.

within: one database 0.8/0.1/0.1, then `ratio` of the training part labelled. mix: the same on several databases pooled.
cross: one database is the test, the others 0.9/0.1, then `ratio` of the training part labelled.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import tyro
from iterstrat.ml_stratifiers import MultilabelStratifiedShuffleSplit
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from ecgmatch_dist.data.labels import load_scheme
from ecgmatch_dist.data.remote import scheme_of
from ecgmatch_dist.data.store import ShardStore
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.files import write_text

Protocol = Literal["within", "mix", "cross", "folds"]
PARTS = ("labelled", "unlabelled", "validation", "test")
RATIO = {"within": 0.05, "mix": 0.01, "cross": 0.01, "folds": 0.05}  # of the paper, where it has the protocol
VALIDATION_FOLD, TEST_FOLD = "9", "10"  # as PTB-XL's authors recommend
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Split:
    """Who is labelled, unlabelled, validation and test; the same file for all ranks and all methods."""

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
    """Recordings of each part, and of each class in it."""
    manifests: dict[str, str]
    """manifest_sha256 of each database's shards."""
    sha256: str = ""
    """Of the canonical JSON of everything else."""

    def save(self, path: Path) -> None:
        """Write the file; one of the same name with another content stays as it is, and that is an error."""
        content = json.dumps(asdict(self), indent=1) + "\n"
        if path.exists() and path.read_text() != content:
            raise UserError(f"{path}: there is another split of this name; delete it or choose another folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, content)

    @classmethod
    def load(cls, path: str | Path) -> "Split":
        """The split in a file, if nothing in it was changed since it was made."""
        try:
            value = json.loads(Path(path).read_text())
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}; `ecgmatch split` makes splits") from error
        except ValueError as error:
            raise UserError(f"{path}: not a split ({error}); make it again with `ecgmatch split`") from error
        if not isinstance(value, dict) or set(value) != {field.name for field in fields(cls)}:
            raise UserError(f"{path}: not a split of this version; make it again with `ecgmatch split`")
        if digest(value) != value["sha256"]:
            raise UserError(f"{path}: its content does not fit its hash; make it again with `ecgmatch split`")
        split = cls(**{**value, "databases": tuple(value["databases"])})
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
        """The shards are those that the split was made from."""
        for database, expected in self.manifests.items():
            if database not in store.datasets:
                raise UserError(
                    f"split {self.name}: it needs the database `{database}`, and the store has not opened it"
                )
            if store.datasets[database]["manifest_sha256"] != expected:
                raise UserError(
                    f"split {self.name}: the shards of `{database}` are not those it was made from; "
                    "use those, or make the split again from these"
                )

    def labels(self, store: ShardStore, part: str) -> NDArray[np.uint8]:
        """Labels of a part, [n, C], in the order of its ids."""
        return labels_of(store, self.scheme)[store.rows(self.parts[part])]


def digest(value: dict[str, Any]) -> str:
    """Hash of all fields of a split but the hash."""
    rest = {key: entry for key, entry in value.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def labels_of(store: ShardStore, scheme: str) -> NDArray[np.uint8]:
    """Labels of all recordings of the store, [N, C]; every distinct list of codes is encoded once."""
    codes, inverse = np.unique(store.manifest["codes"].to_numpy(str), return_inverse=True)
    return load_scheme(scheme).encode_all(codes.tolist())[inverse]


def choose(y: NDArray[np.uint8], fraction: float, random: np.random.RandomState, stratified: bool) -> Mask:
    """A `fraction` of n units with labels y [n, C]: True [n] where chosen; multi-label iterative stratification."""
    n = len(y)
    if fraction == 1 or n < 2:
        return np.full(n, fraction == 1)
    chosen = np.zeros(n, bool)
    if stratified:
        y = np.column_stack([y, 1 - y]) if y.shape[1] == 1 else y  # the library takes no single column
        splitter = MultilabelStratifiedShuffleSplit(n_splits=1, test_size=fraction, random_state=random)
        chosen[next(splitter.split(np.zeros(n), y))[1]] = True
    else:
        chosen[random.permutation(n)[: round(n * fraction)]] = True
    return chosen


def units_of(store: ShardStore, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """What must stay together: the number 0..u-1 of each row's patient, or of the recording where none is named."""
    table = store.manifest.iloc[rows]
    named = table["patient"] != ""
    unit = (table["database"] + "/" + table["patient"]).where(named, "/" + table["id"])
    return np.asarray(np.unique(unit.to_numpy(str), return_inverse=True)[1], np.int64)


def deal(
    y: NDArray[np.uint8], protocol: Protocol, ratio: float, random: np.random.RandomState, stratified: bool
) -> NDArray[np.int64]:
    """Units with labels y [u, C] -> the part of each, an index of PARTS [u]; cross leaves the test empty."""
    part = np.full(len(y), PARTS.index("unlabelled"))

    def move(units: NDArray[np.int64], fraction: float, to: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        chosen = choose(y[units], fraction, random, stratified)
        part[units[chosen]] = PARTS.index(to)
        return units[~chosen], units[chosen]

    training, held_out = move(np.arange(len(y)), 0.1 if protocol == "cross" else 0.2, "validation")
    if protocol != "cross":
        move(held_out, 0.5, "test")
    move(training, ratio, "labelled")
    return part


def folds_of(store: ShardStore, rows: NDArray[np.int64], unit: NDArray[np.int64]) -> NDArray[np.str_]:
    """The published fold of each unit [u]."""
    fold = store.manifest["fold"].to_numpy(str)[rows]
    if (fold == "").any():
        missing = store.manifest["id"].to_numpy(str)[rows][fold == ""][0]
        raise UserError(f"split folds: {missing} has no fold; only databases that publish folds can be split by them")
    of_unit = np.empty(unit.max(initial=-1) + 1, fold.dtype)
    of_unit[unit] = fold
    if (of_unit[unit] != fold).any():
        raise UserError("split folds: recordings of one patient lie in several folds")
    return of_unit


def deal_folds(
    y: NDArray[np.uint8], fold: NDArray[np.str_], ratio: float, random: np.random.RandomState, stratified: bool
) -> NDArray[np.int64]:
    """Like `deal`, but validation and test are published folds, the same for every seed."""
    part = np.full(len(y), PARTS.index("unlabelled"))
    part[fold == VALIDATION_FOLD], part[fold == TEST_FOLD] = PARTS.index("validation"), PARTS.index("test")
    training = np.flatnonzero(part == PARTS.index("unlabelled"))
    part[training[choose(y[training], ratio, random, stratified)]] = PARTS.index("labelled")
    return part


def make_split(
    store: ShardStore,
    protocol: Protocol,
    ratio: float,
    seed: int,
    scheme: str,
    test_database: str | None = None,
    stratified: bool = True,
) -> Split:
    """The split of the store's databases; the same bytes for the same shards, whatever the order of the databases."""
    if not 0 < ratio <= 1:
        raise UserError(f"ratio {ratio:g}: the labelled share of the training part, above 0 and at most 1")
    known, y, ids = load_scheme(scheme), labels_of(store, scheme), store.manifest["id"].to_numpy(str)
    rows = np.argsort(ids, kind="stable")
    if known.drop_unlabelled:
        rows = rows[y[rows].any(1)]
    is_test = store.manifest["database"].to_numpy(str)[rows] == (test_database or "")
    rows, tested = rows[~is_test], rows[is_test]

    unit = units_of(store, rows)
    y_unit = np.zeros((unit.max(initial=-1) + 1, y.shape[1]), np.uint8)
    np.maximum.at(y_unit, unit, y[rows])  # a patient has the labels of all recordings
    random = np.random.RandomState(seed)
    if protocol == "folds":
        part = deal_folds(y_unit, folds_of(store, rows, unit), ratio, random, stratified)
    else:
        part = deal(y_unit, protocol, ratio, random, stratified)
    chosen = {name: rows[part[unit] == i] for i, name in enumerate(PARTS)}
    if protocol == "cross":
        chosen["test"] = tested
    empty = [name for name, some in chosen.items() if not len(some) and (name, ratio) != ("unlabelled", 1)]
    if empty:
        total = len(rows) + len(tested)
        raise UserError(f"the {empty[0]} part is empty: {total:,} recordings are too few at ratio {ratio:g}")
    split = Split(
        name=split_name(protocol, store.databases, test_database, ratio, seed, stratified),
        protocol=protocol,
        databases=tuple(sorted(store.databases)),
        test_database=test_database,
        ratio=ratio,
        seed=seed,
        scheme=scheme,
        stratified=stratified,
        parts={name: ids[some].tolist() for name, some in chosen.items()},
        counts={name: count(y[some], known.short) for name, some in chosen.items()},
        manifests={name: str(store.datasets[name]["manifest_sha256"]) for name in sorted(store.databases)},
    )
    split = replace(split, sha256=digest(asdict(split)))
    split.check_parts(split.name)
    return split


def split_name(
    protocol: str, databases: Sequence[str], test: str | None, ratio: float, seed: int, stratified: bool
) -> str:
    """Like cross-g12ec@0.01.s20."""
    of = {"within": f"-{databases[0]}", "folds": f"-{databases[0]}", "mix": "", "cross": f"-{test}"}[protocol]
    return f"{protocol}{of}{'' if stratified else '-random'}@{ratio:g}.s{seed}"


def count(y: NDArray[np.uint8], short: Sequence[str]) -> dict[str, int]:
    return {"recordings": len(y), **{name: int(k) for name, k in zip(short, y.sum(0, dtype=int), strict=True)}}


def show(split: Split, path: Path, console: Console) -> None:
    """The counts as a table, and a warning for every class that a part lacks."""
    table = Table(title=f"{split.name}   {split.sha256[:12]}", title_justify="left")
    for name in ("class", *PARTS):
        table.add_column(name, justify="left" if name == "class" else "right")
    for name in split.counts["test"]:
        counts = [(split.counts[part][name], max(split.counts[part]["recordings"], 1)) for part in PARTS]
        share = name != "recordings"
        table.add_row(name, *(f"{k:,} {k / n:6.1%}" if share else f"{k:,}       " for k, n in counts))
    console.print(table)
    for part in ("labelled", "validation", "test"):
        if lacking := [name for name, k in split.counts[part].items() if not k]:
            console.print(f"[yellow]warning[/]: no recording of {', '.join(lacking)} in the {part} part")
    console.print(f"written to {path}", highlight=False, soft_wrap=True)


def databases_in(shards: str) -> list[str]:
    if scheme_of(shards):
        raise UserError(f"{shards}: the databases behind a URL cannot be listed; name them with --databases")
    found = sorted(path.parent.name for path in Path(shards).glob("*/dataset.json"))
    if not found:
        raise UserError(f"{shards}: no folder of shards in it; `ecgmatch shards build` makes them")
    return found


def select(protocol: Protocol, shards: str, database: str, databases: Sequence[str], test: str) -> list[str]:
    """The databases that a protocol needs, after a look at the options that belong to it."""
    if protocol in ("within", "folds"):
        if not database or databases or test:
            raise UserError(f"split {protocol}: one --database NAME, no --databases, no --test")
        return [database]
    if database or (protocol == "mix" and test) or (protocol == "cross" and not test):
        options = "--test NAME of the database to test on" if protocol == "cross" else "no --test"
        raise UserError(f"split {protocol}: {options}; --databases for less than all, no --database")
    chosen = sorted(set(databases or databases_in(shards)) | ({test} if test else set()))
    if len(chosen) < 2:
        raise UserError(f"split {protocol}: at least two databases, found {', '.join(chosen)} in {shards}")
    return chosen


def main(
    protocol: tyro.conf.Positional[Protocol],
    /,
    *,
    shards: str,
    database: str = "",
    databases: tuple[str, ...] = (),
    test: str = "",
    ratio: float | None = None,
    seed: int = 20,
    seeds: tuple[int, ...] = (),
    scheme: str = "",
    random: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    to: Path = Path("splits"),
) -> None:
    """Make the lists of labelled, unlabelled, validation and test recordings: one file a split.

    Args:
        protocol: within (one database), mix (several pooled), cross (test on a database that was never seen), or folds (one
            database by its published folds: 9 validates, 10 tests).
        shards: Folder or URL with one folder of shards a database.
        database: within, folds: the database.
        databases: mix, cross: the databases; default: all in the folder.
        test: cross: the database to test on.
        ratio: Labelled share of the training part; default: 0.05 within and folds, 0.01 mix and cross.
        seed: Which of the many possible splits.
        seeds: Several at once, instead of seed.
        scheme: Label scheme, a name or a .toml file; default: the one that the shards were made with.
        random: Draw plainly at random, without stratification by label.
        to: Folder of the split files.
    """
    store = ShardStore(shards, select(protocol, shards, database, databases, test))
    schemes = {name: str(dataset["scheme"]) for name, dataset in store.datasets.items()}
    if not scheme and len(set(schemes.values())) > 1:
        raise UserError(f"the databases have other label schemes ({schemes}): choose one with --scheme")
    console = Console()
    for number in seeds or (seed,):
        split = make_split(
            store,
            protocol,
            RATIO[protocol] if ratio is None else ratio,
            number,
            scheme or next(iter(schemes.values())),
            test or None,
            stratified=not random,
        )
        path = to / f"{split.name}.json"
        split.save(path)
        show(split, path, console)
