"""dataset.json: what the shards of a database contain. `read_table` opens the table of recordings that belongs to it."""

import hashlib
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import tyro

from ecgmatch_dist.data.databases import Expected
from ecgmatch_dist.data.header_limits import LONGEST, MOST_RATE
from ecgmatch_dist.data.manifest import CHUNK, MOST, PATTERNS, read_chunks
from ecgmatch_dist.data.manifest import COLUMNS as COLUMNS
from ecgmatch_dist.data.manifest import REMEDY as REMEDY
from ecgmatch_dist.data.manifest import read_rows as read_rows
from ecgmatch_dist.data.preprocess import LEADS, Preprocess
from ecgmatch_dist.data.table import NAME, Table, collect, open_table, write_table
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.files.strict import check_format, convert, read_object
from ecgmatch_dist.terminal.waiting import track

FORMAT = 1


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
    dataset = convert(value, Dataset, str(path))
    for fault in _faults(dataset):
        raise UserError(f"{path}: {fault}; {REMEDY}")
    return dataset


def _faults(dataset: Dataset) -> Iterator[str]:
    """What the types do not say."""
    texts = {"title": dataset.title, "scheme": dataset.scheme, "dtype": dataset.dtype}
    texts |= {f"classes[{i}]": name for i, name in enumerate((*dataset.classes, *dataset.class_names))}
    for name, text in texts.items():
        if re.search(r"[\x00-\x1f\x7f-\x9f]", text):
            yield f"{name} holds a control character"
    if not re.fullmatch(PATTERNS["database"][0], dataset.database):
        yield f"database = {dataset.database!r:.60}: {PATTERNS['database'][1]}"
    if dataset.classes and len(dataset.classes) != len(dataset.class_names):
        yield f"{len(dataset.classes)} classes, but {len(dataset.class_names)} class_names"
    if dataset.leads != LEADS:
        yield f"leads are {' '.join(dataset.leads)[:60]!r}, not {' '.join(LEADS)}"
    for name, value, most in (("rate", dataset.rate, MOST_RATE), ("length", dataset.length, LONGEST)):
        if not 1 <= value <= most or value != getattr(dataset.preprocess, name):
            yield f"{name} = {value}: 1 to {most:,}, and the same as preprocess.{name}"
    counts = {"recordings": dataset.recordings, "rejected": dataset.rejected}
    counts |= {f"shards[{i}].bytes": shard.bytes for i, shard in enumerate(dataset.shards)}
    counts |= {f"shards[{i}].recordings": shard.recordings for i, shard in enumerate(dataset.shards)}
    for name, count in counts.items():
        if not 0 <= count <= MOST:
            yield f"{name} = {count}: 0 or more"
    for i, shard in enumerate(dataset.shards):
        for name, text, kind in (
            (f"shards[{i}].name", shard.name, "shard"),
            (f"shards[{i}].sha256", shard.sha256, "sha256"),
        ):
            if not re.fullmatch(PATTERNS[kind][0], text):
                yield f"{name} = {text!r:.60}: {PATTERNS[kind][1]}"
    if len({shard.name for shard in dataset.shards}) != len(dataset.shards):
        yield "two shards have the same name"


def read_manifest(folder: str | Path, dataset: Dataset | None = None) -> pd.DataFrame:
    """manifest.csv of one database's shards, as a whole. `dataset`: what dataset.json holds (None: it is read too)."""
    return pd.concat(list(manifest_chunks(Path(folder), dataset)), ignore_index=True)


def read_table(folder: str | Path, dataset: Dataset | None = None) -> Table:
    """The recordings of one database's shards: mapped from manifest.safetensors, or read from manifest.csv if there is none."""
    dataset = dataset or read_dataset(folder)
    return open_table(Path(folder) / NAME, dataset.manifest_sha256) or collect(manifest_chunks(Path(folder), dataset))


def manifest_chunks(folder: Path, dataset: Dataset | None) -> Iterator[pd.DataFrame]:
    """manifest.csv in pieces, with a bar. Refuses rows that are not in order."""
    dataset, path, first = dataset or read_dataset(folder), folder / "manifest.csv", 0
    total = max(1, -(-dataset.recordings // CHUNK))
    for chunk in track(read_chunks(path, dataset.manifest_sha256), f"read {folder.name}/manifest.csv", total):
        if (chunk["row"].to_numpy() != np.arange(first, first + len(chunk))).any():
            raise UserError(f"{path}: rows are not 0 to {dataset.recordings - 1}, one after the other; {REMEDY}")
        first += len(chunk)
        yield chunk


def write_index(folder: tyro.conf.Positional[Path], /) -> None:
    """Write manifest.safetensors beside the manifest.csv of shards that have none: what was built before there was the file.
    Opening a large database is then a matter of seconds, and the ranks of a node share its memory.

    Args:
        folder: The shards of one database.
    """
    dataset = read_dataset(folder)
    table = collect(manifest_chunks(folder, dataset))
    write_table(folder / NAME, table, dataset.manifest_sha256)
    print(f"{folder / NAME}: {len(table):,} recordings, {(folder / NAME).stat().st_size:,} bytes")


def file_sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
