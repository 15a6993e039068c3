"""manifest.csv, one row per recording, and rejects.csv. What is wrong is said once, with the file, the row and the column."""

import csv
import io
import re
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd

from ecgmatch_dist.errors import UserError

COLUMNS = (
    "row", "key", "database", "labels", "codes", "patient", "fold", "age", "sex",
    "rate", "samples", "flags", "shard", "offset", "sha256",
)  # fmt: skip
LEAST = {"row": 0, "rate": 1, "samples": 1, "offset": 0}
"""The columns of whole numbers, and their smallest value. All others are texts."""
MOST = 2**53
"""Of every number: all of them are exact in any program that reads the file."""
PATTERNS = {
    "key": (r"[A-Za-z0-9_-]+", "a name of letters, digits, _ and -"),
    "database": (r"[A-Za-z0-9_]+", "a name of letters, digits and _"),
    "shard": (r"[A-Za-z0-9_][A-Za-z0-9_.+@=-]*", "the name of a file in this folder"),
    "sha256": (r"[0-9a-f]{64}", "64 hexadecimal digits"),
}
REMEDY = "build the shards again (ecgmatch shards build)"


def read_rows(path: Path) -> pd.DataFrame:
    """A manifest, or the rows of one shard."""
    return parse_rows(read_bytes(path), path)


def read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); {REMEDY}") from None


def parse_rows(content: bytes, path: Path) -> pd.DataFrame:
    """The rows in a file's content. Numbers are int64, all else is text."""
    rows = _table(content, path, COLUMNS)
    numbers = {}
    for column, least in LEAST.items():
        try:
            numbers[column] = rows[column].astype("int64")
        except (ValueError, OverflowError):
            _refuse(rows, column, path, _is_number, "a whole number")
        if not numbers[column].between(least, MOST).all():
            _refuse(rows, column, path, partial(_is_between, least), f"from {least} to {MOST}")
    for column, (pattern, what) in PATTERNS.items():
        # One search in all cells: a tenth of the time of one per cell.
        if not re.fullmatch(rf"(?:{pattern}\n)*", "".join(f"{cell}\n" for cell in _distinct(rows, column))):
            _refuse(rows, column, path, re.compile(pattern).fullmatch, what)
    return rows.assign(**numbers)


def read_rejects(path: Path) -> pd.DataFrame:
    """Columns key, reason."""
    return _table(read_bytes(path), path, ("key", "reason"))


def _table(content: bytes, path: Path, columns: tuple[str, ...]) -> pd.DataFrame:
    """Cells as texts."""
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: byte {error.start} is not UTF-8; {REMEDY}") from None
    if strange := re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", text):
        line = text.count("\n", 0, strange.start()) + 1
        raise UserError(f"{path}: line {line} holds the control character {strange[0]!r}; {REMEDY}")
    header = next(csv.reader([text.partition("\n")[0]]), [])
    if tuple(header) != columns:
        raise UserError(f"{path}: its columns are {', '.join(header)[:200]}, not {', '.join(columns)}; {REMEDY}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)  # that cells beyond the header are lost
            return pd.read_csv(io.StringIO(text), dtype=str, keep_default_na=False, index_col=False)
    except (ValueError, OverflowError, pd.errors.ParserWarning) as error:  # pandas' errors of parsing are ValueErrors
        raise UserError(
            f"{path}: not a table of {len(columns)} columns ({' '.join(str(error).split())}); {REMEDY}"
        ) from None


def _distinct(rows: pd.DataFrame, column: str) -> "np.ndarray[tuple[int], np.dtype[np.object_]]":
    return np.asarray(pd.unique(rows[column]) if column in ("database", "shard") else rows[column], object)


def _is_between(least: int, cell: str) -> bool:
    return least <= int(cell) <= MOST


def _is_number(cell: str) -> bool:
    return bool(re.fullmatch(r"[0-9]{1,18}", cell))


def _refuse(rows: pd.DataFrame, column: str, path: Path, good: Callable[[str], object], what: str) -> None:
    """Raise the error of the first cell that is not `good`."""
    for number, cell in enumerate(rows[column]):
        if not good(str(cell)):
            raise UserError(f"{path}: row {number}: {column} is `{str(cell)[:60]}`, not {what}; {REMEDY}")
    raise AssertionError(f"{path}: every {column} is {what}")
