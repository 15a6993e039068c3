"""Random access to the recordings in shards: one `pread` per recording, straight into the batch's buffer."""

import hashlib
import io
import os
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Executor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ecgmatch_dist.data.index import REMEDY, Dataset, read_dataset, read_manifest
from ecgmatch_dist.data.remote import LocalFolder, RemoteFolder, Shard, plain_name, scheme_of
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
        first time, on the thread that reads it; `check`: every time."""
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
        manifests, number = [], {}
        for database in databases:
            folder = self.source.folder(plain_name(database, root))
            dataset = read_dataset(folder)
            manifest = read_manifest(folder, dataset)
            self.datasets[database] = dataset
            for shard in shards_of(dataset, manifest, database, folder):
                number[database, shard.name] = len(self.shards)
                self.shards.append(shard)
            manifests.append(manifest.assign(id=database + "/" + manifest["key"]))
        for field in ("rate", "length", "preprocess"):
            self._check_common(field)
        first = self.datasets[databases[0]]
        self.rate, self.length, self.preprocess = first.rate, first.length, first.preprocess
        self.manifest = pd.concat(manifests, ignore_index=True)
        # A fifth of the memory of the texts, and all that is needed of them.
        self._sha256 = np.frombuffer(bytes.fromhex("".join(self.manifest.pop("sha256"))), "V32")
        self._verified = np.zeros(len(self.manifest), bool)
        pairs = zip(self.manifest["database"], self.manifest["shard"], strict=True)
        self._shard = np.fromiter((number[pair] for pair in pairs), np.int64, len(self.manifest))
        self._offset = self.manifest["offset"].to_numpy(np.int64)
        self._first = dict(zip(self._shard[::-1].tolist(), self._offset[::-1].tolist(), strict=True))  # of each shard
        self._index = pd.Index(self.manifest["id"])
        if self._index.has_duplicates:
            raise UserError(f"{root}: two recordings are called {self._index[self._index.duplicated()][0]}")
        self._check_sizes()
        self._files: dict[int, _File] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._offset)

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in ("_files", "_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _files={}, _lock=threading.Lock())

    def rows(self, ids: Sequence[str]) -> Ints:
        """Ids "database/key" -> rows of the store [n]."""
        rows = self._index.get_indexer(pd.Index(ids, dtype=self._index.dtype))
        if (missing := np.flatnonzero(rows < 0)).size:
            raise UserError(
                f"{ids[missing[0]]}: not in these shards ({missing.size:,} of {len(ids):,} ids are missing)"
            )
        return np.asarray(rows, np.int64)

    def shards_of_rows(self, rows: Ints) -> Ints:
        """The number of the shard of each row [n]: an index of `.shards`."""
        return self._shard[rows]

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
        order = np.lexsort((self._offset[rows], self._shard[rows]))  # of the files, not of the batch
        if pool is None or len(rows) <= PIECE:
            self._read_into(places, rows, order)
        else:
            pieces = np.array_split(order, min(PIECES, -(-len(rows) // PIECE)))
            deque(pool.map(partial(self._read_into, places, rows), pieces), maxlen=0)  # raises their errors
        return out

    def _read_into(self, places: NDArray[np.uint8], rows: Ints, which: NDArray[np.intp]) -> None:
        """Read rows[i] to places[i] for each i in `which`, one after the other."""
        file, opened = None, -1
        for i in which.tolist():
            row = int(rows[i])
            if file is None or opened != self._shard[row]:
                opened = int(self._shard[row])
                file = self._open(opened)
            file.read_into(places[i], int(self._offset[row]))
            if self.check or not self._verified[row]:
                self._verify(row, places[i], file.name)

    def _verify(self, row: int, data: NDArray[np.uint8], where: str) -> None:
        """Raise unless these are the bytes that the manifest promises: a shard may be damaged, or changed under a run."""
        if hashlib.sha256(data.data).digest() != self._sha256[row].tobytes():
            name = self.manifest["id"].iat[row]
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

    def _check_sizes(self) -> None:
        """Every recording is inside its shard, and the shard's file is as long as dataset.json says."""
        ends = np.array([shard.bytes for shard in self.shards])[self._shard]
        outside = (self._offset < NPY_HEADER) | (self._offset + V * self.length * 2 > ends)
        if (bad := np.flatnonzero(outside)).size:
            row = self.manifest.iloc[int(bad[0])]
            raise UserError(
                f"{row['database']}/{row['shard']}: manifest.csv does not match the tar at {row['key']}; {REMEDY}"
            )
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


def shards_of(dataset: Dataset, manifest: pd.DataFrame, database: str, folder: Path) -> list[Shard]:
    """The shards that dataset.json lists. Refuses a manifest that is not consistent with it."""
    expected = {"database": database, "dtype": "float16", "recordings": len(manifest)}
    for field, value in expected.items():
        if (found := getattr(dataset, field)) != value:
            raise UserError(f"{folder}/dataset.json: {field} is {found!r}, expected {value!r}; {REMEDY}")
    shards = [Shard(database, plain_name(s.name, folder), s.sha256, s.bytes, s.recordings) for s in dataset.shards]
    counts = manifest["shard"].value_counts().to_dict()
    if counts != {shard.name: shard.recordings for shard in shards if shard.recordings}:
        raise UserError(f"{folder}: manifest.csv and dataset.json differ in shards or their counts; {REMEDY}")
    if (manifest["database"] != database).any() or not np.array_equal(manifest["row"], np.arange(len(manifest))):
        raise UserError(f"{folder}/manifest.csv: rows are not 0..{len(manifest) - 1} of `{database}`; {REMEDY}")
    return shards
