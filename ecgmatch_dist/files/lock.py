"""Lock files, by filelock: threads and processes of one machine exclude each other, a killed holder releases its lock."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from ecgmatch_dist.errors import UserError
from ecgmatch_dist.files.atomic import UMASK

POLL = 0.01  # seconds between two attempts of `locked`


@contextmanager
def only_one(path: Path, otherwise: str) -> Iterator[None]:
    """Hold the lock file `path`, or raise `otherwise` at once if somebody else holds it."""
    lock = _lock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise UserError(otherwise) from None
    try:
        yield
    finally:
        lock.release()


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock file `path`; wait as long as somebody else holds it."""
    with _lock(path).acquire(poll_interval=POLL):
        yield


def is_free(path: Path) -> bool:
    """Whether nobody holds the lock file `path`."""
    try:
        with _lock(path).acquire(timeout=0):
            return True
    except Timeout:
        return False


def _lock(path: Path) -> FileLock:
    path.parent.mkdir(parents=True, exist_ok=True)
    return FileLock(path, mode=0o666 & ~UMASK)  # some folders are shared by several users
