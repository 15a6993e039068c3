"""Folders of shards: local ones, and those behind http(s)://, s3:// and the like with a bounded cache on the local disk.

fsspec fetches remote shards whole. All processes of a node may share the cache: a shard is fetched once, appears only when
it is complete and its checksum is right, and the least recently used ones are evicted. An open file stays readable after that.
"""

import asyncio
import contextlib
import errno
import hashlib
import os
import re
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec

from ecgmatch_dist.data.index import file_sha256, read_dataset
from ecgmatch_dist.data.table import NAME, manifest_of
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.files.lock import is_free, locked

SCHEMES = ("http", "https", "s3", "gs", "gcs", "az", "abfs", "abfss")
LARGEST_TABLE = 2**36
"""Bytes of dataset.json or of the table: 64 GiB are some hundred million recordings. A server may never end."""
SLOWEST, PATIENCE = 1024, 60.0
"""Bytes per second, on average, after so many seconds; a slower server holds a run up for ever."""
ATTEMPTS = 3
PAUSE = 1.0  # seconds before the second attempt; twice as long before the third


def scheme_of(root: str) -> str:
    """The scheme of a URL, "" for a local path. Refuses URLs that could start a command, such as `pipe:`."""
    match = re.match(r"([A-Za-z][A-Za-z0-9+.-]*):", root)
    if not match:
        return ""
    scheme = match[1].lower()
    if scheme not in SCHEMES or not root[match.end() :].startswith("//"):
        raise UserError(f"{root}: shards are not read from `{scheme}:`; give a folder or a URL of {', '.join(SCHEMES)}")
    if forbidden := re.search(r"[^A-Za-z0-9._~:/@%+,=\[\]-]|::", root):
        raise UserError(f"{root}: `{forbidden[0]}` is not allowed in the URL of a folder; percent-encode it")
    return scheme


def connection_options(scheme: str) -> dict[str, Any]:
    """For fsspec. By default aiohttp ends every transfer after five minutes."""
    if not scheme.startswith("http"):
        return {}
    import aiohttp  # slow to import, and most shards lie in a folder

    return {"client_kwargs": {"timeout": aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=60)}}


def network_errors(*more: type[Exception]) -> tuple[type[Exception], ...]:
    """What a transfer may end with, for `except`."""
    import aiohttp

    return OSError, asyncio.TimeoutError, aiohttp.ClientError, *more


def plain_name(name: str, where: object) -> str:
    """`name` itself. Refuses a name that leads out of its folder."""
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.+@=-]*", name):
        raise UserError(f"{where}: `{name}` is not the name of a database or shard; letters, digits, _ . - only")
    return name


@dataclass(frozen=True)
class Shard:
    """A shard of a database, as dataset.json lists it."""

    database: str
    name: str
    sha256: str
    bytes: int
    recordings: int


class NotThere(UserError):
    """The server has no such file."""


class LocalFolder:
    """Shards in a folder of this machine."""

    remote = False

    def __init__(self, root: Path) -> None:
        self.root = root

    def folder(self, database: str) -> Path:
        """The folder with dataset.json and the table of a database."""
        if not self.root.is_dir():
            raise UserError(f"{self.root}: no such folder of shards; `ecgmatch shards build` makes it")
        if not (self.root / database / "dataset.json").is_file():
            here = ", ".join(sorted(p.parent.name for p in self.root.glob("*/dataset.json"))) or "no database"
            raise UserError(
                f"{self.root}: no finished shards of `{database}`; here: {here}; see `ecgmatch shards build`"
            )
        return self.root / database

    def where(self, shard: Shard) -> str:
        return str(self.root / shard.database / shard.name)

    def open(self, shard: Shard) -> int:
        """A file descriptor of the shard, open for reading."""
        return os.open(self.root / shard.database / shard.name, os.O_RDONLY)


