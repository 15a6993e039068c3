"""The error for problems that a user can fix. It is shown as one line, without a traceback."""

import errno
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ESTALE}
"""Failures of a disk, also where Python does not say of which file."""
TOO_MANY = {errno.EMFILE, errno.ENFILE}
"""No file can be opened, because too many are open."""
AGAIN = "then give the same command again"


class UserError(Exception):
    """The problem, where it is, and the remedy, in one line."""


def error_line(error: UserError, rank: int = 0) -> str:
    """The line that a user sees."""
    return f"ecgmatch: {error}" if rank == 0 else f"ecgmatch (rank {rank}): {error}"


class Ending(NamedTuple):
    """How a command ends after an error."""

    line: str
    """What the user reads; empty: nothing."""
    code: int
    """Exit code, as shells expect it."""


def ending(error: BaseException, rank: int = 0) -> Ending | None:
    """How a command or a rank ends after this error. None: it is a fault of the program, and wants a traceback."""
    if isinstance(error, UserError):
        return Ending(error_line(error, rank), 1)
    if isinstance(error, KeyboardInterrupt):
        # The ranks of a launcher are interrupted all together; the launcher tells it once.
        return Ending("ecgmatch: interrupted; the same command continues where it stopped", 128 + signal.SIGINT)
    if isinstance(error, BrokenPipeError):  # `ecgmatch ... | head`: the work was not done to its end
        return Ending("", 128 + signal.SIGPIPE)
    if isinstance(error, OSError) and (sentence := file_sentence(error)):
        return Ending(error_line(UserError(sentence), rank), 1)
    return None


def file_sentence(error: OSError) -> str | None:
    """What to tell a user about a failure of files: which one, why, and the remedy. None: it is about something else."""
    if error.filename is None and error.errno not in DISK | TOO_MANY:
        return None
    remedy = ""
    if error.errno in DISK:
        remedy = f"; make room or repair the disk, {AGAIN}"
    elif error.errno in TOO_MANY:
        remedy = f"; allow more of them (ulimit -n 4096), {AGAIN}"
    elif error.errno in (errno.EACCES, errno.EPERM):
        remedy = "; name another place, or ask its owner for the right to read and write there"
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror or error}{remedy}"


def memory_sentence(error: Exception) -> str | None:
    """What was asked for when memory ran out, in one line. None: the error is about something else. Torch has an error of its
    own for its GPU memory, and nothing but a text for the CPU, for pinned memory and for the libraries that it calls."""
    texts = "DefaultCPUAllocator", "out of memory", "_STATUS_ALLOC_FAILED"
    of_torch = isinstance(error, RuntimeError) and any(text in str(error) for text in texts)
    if not isinstance(error, MemoryError) and not of_torch:
        return None
    asked = " ".join(str(error).split())[:200]
    return f"out of memory ({asked})" if asked else "out of memory"


@contextmanager
def memory_told(remedy: str) -> Iterator[None]:
    """Turn an error of memory into a UserError with this remedy."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if (sentence := memory_sentence(error)) is None:
            raise
        raise UserError(f"{sentence}: {remedy}") from error


def require(condition: bool, field: str, value: object, remedy: str) -> None:
    """Raise a UserError with the name of the field and what to write instead, unless the condition holds."""
    if not condition:
        raise UserError(f"{field} = {value!r}: {remedy}")
