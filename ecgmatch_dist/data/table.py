"""The rows of a manifest as columns: from manifest.csv in memory, or memory-mapped from manifest.safetensors.

manifest.safetensors holds what manifest.csv holds, for programs: all ranks of a node share one copy of it in the page cache,
and nothing is parsed. It belongs to the manifest.csv whose checksum it names; beside any other it is ignored, and without it
manifest.csv is read. This module owns its format:

    key, sha256         uint8 [n, w], [n, 32]    names, filled up with zeros; checksums
    xxh3                uint8 [n, 8]             quick checksums, not in manifest.csv and not in files made from it alone
    rate samples offset int64 [n]
    NAME, NAME.values   uint8 or int32 [n], uint8 [k, w]    every other column: the number of its value; its k values, in order
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from ecgmatch_dist.data.manifest import COLUMNS, CONTROL, LEAST, MOST, PATTERNS
from ecgmatch_dist.data.segments import recording_of
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.files.atomic import write_atomic

FORMAT = 1
NAME = "manifest.safetensors"
REMEDY = "remove it, or make it again with `ecgmatch shards index`; without it manifest.csv is read"
NUMBERS = ("rate", "samples", "offset")
TEXTS = ("database", "labels", "codes", "patient", "fold", "age", "sex", "flags", "shard")
PIECE = 1_000_000
"""Rows that are looked at together."""
DTYPES = {"U8": np.uint8, "I32": np.int32, "I64": np.int64}
Ints = NDArray[np.int64]
Array = NDArray[Any]
Bytes = NDArray[np.bytes_]


def pieces(n: int) -> Iterator[slice]:
    return (slice(start, min(start + PIECE, n)) for start in range(0, n, PIECE))


class Table:
    """The recordings of one database, in the order of its manifest. A mapped one is pickled as its path."""

    def __init__(self, arrays: dict[str, Array], path: Path | None = None) -> None:
        """`arrays`: as in the file; `path`: where they are mapped from; None: they are in memory."""
        self.arrays, self.path = arrays, path
        key = arrays["key"]
        self.key: Bytes = key.view(f"S{key.shape[1]}")[:, 0]
        self.sha256, self.offset = arrays["sha256"], arrays["offset"]
        self.xxh3 = arrays.get("xxh3")

    def __len__(self) -> int:
        return len(self.key)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_mapped, (self.path,)) if self.path else (Table, (self.arrays,))

    def codes(self, name: str) -> Array:
        """Of a text column: the number of each row's value in `values` [n]."""
        return self.arrays[name]

    def values(self, name: str) -> list[str]:
        """The different values of a text column, sorted."""
        values = self.arrays[f"{name}.values"]
        return [value.decode() for value in values.view(f"S{values.shape[1]}")[:, 0].tolist()]

    def texts(self, name: str, rows: Ints | slice) -> list[str]:
        """The values of some rows of a text column."""
        values = self.values(name)
        return [values[code] for code in self.codes(name)[rows].tolist()]

    def counts(self, name: str) -> dict[str, int]:
        """Value -> rows that have it."""
        values = self.values(name)
        found = np.zeros(len(values), np.int64)
        for piece in pieces(len(self)):
            found += np.bincount(self.codes(name)[piece], minlength=len(values))
        return dict(zip(values, found.tolist(), strict=True))

    def names(self, rows: Ints | slice = slice(None)) -> list[str]:
        return [key.decode() for key in self.key[rows].tolist()]

    @cached_property
    def is_sorted(self) -> bool:
        """By name, and no name twice. So a build writes them, unless it cuts recordings into segments."""
        joints = np.arange(PIECE, len(self), PIECE)
        rising = (self.key[p][1:] > self.key[p][:-1] for p in pieces(len(self)))
        return bool((self.key[joints] > self.key[joints - 1]).all()) and all(part.all() for part in rising)

    @cached_property
    def has_segments(self) -> bool:
        """Whether a recording may be in pieces (`data/segments.py`)."""
        return any((np.strings.find(self.key[piece], b"-seg") >= 0).any() for piece in pieces(len(self)))

    def recordings(self) -> int:
        """Rows, of which the pieces of one recording count once."""
        return len({recording_of(key) for key in self.names()}) if self.has_segments else len(self)

    def order(self) -> Ints:
        """Rows in the order of their names [n]."""
        return np.arange(len(self)) if self.is_sorted else np.argsort(self.key, kind="stable")

    def repeated(self) -> str:
        """A name that two rows have; empty: none."""
        if self.is_sorted:
            return ""
        names = self.key[self.order()]
        same = np.flatnonzero(names[1:] == names[:-1])
        return names[same[0]].decode() if same.size else ""

    def find(self, keys: Sequence[str]) -> Ints:
        """Names -> rows [n], -1 where there is none."""
        if not len(self) or not len(keys):
            return np.full(len(keys), -1)
        wanted = np.array([key.encode() for key in keys], "S")
        order = None if self.is_sorted else self.order()
        place = np.minimum(np.searchsorted(self.key, wanted, sorter=order), len(self) - 1)
        rows = place if order is None else order[place]
        return np.where(self.key[rows] == wanted, rows, -1)

    def frame(self, rows: slice) -> pd.DataFrame:
        """Some rows as `read_rows` of the manifest gives them."""
        first, stop, _ = rows.indices(len(self))
        columns: dict[str, Any] = {"row": np.arange(first, stop), "key": self.names(rows)}
        columns |= {name: self.arrays[name][rows] for name in NUMBERS}
        columns |= {name: self.texts(name, rows) for name in TEXTS}
        columns["sha256"] = [digest.tobytes().hex() for digest in self.sha256[rows]]
        return pd.DataFrame({name: columns[name] for name in COLUMNS}).astype(
            {name: str for name in COLUMNS if name not in LEAST}
        )


