"""Fencing: of several copies of a run that are started on one folder, only the newest writes.

Slurm can start a second copy while the first still runs (a node's daemon dies, the node does not). Every copy acquires the
next generation number, its fencing token, and checks it before every write. An older copy ends with `Superseded`.

There are no locks, because shared file systems often do not implement them. Only one copy can create
`generations/<number>.jsonl`, and it appends its record to the files of all older copies. A copy checks by reading its own file:
opening a file makes even NFS ask the server, while a file that seems missing may be a stale cache entry.

A copy can be suspended between its check and the rename that publishes a file. So it prepares files in a workspace of its own,
`copies/<generation>/`, and a newer copy deletes the older workspaces after it has appended its records: a later check finds the
record, and a rename after an earlier check finds its file gone. (A checkpoint is a folder and may be renamed while it is being
deleted. Then it lacks files and is skipped as damaged.)
"""

import datetime
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from ecgmatch_dist.errors import UserError
from ecgmatch_dist.files.atomic import json_text, sync_folder, write_atomic
from ecgmatch_dist.files.jsonl import parse_lines, to_line

REMEDY = "Make room or repair the disk; the same command goes on from the last checkpoint"
POLL_SECONDS = 1.0  # shortest time between two polls
STALE_SECONDS = (1, 2, 3, 0)  # waits before a second look: so long a shared file system may show an old file


class Superseded(UserError):
    """A newer copy of this run has taken over: this one ends and writes nothing more."""


def owner() -> str:
    """Identity of this copy. A restart by the same torchrun keeps it; a job that Slurm requeues gets another."""
    names = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_RESTART_COUNT")
    words = [os.environ[name] for name in names if os.environ.get(name)]
    return "/".join(words) or f"{socket.gethostname()}/{os.getpid()}/{time.time_ns()}"