class RemoteFolder:
    """Shards behind a URL, read through a cache of at most `cache_bytes`."""

    remote = True

    def __init__(self, url: str, cache: Path, cache_bytes: int) -> None:
        self.url, self.scheme = url.rstrip("/"), scheme_of(url)
        self.cache_bytes = cache_bytes
        self.meta = cache / "meta" / hashlib.sha256(self.url.encode()).hexdigest()[:16]
        self.shards = cache / "shards"
        self._room = self.shards / "room.lock"
        try:
            for folder in (self.meta, self.shards):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{cache}: the cache for remote shards cannot be made: {error.strerror}") from error

    def folder(self, database: str) -> Path:
        """Fetch dataset.json and the table of a database. Returns their folder in the cache."""
        folder = self.meta / database
        folder.mkdir(exist_ok=True)
        with locked(folder / ".lock"):  # the ranks of a node fetch a table once, and map the same file
            self._fetch_table(f"{database}/dataset.json", folder / "dataset.json")
            expected, table = read_dataset(folder).manifest_sha256, folder / NAME
            if manifest_of(table) != expected:
                with contextlib.suppress(NotThere):  # shards that were built before there was the file
                    self._fetch_table(f"{database}/{NAME}", table)
            if manifest_of(table) != expected:  # some servers answer with a page for what they do not have
                table.unlink(missing_ok=True)
                self._fetch_table(f"{database}/manifest.csv", folder / "manifest.csv")
        return folder

    def _fetch_table(self, name: str, to: Path) -> None:
        part = to.with_name(f"{to.name}.{uuid.uuid4().hex}.part")
        self._download(name, part, LARGEST_TABLE)
        os.replace(part, to)

    def where(self, shard: Shard) -> str:
        return f"{self.url}/{shard.database}/{shard.name}"

    def open(self, shard: Shard) -> int:
        """A file descriptor of the cached shard, fetched if needed. It stays valid if the shard is evicted."""
        while True:
            try:
                fd = os.open(self._copy(shard), os.O_RDONLY)
            except FileNotFoundError:
                self.fetch(shard)
                continue
            os.utime(fd)  # most recently used: evicted last
            return fd

    def fetch(self, shard: Shard) -> None:
        """Fetch the shard into the cache unless it is there. Threads and processes that want the same shard wait."""
        copy = self._copy(shard)
        with locked(copy.with_suffix(".lock")):
            with contextlib.suppress(FileNotFoundError):
                os.utime(copy)  # it is there and needed soon: not evicted next
                return
            part = self._reserve(shard)
            try:
                for attempt in range(1, ATTEMPTS + 1):
                    self._download(f"{shard.database}/{shard.name}", part, shard.bytes)
                    if part.stat().st_size == shard.bytes and file_sha256(part) == shard.sha256:
                        with locked(self._room):  # whoever counts what is there sees one of the two names
                            os.replace(part, copy)
                        return
                    time.sleep(PAUSE * attempt)
            finally:
                part.unlink(missing_ok=True)
        raise UserError(
            f"{self.where(shard)}: the checksum of what arrives is not the one in dataset.json; verify the source"
        )

    def _copy(self, shard: Shard) -> Path:
        return self.shards / f"{shard.sha256}.tar"  # named by content: a shard that was rebuilt is another file

    def _reserve(self, shard: Shard) -> Path:
        """Make room for the shard and reserve it: the name of the unfinished file holds its number of bytes."""
        if shard.bytes > self.cache_bytes:
            raise UserError(f"{self.where(shard)}: {shard.bytes:,} bytes do not fit the cache of {self.cache_bytes:,}")
        part = self.shards / f"{shard.sha256}.{shard.bytes}.part"
        while True:
            with locked(self._room):
                copies = sorted(((p, p.stat()) for p in self.shards.glob("*.tar")), key=lambda c: c[1].st_mtime_ns)
                used = sum(stat.st_size for _, stat in copies) + sum(map(reserved_bytes, self._unfinished(part)))
                while copies and used + shard.bytes > self.cache_bytes:
                    oldest, stat = copies.pop(0)
                    oldest.unlink()
                    used -= stat.st_size
                if used + shard.bytes <= self.cache_bytes:
                    part.touch()
                    return part
            time.sleep(0.05)  # the rest is reserved by others: wait until they are done

    def _unfinished(self, own: Path) -> list[Path]:
        """Unfinished files that others are fetching. Removes those of killed processes."""
        fetched = []
        for part in self.shards.glob("*.part"):
            lock = part.with_name(part.name.split(".")[0] + ".lock")
            if part == own or is_free(lock):
                part.unlink(missing_ok=True)
            else:
                fetched.append(part)
        return fetched

    def _download(self, name: str, to: Path, most: int) -> None:
        for attempt in range(1, ATTEMPTS + 1):
            try:
                filesystem, path = fsspec.core.url_to_fs(f"{self.url}/{name}", **connection_options(self.scheme))
                filesystem.get_file(path, str(to), callback=Watch(f"{self.url}/{name}", most))
                return
            except UserError:
                to.unlink(missing_ok=True)
                raise
            except ImportError as error:
                raise UserError(f"{self.url}: {error} (pip install 'ecgmatch-dist[s3]' for s3://)") from error
            except FileNotFoundError as error:
                raise NotThere(f"{self.url}/{name}: not found") from error
            except network_errors() as error:
                if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise UserError(f"{to.parent}: no space left for the cache; make it smaller or move it") from error
                if attempt == ATTEMPTS:
                    raise UserError(
                        f"{self.url}/{name}: {error or type(error).__name__}; {ATTEMPTS} attempts"
                    ) from error
                time.sleep(PAUSE * attempt)


class Watch(fsspec.callbacks.Callback):  # type: ignore[misc]
    """Ends a transfer that is longer than promised, or so slow that it would never end."""

    def __init__(self, url: str, most: int) -> None:
        super().__init__()
        self.url, self.most, self.received, self.began = url, most, 0, time.monotonic()

    def relative_update(self, inc: int = 1) -> None:
        self.received += inc
        seconds = time.monotonic() - self.began
        if self.received > self.most:
            raise UserError(f"{self.url}: sends more than the {self.most:,} bytes that it may have; verify the source")
        if seconds > PATIENCE and self.received < SLOWEST * seconds:
            raise UserError(
                f"{self.url}: {self.received:,} bytes in {seconds:.0f} s, too slow; try again, or another source"
            )


def reserved_bytes(part: Path) -> int:
    return int(part.name.split(".")[1])
