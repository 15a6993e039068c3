"""The files that describe a database's shards: dataset.json (all of them) and manifest.csv (one row per recording)."""

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from ecgmatch_dist.data.databases import Expected
from ecgmatch_dist.data.preprocess import LEADS, Preprocess
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.files.strict import check_format, convert, read_object

COLUMNS = (
    "row", "key", "database", "labels", "codes", "patient", "fold", "age", "sex",
    "rate", "samples", "flags", "shard", "offset", "sha256",
)  # fmt: skip
INTEGERS = ("row", "rate", "samples", "offset")
FORMAT = 1
REMEDY = "build the shards again (ecgmatch shards build)"


@dataclass(frozen=True)
class ShardEntry:
    """One shard in the list of dataset.json."""

    name: str
    sha256: str
    bytes: int
    recordings: int


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """dataset.json: what the shards of a database contain, and how they were made."""

    format: int = FORMAT
    database: str
    title: str = ""
    scheme: str
    classes: tuple[str, ...] = ()
    class_names: tuple[str, ...] = ()
    annotates: tuple[str, ...] = ()
    """The classes that the database's readers look for; empty: all. The others are unknown in every recording."""
    rate: int
    length: int
    leads: tuple[str, ...] = LEADS
    dtype: str = "float16"
    preprocess: Preprocess
    recordings: int
    rejected: int = 0
    expected: Expected = Expected()
    shards: tuple[ShardEntry, ...]
    manifest_sha256: str

    def to_json(self) -> dict[str, Any]:
        """The content of the file. A database that annotates every class has the bytes that it had before there was the key."""
        return {name: value for name, value in asdict(self).items() if name != "annotates" or value}


def read_dataset(folder: str | Path) -> Dataset:
    """dataset.json of one database's shards."""
    path = Path(folder) / "dataset.json"
    value = read_object(path, REMEDY)
    check_format(value, FORMAT, path, REMEDY)
    return convert(value, Dataset, str(path))


def read_manifest(folder: str | Path) -> pd.DataFrame:
    """manifest.csv of one database's shards. The columns INTEGERS are int64, all others are strings."""
    path = Path(folder) / "manifest.csv"
    expected = read_dataset(folder).manifest_sha256
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); {REMEDY}") from None
    if hashlib.sha256(content).hexdigest() != expected:
        raise UserError(f"{path}: its checksum is not the one in dataset.json: restore it, or build the shards again")
    return read_rows(path)


def read_rows(path: Path) -> pd.DataFrame:
    """A manifest, or the rows of one shard."""
    rows = pd.read_csv(path, dtype=str, keep_default_na=False)
    if tuple(rows.columns) != COLUMNS:
        raise UserError(f"{path}: its columns are {', '.join(rows.columns)}, not {', '.join(COLUMNS)}; {REMEDY}")
    return rows.astype(dict.fromkeys(INTEGERS, "int64"))


def file_sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