def _mapped(path: Path) -> Table:
    """In another process: what has been checked already."""
    return Table(map_arrays(path)[0], path)


def collect(chunks: Iterable[pd.DataFrame]) -> Table:
    """A table in memory, of the rows that `manifest.read_chunks` gives: some 100 bytes each."""
    parts: dict[str, list[Array]] = {name: [] for name in ("key", "sha256", *NUMBERS, *TEXTS)}
    values: dict[str, list[Bytes]] = {name: [] for name in TEXTS}
    for chunk in chunks:
        parts["key"].append(np.array(chunk["key"].tolist() or [b""], "S")[: len(chunk)])
        parts["sha256"].append(np.frombuffer(bytes.fromhex("".join(chunk["sha256"])), np.uint8).reshape(-1, 32))
        for name in NUMBERS:
            parts[name].append(chunk[name].to_numpy(np.int64))
        for name in TEXTS:
            codes, distinct = pd.factorize(chunk[name])
            parts[name].append(codes.astype(np.int32))
            values[name].append(np.array([str(value).encode() for value in distinct] or [b""], "S")[: len(distinct)])
    arrays: dict[str, Array] = {name: np.concatenate(parts.pop(name)) for name in ("sha256", *NUMBERS)}
    arrays["key"] = as_bytes(np.concatenate(parts.pop("key")))
    for name in TEXTS:
        every: Bytes = np.unique(np.concatenate(values[name]))
        numbered = zip(parts.pop(name), values[name], strict=True)
        codes = np.concatenate([np.searchsorted(every, own).astype(np.int32)[code] for code, own in numbered])
        arrays[name] = codes.astype(np.uint8) if len(every) <= 256 else codes
        arrays[f"{name}.values"] = as_bytes(every)
    return Table(arrays)


def as_bytes(texts: Bytes) -> Array:
    """S array [n] -> uint8 [n, w]."""
    return texts.view(np.uint8).reshape(len(texts), texts.dtype.itemsize)


def write_table(path: Path, table: Table, manifest_sha256: str) -> None:
    """Write manifest.safetensors. The same rows give the same bytes."""
    names = sorted(table.arrays)
    header: dict[str, Any] = {}
    place, digest = 0, hashlib.sha256()
    for name in names:
        array = np.ascontiguousarray(table.arrays[name])
        kind = next(code for code, dtype in DTYPES.items() if dtype == array.dtype)
        header[name] = {"dtype": kind, "shape": array.shape, "data_offsets": [place, place + array.nbytes]}
        place += array.nbytes
        digest.update(array.data)
    notes = {"format": str(FORMAT), "manifest_sha256": manifest_sha256, "sha256": digest.hexdigest()}
    text = json.dumps({"__metadata__": notes, **header}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)

    def write(temporary: Path) -> None:
        with temporary.open("wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            for name in names:
                stream.write(np.ascontiguousarray(table.arrays[name]).data)

    write_atomic(path, write)


def open_table(path: Path, manifest_sha256: str) -> Table | None:
    """The mapped columns of manifest.safetensors, of which everything has been checked. None: it is not there, or of another
    manifest.csv."""
    if not path.exists():
        return None
    arrays, notes = map_arrays(path)
    if notes.get("format") != str(FORMAT):
        raise UserError(
            f"{path}: format {notes.get('format', '')!r:.20}, this version of ecgmatch_dist reads {FORMAT}; {REMEDY}"
        )
    if notes.get("manifest_sha256") != manifest_sha256:
        return None
    for fault in _faults(path, arrays, notes):
        raise UserError(f"{path}: {fault}; {REMEDY}")
    return Table(arrays, path)


def manifest_of(path: Path) -> str:
    """The checksum of the manifest.csv that a manifest.safetensors belongs to; empty: there is none, or it is damaged."""
    try:
        return map_arrays(path)[1].get("manifest_sha256", "") if path.exists() else ""
    except UserError:
        return ""


def map_arrays(path: Path) -> tuple[dict[str, Array], dict[str, str]]:
    """The arrays of the file, which must not be written to, and its notes."""
    try:
        with safe_open(path, "pt") as file:  # it checks that header, offsets and the file's length agree
            notes = dict(file.metadata() or {})
            arrays = {name: file.get_tensor(name).numpy() for name in file.keys()}  # noqa: SIM118 - not a dictionary
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error}); {REMEDY}") from None
    except (SafetensorError, TypeError, RuntimeError, ValueError, AttributeError) as error:
        raise UserError(f"{path}: not a safetensors file ({' '.join(str(error).split())[:100]}); {REMEDY}") from None
    return arrays, notes


