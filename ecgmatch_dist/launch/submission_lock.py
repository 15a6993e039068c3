"""A lock between the nodes of a cluster: only one `ecgmatch sweep` at a time submits into a folder of runs.

The lock is a file that only one process can create (O_EXCL), because flock does not reach other nodes on every shared file
system. Nothing releases such a file after a kill, so it names its process: the same machine can see that this one is dead.
"""

import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ecgmatch_dist.errors import UserError
from ecgmatch_dist.files.lock import locked

NAMELESS_SECONDS = 60.0  # a lock without a name is younger: its process has just created it


@contextmanager
def submission_lock(runs: Path) -> Iterator[None]:
    """Hold the lock, or raise at once if another process holds it: two submissions could submit the same runs."""
    path = runs / "sweeps" / "submitting"
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_if_stale(path)
    try:
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    except FileExistsError:
        owner = path.read_text().strip()
        raise UserError(f"{path}: another sweep is being submitted ({owner}); if it is not, remove that file") from None
    try:
        os.write(handle, f"{socket.gethostname()}, process {os.getpid()}, {time.ctime()}".encode())
        os.close(handle)
        yield
    finally:
        path.unlink()


def remove_if_stale(path: Path) -> None:
    """Remove a lock whose owner is dead. One at a time: of two commands that see it, the second could otherwise remove the new
    lock of the first. Only commands of the owner's machine come here, so a lock of this machine suffices."""
    with locked(path.with_name(".submitting.lock")), suppress(FileNotFoundError):
        owner = path.read_text()
        # Killed between creating the file and writing its name into it: nobody would ever release that.
        nameless = not owner and time.time() - path.stat().st_mtime > NAMELESS_SECONDS
        if nameless or owner_is_dead(owner):
            path.unlink()


def owner_is_dead(owner: str) -> bool:
    """Whether the lock was left by a process of this machine that no longer exists. Processes of other machines cannot be seen
    from here: their locks are respected."""
    found = re.match(rf"{re.escape(socket.gethostname())}, process (\d+), ", owner)
    return found is not None and not Path(f"/proc/{found[1]}").exists()
