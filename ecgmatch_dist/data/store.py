"""Random access to the recordings in shards: one `pread` per recording, straight into the batch's buffer."""

import hashlib
import io
import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from xxhash import xxh3_64_digest

from ecgmatch_dist.data.index import REMEDY, Dataset, read_dataset, read_table
from ecgmatch_dist.data.remote import LocalFolder, RemoteFolder, Shard, plain_name, scheme_of
from ecgmatch_dist.data.table import Table, pieces
from ecgmatch_dist.errors import UserError

V = 12
NPY_HEADER = 128  # bytes before the array's data in a .npy file of [12, length] float16
PIECES, PIECE = 8, 8  # of a batch that threads share: at most so many, of at least so many recordings
KEEP_OPEN = 256  # files; the usual limit of a process is 1024
CACHE_BYTES = 32 * 2**30
Ints = NDArray[np.int64]


def default_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ecgmatch"


class ShardStore:
    """The recordings of one or more databases, numbered 0..N-1 in the order of their manifests.

    Threads may read at the same time. A pickled store holds no open files: each process opens its own, at first use.
    """

    def __init__(
        self,
        root: str | Path,
        databases: Sequence[str],
        cache: Path | None = None,
        cache_bytes: int = CACHE_BYTES,
        check: bool = False,
    ) -> None:
        """`root`: folder or URL with one folder per database. The checksum of a recording is verified when it is read for the
        first time, on the thread that reads it, by its XXH3 if the table has it; `check`: every time, and by its SHA-256."""
        if not databases or len(set(databases)) != len(databases):
            raise UserError(f"databases {list(databases)}: give at least one, each once")
        self.source: LocalFolder | RemoteFolder = (
            RemoteFolder(str(root), cache or default_cache(), cache_bytes)
            if scheme_of(str(root))
            else LocalFolder(Path(root))
        )
        self.check = check
        self.databases = tuple(databases)
        self.datasets: dict[str, Dataset] = {}
        self.shards: list[Shard] = []
        self.tables: list[Table] = []
        self._numbers: list[Ints] = []
        """Of each database: from the number of a shard in its table to that in `shards`."""
        for database in databases:
            folder = self.source.folder(plain_name(database, root))
            dataset = read_dataset(folder)
            table = read_table(folder, dataset)
            number = {}
            for shard in shards_of(dataset, table, database, folder):
                number[shard.name] = len(self.shards)
                self.shards.append(shard)
            if repeated := table.repeated():
                raise UserError(f"{root}: two recordings are called {database}/{repeated}")
            self.datasets[database] = dataset
            self.tables.append(table)
            self._numbers.append(np.array([number.get(name, -1) for name in table.values("shard")], np.int64))
        for field in ("rate", "length", "preprocess"):
            self._check_common(field)
        first = self.datasets[databases[0]]
        self.rate, self.length, self.preprocess = first.rate, first.length, first.preprocess
        self.starts = np.cumsum([0, *map(len, self.tables)])
        """The first row of each database, and the number of all rows."""
        self._verified = np.zeros(len(self), bool)
        self._first = dict(self._first_offsets())
        self._check_sizes()
        self._files: dict[int, _File] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in ("_files", "_lock", "manifest")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _files={}, _lock=threading.Lock())

    @cached_property
    def manifest(self) -> pd.DataFrame:
        """All columns of all recordings but the checksums, with their ids: for people. It takes a kilobyte per recording."""
        frames = [table.frame(slice(None)).drop(columns="sha256") for table in self.tables]
        whole = pd.concat(frames, ignore_index=True)
        return whole.assign(id=whole["database"] + "/" + whole["key"])

    def by_table(self, rows: Ints) -> Iterator[tuple[int, NDArray[np.bool_] | slice, Ints]]:
        """Number of a database, which of the `rows` are in it, and their rows in its table."""
        if len(self.tables) == 1:
            yield 0, slice(None), rows
            return
        where = np.searchsorted(self.starts, rows, side="right") - 1
        for i, start in enumerate(self.starts[:-1]):
            here = where == i
            yield i, here, rows[here] - start

    def rows(self, ids: Sequence[str]) -> Ints:
        """Ids "database/key" -> rows of the store [n]."""
        rows = np.full(len(ids), -1)
        names = [name.partition("/") for name in ids]
        for i, database in enumerate(self.databases):
            own = [n for n, name in enumerate(names) if name[0] == database]
            found = self.tables[i].find([names[n][2] for n in own])
            rows[own] = np.where(found < 0, -1, found + self.starts[i])
        if (missing := np.flatnonzero(rows < 0)).size:
            raise UserError(
                f"{ids[missing[0]]}: not in these shards ({missing.size:,} of {len(ids):,} ids are missing)"
            )
        return rows

    def ids(self, rows: Ints | None = None) -> list[str]:
        """database/key of the rows [n], or of all."""
        if rows is None:
            return [f"{d}/{key}" for d, table in zip(self.databases, self.tables, strict=True) for key in table.names()]
        names = np.empty(len(rows), object)
        for i, here, own in self.by_table(np.asarray(rows, np.int64)):
            names[here] = [f"{self.databases[i]}/{key}" for key in self.tables[i].names(own)]
        return list(names)

    def order(self) -> Ints:
        """All rows in the order of their ids [N]: a "/" comes before every letter of a name."""
        numbered = sorted(range(len(self.databases)), key=lambda i: self.databases[i])
        return np.concatenate([self.starts[i] + self.tables[i].order() for i in numbered])

    def coded(self, name: str) -> tuple[list[str], NDArray[np.int32]]:
        """A text column: its values, sorted within each database and one database after the other, and their numbers [N]."""
        values: list[str] = []
        numbers = np.empty(len(self), np.int32)
        for table, start in zip(self.tables, self.starts[:-1], strict=True):
            own = numbers[start : start + len(table)]
            own[:] = table.codes(name)  # of a table with few values they are bytes, in which the sum would not fit
            own += len(values)
            values += table.values(name)
        return values, numbers

    def database_of(self, rows: Ints) -> Ints:
        """The number of each row's database in `databases` [n]."""
        return np.searchsorted(self.starts, rows, side="right") - 1

    def shards_of_rows(self, rows: Ints) -> Ints:
        """The number of the shard of each row [n]: an index of `.shards`."""
        shards = np.empty(len(rows), np.int64)
        for i, here, own in self.by_table(rows):
            shards[here] = self._numbers[i][self.tables[i].codes("shard")[own]]
        return shards

    def _places(self, rows: Ints) -> "_Places":
        offsets, quick = np.empty(len(rows), np.int64), np.empty(len(rows), bool)
        digests = np.empty((len(rows), 32), np.uint8)
        for i, here, own in self.by_table(rows):
            table = self.tables[i]
            offsets[here], quick[here] = table.offset[own], table.xxh3 is not None and not self.check
            if table.xxh3 is None or self.check:
                digests[here] = table.sha256[own]
            else:
                digests[here, :8] = table.xxh3[own]
        return _Places(self.shards_of_rows(rows), offsets, digests, quick)

    def read(
        self, rows: Ints, out: NDArray[np.float16] | None = None, pool: Executor | None = None
    ) -> NDArray[np.float16]:
        """Recordings of the rows [n] -> float16 [n, 12, length], into `out` if given. With a `pool`, its threads read pieces of
        them at the same time: storage on a network answers slowly, but many at once."""
        rows = np.asarray(rows, np.int64)
        if out is None:
            out = np.empty((len(rows), V, self.length), np.float16)
        assert out.shape == (len(rows), V, self.length)
        assert out.dtype == np.float16
        assert out.flags.c_contiguous
        places = out.view(np.uint8).reshape(len(rows), V * self.length * 2)
        where = self._places(rows)
        order = np.lexsort((where.offsets, where.shards))  # of the files, not of the batch
        if pool is None or len(rows) <= PIECE:
            self._read_into(places, rows, where, order)
        else:
            shares = np.array_split(order, min(PIECES, -(-len(rows) // PIECE)))
            deque(pool.map(partial(self._read_into, places, rows, where), shares), maxlen=0)  # raises their errors
        return out

    def _read_into(self, places: NDArray[np.uint8], rows: Ints, where: "_Places", which: NDArray[np.intp]) -> None:
        """Read rows[i] to places[i] for each i in `which`, one after the other."""
        file, opened = None, -1
        for i in which.tolist():
            if file is None or opened != where.shards[i]:
                opened = int(where.shards[i])
                file = self._open(opened)
            file.read_into(places[i], int(where.offsets[i]))
            if self.check or not self._verified[rows[i]]:
                found = xxh3_64_digest(places[i].data) if where.quick[i] else hashlib.sha256(places[i].data).digest()
                self._verify(int(rows[i]), found, where.digests[i].tobytes(), file.name)

    def _verify(self, row: int, found: bytes, promised: bytes, where: str) -> None:
        """Raise unless these are the bytes that the manifest promises: a shard may be damaged, or changed under a run."""
        if found != promised[: len(found)]:
            name = self.ids(np.array([row]))[0]
            raise UserError(f"{where}: the checksum of {name} is wrong: its bytes are not those of the build; {REMEDY}")
        self._verified[row] = True

    def _check_common(self, field: str) -> None:
        """All databases must have the same value in `field` of dataset.json."""
        values = {database: getattr(dataset, field) for database, dataset in self.datasets.items()}
        if any(value != values[self.databases[0]] for value in values.values()):
            raise UserError(f"databases differ in {field}: {values}; build their shards with the same preprocessing")

    def fetch(self, shard: int) -> None:
        """Fetch a remote shard into the cache before it is read."""
        if isinstance(self.source, RemoteFolder):
            self.source.fetch(self.shards[shard])

    def _first_offsets(self) -> Iterator[tuple[int, int]]:
        """Number of a shard, and the offset of its first recording."""
        for table, number in zip(self.tables, self._numbers, strict=True):
            shard = number[table.codes("shard")]
            begins = np.flatnonzero(np.diff(shard, prepend=-1))[::-1]  # a shard's first row comes last, and counts
            yield from zip(shard[begins].tolist(), table.offset[begins].tolist(), strict=True)

    def _check_sizes(self) -> None:
        """Every recording is inside its shard, and the shard's file is as long as dataset.json says."""
        ends = np.array([shard.bytes for shard in self.shards])
        for database, table, number in zip(self.databases, self.tables, self._numbers, strict=True):
            for piece in pieces(len(table)):
                offset, where = table.offset[piece], number[table.codes("shard")[piece]]
                outside = (offset < NPY_HEADER) | (offset + V * self.length * 2 > ends[where])
                if outside.any():
                    bad = int(outside.argmax())
                    name = table.names(slice(piece.start + bad, piece.start + bad + 1))[0]
                    tar = self.shards[int(where[bad])].name
                    raise UserError(f"{database}/{tar}: manifest.csv does not match the tar at {name}; {REMEDY}")
        if isinstance(self.source, LocalFolder):
            for shard in self.shards:
                path = Path(self.source.where(shard))
                size = path.stat().st_size if path.is_file() else None
                if size != shard.bytes:
                    found = (
                        "is missing" if size is None else f"has {size:,} bytes, not the {shard.bytes:,} of dataset.json"
                    )
                    raise UserError(f"{path}: {found}; {REMEDY}")

    def _open(self, shard: int) -> "_File":
        with self._lock:
            file = self._files.pop(shard, None)
            if file is not None:
                self._files[shard] = file  # now the most recently used
                return file
        where = self.source.where(self.shards[shard])
        try:
            file = _File(self.source.open(self.shards[shard]), where)
        except OSError as error:
            raise UserError(f"{where}: {error.strerror}") from error
        file.check_header(self._first[shard], self.length)
        if not self.source.remote:  # an open file would keep an evicted copy on the disk
            with self._lock:
                self._files[shard] = file
                while len(self._files) > KEEP_OPEN:
                    del self._files[next(iter(self._files))]
        return file


class _Places(NamedTuple):
    """Where some recordings are, and their checksums."""

    shards: Ints
    offsets: Ints
    digests: NDArray[np.uint8]
    """[n, 32]"""
    quick: NDArray[np.bool_]
    """Where a digest is an XXH3 of eight bytes, not a SHA-256."""


class _File:
    """An open shard. It is closed when nothing refers to it any more: no thread loses a file that it is reading."""

    def __init__(self, fd: int, name: str) -> None:
        self.fd, self.name = fd, name

    def __del__(self) -> None:
        os.close(self.fd)

    def read_into(self, place: NDArray[np.uint8], offset: int) -> None:
        try:
            count = os.preadv(self.fd, [place.data], offset)
        except OSError as error:
            raise UserError(f"{self.name}: {error.strerror} at byte {offset}") from error
        if count != place.nbytes:
            raise UserError(
                f"{self.name}: ends at byte {offset + count}, inside a recording: it was cut while in use; {REMEDY}"
            )

    def check_header(self, offset: int, length: int) -> None:
        """The bytes before an array's data must be the .npy header of that shape."""
        header = io.BytesIO(os.pread(self.fd, NPY_HEADER, offset - NPY_HEADER))
        try:
            version = np.lib.format.read_magic(header)
            found = np.lib.format.read_array_header_1_0(header) if version == (1, 0) else None
        except ValueError:
            found = None
        if found != ((V, length), False, np.dtype("<f2")) or header.tell() != NPY_HEADER:
            raise UserError(
                f"{self.name}: no array [12, {length}] at byte {offset}: manifest.csv does not match the tar; {REMEDY}"
            )


def shards_of(dataset: Dataset, table: Table, database: str, folder: Path) -> list[Shard]:
    """The shards that dataset.json lists. Refuses a manifest that is not consistent with it."""
    expected = {"database": database, "dtype": "float16", "recordings": len(table)}
    for field, value in expected.items():
        if (found := getattr(dataset, field)) != value:
            raise UserError(f"{folder}/dataset.json: {field} is {found!r}, expected {value!r}; {REMEDY}")
    shards = [Shard(database, plain_name(s.name, folder), s.sha256, s.bytes, s.recordings) for s in dataset.shards]
    if table.counts("shard") != {shard.name: shard.recordings for shard in shards if shard.recordings}:
        raise UserError(f"{folder}: manifest.csv and dataset.json differ in shards or their counts; {REMEDY}")
    if {*table.counts("database")} != {database}:
        raise UserError(f"{folder}/manifest.csv: not all recordings are of `{database}`; {REMEDY}")
    return shards