def restarted() -> bool:
    """True if torchrun has restarted this copy."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0


class Fence:
    """The generation of this copy. Rank 0 acquires and checks it; the other ranks only know its number."""

    def __init__(self, folder: Path, generation: int, main: bool = True) -> None:
        """`main`: this is rank 0."""
        self.folder, self.generation, self.main = folder, generation, main
        self.last_check = time.monotonic()

    @property
    def workspace(self) -> Path:
        """Folder in which this copy prepares its files."""
        return _workspace(self.folder, self.generation)

    @classmethod
    def acquire(cls, folder: Path) -> "Fence":
        """Become the newest copy of the run in `folder`, and supersede the older ones."""
        generations = folder / "generations"
        generations.mkdir(parents=True, exist_ok=True)
        me, taken = owner(), set[int]()
        while True:
            older = {number: _read(_path(folder, number)) for number in sorted(_numbers(folder) | taken)}
            newest = max(older, default=0)
            mine = [
                n for n, records in older.items() if any(r["generation"] == n and r["owner"] == me for r in records)
            ]
            # torchrun restarts a superseded copy because it ended: refuse that. A first start may always take over, even with a
            # known owner: torchrun's run id is "none" on several nodes, and every run in one salloc shell has the same job id.
            if restarted() and mine and newest not in mine and older[newest]:
                raise Superseded(_message(folder, mine[-1], older[newest]))
            record = {"generation": newest + 1, "owner": me, "host": socket.gethostname(), "pid": os.getpid()}
            record["started"] = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
            try:
                _create(_path(folder, newest + 1), record)
            except FileExistsError:  # another copy was faster, even if the listing does not show its file yet
                taken.add(newest + 1)
                continue
            for number in older:
                _append(_path(folder, number), record)
            for number in older:
                _delete_workspace(_workspace(folder, number))
            _workspace(folder, newest + 1).mkdir(parents=True)
            sync_folder(generations)
            return cls(folder, newest + 1)

    def check(self) -> None:
        """On rank 0: raise `Superseded` if a newer copy has taken over. Call it right before a rename into the run folder."""
        if self.main:
            self.raise_if_superseded()

    def raise_if_superseded(self, cause: BaseException | None = None) -> None:
        """The check on any rank. With `cause`: a write failed, perhaps because a newer copy has deleted the workspace; then
        `Superseded` is raised from it."""
        self.last_check = time.monotonic()
        # A workspace that is gone was deleted by a newer copy, of which this node may not know yet.
        for wait in STALE_SECONDS if isinstance(cause, FileNotFoundError | SafetensorError) else (0,):
            try:
                records = _read(_path(self.folder, self.generation))
            except FileNotFoundError:
                raise UserError(f"{self.folder}: the folder was removed while the run was running") from cause
            if newer := [record for record in records if record["generation"] > self.generation]:
                raise Superseded(_message(self.folder, self.generation, newer)) from cause
            time.sleep(wait)

    def poll(self) -> str:
        """The reason why this copy must end, or "". Checks at most once per second."""
        if time.monotonic() - self.last_check < POLL_SECONDS:
            return ""
        try:
            self.check()
        except UserError as error:
            return str(error)
        return ""

    def write(self, path: Path, write: Callable[[Path], object]) -> None:
        """Write a file atomically, unless a newer copy has taken over."""
        try:
            write_atomic(path, write, self.check, self.workspace)
        except (OSError, SafetensorError) as error:
            self.raise_if_superseded(error)
            raise UserError(f"{path}: could not be written: {error}. {REMEDY}") from error

    def write_text(self, path: Path, text: str) -> None:
        self.write(path, lambda temporary: temporary.write_text(text, encoding="utf-8", errors="backslashreplace"))

    def write_json(self, path: Path, value: Any) -> None:
        self.write_text(path, json_text(value))

    @contextmanager
    def translate_errors(self) -> Iterator[None]:
        """Turn an OSError into `Superseded`, if that is the cause, or into a one-line UserError."""
        try:
            yield
        except BrokenPipeError:  # who read the output has gone: no fault of the folder
            raise
        except OSError as error:
            self.raise_if_superseded(error)
            raise UserError(f"{self.folder}: {error}. {REMEDY}") from error

    def release(self) -> None:
        """Called by each rank at the end of the run: the last one removes the empty workspace."""
        for folder in (self.workspace / "heartbeats", self.workspace, self.workspace.parent):
            with suppress(OSError):
                folder.rmdir()


def _path(folder: Path, number: int) -> Path:
    return folder / "generations" / f"{number:06d}.jsonl"


def _workspace(folder: Path, number: int) -> Path:
    return folder / "copies" / f"{number:06d}"


def _delete_workspace(workspace: Path) -> None:
    """Try several times: the older copy may still add files. NFS renames a file that a process of this node has open to `.nfs*`
    and deletes it when it is closed. Nothing can be published from such a file, so it is not waited for."""
    for _ in range(50):
        shutil.rmtree(workspace, ignore_errors=True)
        if not workspace.exists() or all(
            path.name.startswith(".nfs") for path in workspace.rglob("*") if path.is_file()
        ):
            return
        time.sleep(0.1)
    raise UserError(f"{workspace}: cannot be removed; does it belong to another user?")


def _numbers(folder: Path) -> set[int]:
    return {int(path.stem) for path in (folder / "generations").glob("*.jsonl")}


def _create(path: Path, record: dict[str, Any]) -> None:
    """Create a file with one record, or raise FileExistsError. A link makes the file and its record visible together: with an
    empty file first, NFS could write the record over that of a newer copy which has found the file meanwhile."""
    temporary = path.with_suffix(f".{socket.gethostname()}.{os.getpid()}.{time.time_ns()}")
    _append(temporary, record, os.O_CREAT | os.O_EXCL)
    try:
        os.link(temporary, path)
    except OSError as error:
        if temporary.stat().st_nlink == 2:  # NFS sent the request twice, and the first one had succeeded
            return
        if isinstance(error, FileExistsError):
            raise
        _append(path, record, os.O_CREAT | os.O_EXCL)  # a file system without links
    finally:
        temporary.unlink()


def _append(path: Path, record: dict[str, Any], flags: int = 0) -> None:
    """Append one line in one write. If several newer copies append at once, NFS may keep only one of the lines, which is enough
    for the older copy."""
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | flags, 0o644)
    try:
        os.write(handle, to_line(record).encode())
        os.fsync(handle)
    finally:
        os.close(handle)


def _read(path: Path) -> list[dict[str, Any]]:
    """The records of a generation: its own, then those of newer copies. A line cut by a power failure is skipped."""
    return list(parse_lines(path.read_text(encoding="utf-8").splitlines()))


def _message(folder: Path, generation: int, newer: list[dict[str, Any]]) -> str:
    last = max(newer, key=lambda record: int(record["generation"]))
    return (
        f"{folder}: a newer copy of this run has taken over (generation {last['generation']}, on {last['host']}, process "
        f"{last['pid']}, started {last['started']}): this one, generation {generation}, ends and writes nothing more"
    )
