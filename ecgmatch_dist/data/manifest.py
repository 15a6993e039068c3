"""manifest.csv, one row per recording, and rejects.csv. What is wrong is said once, with the file, the row and the column.

`data/table.py` holds the same rows as columns, for programs: many ranks share one copy of it."""

import codecs
import csv
import hashlib
import io
import re
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import BinaryIO

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
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Characters that no cell may hold."""
REMEDY = "build the shards again (ecgmatch shards build)"
CHUNK = 200_000
"""Rows that are in memory as texts at a time: some 200 MB."""
BLOCK = 2**24


def read_rows(path: Path) -> pd.DataFrame:
    """A manifest, or the rows of one shard, as a whole."""
    return parse_rows(read_bytes(path), path)


def read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); {REMEDY}") from None


def parse_rows(content: bytes, path: Path) -> pd.DataFrame:
    """The rows in a file's content. Numbers are int64, all else is text."""
    return pd.concat(list(_chunks(io.BytesIO(content), path)), ignore_index=True)


def read_chunks(path: Path, sha256: str) -> Iterator[pd.DataFrame]:
    """A manifest whose checksum must be `sha256`, in pieces of `CHUNK` rows."""
    try:
        with path.open("rb") as stream:
            if hashlib.file_digest(stream, "sha256").hexdigest() != sha256:
                raise UserError(
                    f"{path}: its checksum is not the one in dataset.json: restore it, or build the shards again"
                )
            stream.seek(0)
            yield from _chunks(stream, path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); {REMEDY}") from None


def _chunks(stream: BinaryIO, path: Path) -> Iterator[pd.DataFrame]:
    """At least one piece, which may be empty."""
    first = 0
    for rows in _table(stream, path, COLUMNS):
        yield _typed(rows, path, first)
        first += len(rows)


def _typed(rows: pd.DataFrame, path: Path, first: int) -> pd.DataFrame:
    numbers = {}
    for column, least in LEAST.items():
        try:
            numbers[column] = rows[column].astype("int64")
        except (ValueError, OverflowError):
            _refuse(rows, column, path, first, _is_number, "a whole number")
        if not numbers[column].between(least, MOST).all():
            _refuse(rows, column, path, first, partial(_is_between, least), f"from {least} to {MOST}")
    for column, (pattern, what) in PATTERNS.items():
        # One search in all cells: a tenth of the time of one per cell.
        if not re.fullmatch(rf"(?:{pattern}\n)*", "".join(f"{cell}\n" for cell in _distinct(rows, column))):
            _refuse(rows, column, path, first, re.compile(pattern).fullmatch, what)
    return rows.assign(**numbers)


def read_rejects(path: Path) -> pd.DataFrame:
    """Columns key, reason."""
    return pd.concat(list(_table(io.BytesIO(read_bytes(path)), path, ("key", "reason"))), ignore_index=True)


def _table(stream: BinaryIO, path: Path, columns: tuple[str, ...]) -> Iterator[pd.DataFrame]:
    """Cells as texts, in pieces; at least one."""
    _check_text(stream, path, columns)
    stream.seek(0)
    text = io.TextIOWrapper(stream, encoding="utf-8", newline="")
    try:
        pieces = iter(pd.read_csv(text, dtype=str, keep_default_na=False, index_col=False, chunksize=CHUNK))
        while True:
            with warnings.catch_warnings():
                warnings.simplefilter("error", pd.errors.ParserWarning)  # that cells beyond the header are lost
                piece = next(pieces, None)
            if piece is None:
                break
            yield piece
    except (ValueError, OverflowError, pd.errors.ParserWarning) as error:  # pandas' errors of parsing are ValueErrors
        raise UserError(
            f"{path}: not a table of {len(columns)} columns ({' '.join(str(error).split())}); {REMEDY}"
        ) from None


def _check_text(stream: BinaryIO, path: Path, columns: tuple[str, ...]) -> None:
    """Refuse other encodings, control characters and other columns."""
    decoder, line, byte, header = codecs.getincrementaldecoder("utf-8")(), 1, 0, ""
    while True:
        block = stream.read(BLOCK)
        pending = len(decoder.getstate()[0])  # bytes of a character that began in the block before
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            raise UserError(f"{path}: byte {byte - pending + error.start} is not UTF-8; {REMEDY}") from None
        if strange := CONTROL.search(text):
            line += text.count("\n", 0, strange.start())
            raise UserError(f"{path}: line {line} holds the control character {strange[0]!r}; {REMEDY}")
        if not byte:
            header = text.partition("\n")[0]
        if not block:
            break
        byte, line = byte + len(block), line + text.count("\n")
    names = next(csv.reader([header[:100_000]]), [])
    if tuple(names) != columns:
        raise UserError(f"{path}: its columns are {', '.join(names)[:200]}, not {', '.join(columns)}; {REMEDY}")


def _distinct(rows: pd.DataFrame, column: str) -> "np.ndarray[tuple[int], np.dtype[np.object_]]":
    return np.asarray(pd.unique(rows[column]) if column in ("database", "shard") else rows[column], object)


def _is_between(least: int, cell: str) -> bool:
    return least <= int(cell) <= MOST


def _is_number(cell: str) -> bool:
    return bool(re.fullmatch(r"[0-9]{1,18}", cell))


def _refuse(rows: pd.DataFrame, column: str, path: Path, first: int, good: Callable[[str], object], what: str) -> None:
    """Raise the error of the first cell that is not `good`. `first`: the number of the first row."""
    for number, cell in enumerate(rows[column], first):
        if not good(str(cell)):
            raise UserError(f"{path}: row {number}: {column} is `{str(cell)[:60]}`, not {what}; {REMEDY}")
    raise AssertionError(f"{path}: every {column} is {what}")