def _faults(path: Path, arrays: dict[str, Array], notes: dict[str, str]) -> Iterator[str]:
    """What is wrong with the content, first things first: later checks rest on earlier ones."""
    columns = {"key": 2, "sha256": 2} | dict.fromkeys(NUMBERS, 1) | dict.fromkeys(TEXTS, 1)
    columns |= {name: 2 for name in arrays if name == "xxh3"}
    shapes = columns | {f"{name}.values": 2 for name in TEXTS}
    if {*arrays} != {*shapes}:
        yield f"it holds {', '.join(sorted(arrays))[:200]}, not {', '.join(shapes)}"
    n = len(arrays["key"]) if arrays["key"].ndim else 0
    for name, axes in shapes.items():
        array = arrays[name]
        kinds = {"I64"} if name in NUMBERS else {"U8", "I32"} if name in TEXTS else {"U8"}
        if array.ndim != axes or array.dtype not in [DTYPES[kind] for kind in kinds]:
            yield f"{name} is {array.dtype} {list(array.shape)}"
        if (name in columns and len(array) != n) or (axes == 2 and array.shape[1] == 0):
            yield f"{name} has the shape {list(array.shape)}, but there are {n} rows"
    for name, size in (("sha256", 32), ("xxh3", 8)):
        if name in arrays and arrays[name].shape[1] != size:
            yield f"{name} has {arrays[name].shape[1]} bytes per row"
    with path.open("rb") as stream:
        stream.seek(8 + int.from_bytes(stream.read(8), "little"))
        if hashlib.file_digest(stream, "sha256").hexdigest() != notes.get("sha256"):
            yield "its checksum is not the one that it names"
    for name in NUMBERS:
        yield from _rows_that(arrays[name], partial(_outside, LEAST[name], MOST), f"{name} is out of range")
    for name in TEXTS:
        yield from _bad_values(name, arrays[f"{name}.values"])
        k = len(arrays[f"{name}.values"])
        yield from _rows_that(arrays[name], partial(_outside, 0, k - 1), f"{name} is none of its {k} values")
    allowed = np.zeros(256, bool)
    allowed[[0, *(c for c in range(128) if re.fullmatch(PATTERNS["key"][0], chr(c)))]] = True
    yield from _rows_that(arrays["key"], partial(_not_names, allowed), f"key is not {PATTERNS['key'][1]}")


def _outside(least: int, most: int, numbers: Array) -> NDArray[np.bool_]:
    outside: NDArray[np.bool_] = (numbers < least) | (numbers > most)
    return outside


def _not_names(allowed: NDArray[np.bool_], keys: Array) -> NDArray[np.bool_]:
    """uint8 [n, w] -> True [n] where there are other characters, or characters behind the end."""
    used = keys != 0
    bad: NDArray[np.bool_] = ~allowed[keys].all(1) | ~used[:, 0] | (used[:, 1:] & ~used[:, :-1]).any(1)
    return bad


def _bad_values(name: str, values: Array) -> Iterator[str]:
    texts = values.view(f"S{values.shape[1]}")[:, 0]
    used = values != 0
    if (used[:, 1:] & ~used[:, :-1]).any() or not (texts[1:] > texts[:-1]).all():
        yield f"{name}.values are not in order"
    try:
        decoded = [text.decode() for text in texts.tolist()]
    except UnicodeDecodeError:
        yield f"{name}.values are not UTF-8"
        return
    pattern, what = PATTERNS.get(name, (r"(?s:.*)", ""))
    for text in decoded:
        if CONTROL.search(text) or not re.fullmatch(pattern, text):
            yield f"{name} is {text[:60]!r}, not {what or 'a text without control characters'}"


def _rows_that(array: Array, bad: Callable[[Array], NDArray[np.bool_]], what: str) -> Iterator[str]:
    for piece in pieces(len(array)):
        if (wrong := bad(array[piece])).any():
            yield f"row {piece.start + int(wrong.argmax())}: {what}"
