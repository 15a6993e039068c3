"""What describes a database's shards: `manifest.csv` and `dataset.json`; and writing files, whole or not at all."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pandas as pd

from ecgmatch_dist.errors import UserError

COLUMNS = (
    "row", "key", "database", "labels", "codes", "patient", "fold", "age", "sex",
    "rate", "samples", "flags", "shard", "offset", "sha256",
)  # fmt: skip
INTEGERS = ("row", "rate", "samples", "offset")
FORMAT = 1


def read_dataset(folder: str | Path) -> dict[str, Any]:
    """dataset.json of one database's shards."""
    path = Path(folder) / "dataset.json"
    try:
        dataset = json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"{folder}: no dataset.json: not a folder of finished shards (ecgmatch shards build)") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({error}); build the shards again") from None
    if not isinstance(dataset, dict) or dataset.get("format") != FORMAT:
        raise UserError(f"{path}: not a dataset.json of format {FORMAT}; build the shards again with this version")
    return dataset


def read_manifest(folder: str | Path) -> pd.DataFrame:
    """All rows of one database's shards; `row`, `rate`, `samples`, `offset` are integers, all other columns strings."""
    path = Path(folder) / "manifest.csv"
    expected = read_dataset(folder)["manifest_sha256"]
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); build the shards again") from None
    if hashlib.sha256(content).hexdigest() != expected:
        raise UserError(f"{path}: its checksum is not the one in dataset.json: restore it, or build the shards again")
    return read_rows(path)


def read_rows(path: Path) -> pd.DataFrame:
    """A manifest, or one shard's part of it."""
    table = pd.read_csv(path, dtype=str, keep_default_na=False)
    if tuple(table.columns) != COLUMNS:
        raise UserError(f"{path}: its columns are {', '.join(table.columns)}; they should be {', '.join(COLUMNS)}")
    return table.astype(dict.fromkeys(INTEGERS, "int64"))


def file_sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
