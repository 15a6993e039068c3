"""Only one copy of a run writes into its folder: a generation is taken at start and looked at before every write.

Slurm starts a second copy of a run while the first still works when a node's daemon dies but the node does not. The newer
copy wins; the older one ends. Nothing here needs locks, which shared file systems often only pretend to have: a generation
is a file that only one copy can create, and taking over is a line appended to the older copies' files. A copy looks by
opening its own file anew, which even NFS answers from the server, while the absence of a file may be a cached memory.

Between the look and the rename that makes a file visible a copy can be held up for any time. So a copy prepares its files on a
desk of its own, `copies/<generation>/`, and whoever takes over clears the older copies' desks after it has signed in their
files: a look that comes later sees the signature, and a rename whose look came earlier finds its file gone. (A checkpoint is a
folder, which a rename can catch while it is being cleared: it lacks files then, and is passed over as damaged.)
"""

import datetime
import json
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
from ecgmatch_dist.files import json_text, sync_folder, write_atomic

REMEDY = "Make room or mend the disk; the same command goes on from the last checkpoint"
EVERY = 1.0  # seconds between looks that no write asks for


class Superseded(UserError):
    """A newer copy of this run is at work: this one ends and writes nothing more."""


def owner() -> str:
    """Who this copy is. A restart by the same torchrun is the same owner, a job that Slurm starts again is another one."""
    names = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_RESTART_COUNT")
    words = [os.environ[name] for name in names if os.environ.get(name)]
    return "/".join(words) or f"{socket.gethostname()}/{os.getpid()}/{time.time_ns()}"


def restarted() -> bool:
    """Whether torchrun has started this copy again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0


class Fence:
    """The generation of this copy. Rank 0 takes it and looks; the other ranks only know its number."""

    def __init__(self, folder: Path, generation: int, looks: bool = True) -> None:
        self.folder, self.generation, self.looks = folder, generation, looks
        self.looked = time.monotonic()

    @property
    def desk(self) -> Path:
        """Where this copy prepares what it writes."""
        return _desk(self.folder, self.generation)

    @classmethod
    def take(cls, folder: Path) -> "Fence":
        """Become the newest copy of the run in `folder`, and tell the older ones."""
        place = folder / "generations"
        place.mkdir(parents=True, exist_ok=True)
        me, taken = owner(), set[int]()
        while True:
            older = {number: _read(_path(folder, number)) for number in sorted(_numbers(folder) | taken)}
            newest = max(older, default=0)
            mine = [
                n for n, records in older.items() if any(r["generation"] == n and r["owner"] == me for r in records)
            ]
            # torchrun restarts an older copy because it ended. Who is started for the first time may take over, even under a
            # name that was here before: torchrun's is "none" on several nodes, and a shell of salloc keeps its job's number.
            if restarted() and mine and newest not in mine and older[newest]:
                raise Superseded(_message(folder, mine[-1], older[newest]))
            record = {"generation": newest + 1, "owner": me, "host": socket.gethostname(), "pid": os.getpid()}
            record["started"] = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
            try:
                _create(_path(folder, newest + 1), record)
            except FileExistsError:  # another copy starts at this moment, even if the listing does not show it yet
                taken.add(newest + 1)
                continue
            for number in older:
                _append(_path(folder, number), record)
            for number in older:
                _clear(_desk(folder, number))
            _desk(folder, newest + 1).mkdir(parents=True)
            sync_folder(place)
            return cls(folder, newest + 1)

    def check(self) -> None:
        """Called right before something that was written becomes visible in the run folder."""
        if self.looks:
            self.look()

    def look(self) -> None:
        self.looked = time.monotonic()
        try:
            records = _read(_path(self.folder, self.generation))
        except FileNotFoundError:
            raise UserError(f"{self.folder}: the folder was removed while the run was at work") from None
        if newer := [record for record in records if record["generation"] > self.generation]:
            raise Superseded(_message(self.folder, self.generation, newer))

    def write(self, path: Path, write: Callable[[Path], object]) -> None:
        """Put a file in its place, unless a newer copy has taken over."""
        try:
            write_atomic(path, write, self.check, self.desk)
        except (OSError, SafetensorError) as error:
            self.blame(error)
            raise UserError(f"{path}: could not be written: {error}. {REMEDY}") from error

    def write_text(self, path: Path, text: str) -> None:
        self.write(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))

    def write_json(self, path: Path, value: Any) -> None:
        self.write_text(path, json_text(value))

    def blame(self, error: BaseException) -> None:
        """If a newer copy has taken over and cleared this one's desk, that is why a write failed: raise that instead."""
        try:
            self.look()
        except UserError as reason:
            raise reason from error

    @contextmanager
    def explained(self) -> Iterator[None]:
        """What files deny to a run, whichever they are, as a sentence."""
        try:
            yield
        except OSError as error:
            self.blame(error)
            raise UserError(f"{self.folder}: {error}. {REMEDY}") from error

    def leave(self) -> None:
        """Called by each rank at the end of the run: the last one takes the empty desk away."""
        for place in (self.desk / "heartbeats", self.desk, self.desk.parent):
            with suppress(OSError):
                place.rmdir()

    def lost(self) -> str:
        """Why this copy must end, or nothing; looks at most once a second."""
        if time.monotonic() - self.looked < EVERY:
            return ""
        try:
            self.check()
        except UserError as error:
            return str(error)
        return ""


def _path(folder: Path, number: int) -> Path:
    return folder / "generations" / f"{number:06d}.jsonl"


def _desk(folder: Path, number: int) -> Path:
    return folder / "copies" / f"{number:06d}"


def _clear(desk: Path) -> None:
    """A copy that is still at work may add something meanwhile. NFS keeps a file that a process of this node has open, under
    another name, until it is closed: nothing can be renamed from there any more, so that is not waited for."""
    for _ in range(50):
        shutil.rmtree(desk, ignore_errors=True)
        if not desk.exists() or all(path.name.startswith(".nfs") for path in desk.rglob("*") if path.is_file()):
            return
        time.sleep(0.1)
    raise UserError(f"{desk}: cannot be removed; does it belong to somebody else?")


def _numbers(folder: Path) -> set[int]:
    return {int(path.stem) for path in (folder / "generations").glob("*.jsonl")}


def _create(path: Path, record: dict[str, Any]) -> None:
    """A file that only one copy can make, by a link: it is there with its line or not at all. If it were made empty first, NFS
    could put the line over the signature of a newer copy that has found it meanwhile."""
    temporary = path.with_suffix(f".{socket.gethostname()}.{os.getpid()}.{time.time_ns()}")
    _append(temporary, record, os.O_CREAT | os.O_EXCL)
    try:
        os.link(temporary, path)
    except OSError as error:
        if temporary.stat().st_nlink == 2:  # NFS asked twice, and had been given it the first time
            return
        if isinstance(error, FileExistsError):
            raise
        _append(path, record, os.O_CREAT | os.O_EXCL)  # a file system without links
    finally:
        temporary.unlink()


def _append(path: Path, record: dict[str, Any], flags: int = 0) -> None:
    """One line, in one write at the end of the file. Of several newer copies that sign an older one's at once, NFS may keep one
    line only; that is enough for it to know."""
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | flags, 0o644)
    try:
        os.write(handle, (json.dumps(record) + "\n").encode())
        os.fsync(handle)
    finally:
        os.close(handle)


def _read(path: Path) -> list[dict[str, Any]]:
    """The records of a generation; the newest copies come last. A line cut by a power failure tells nothing."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:
            continue
    return records


def _message(folder: Path, generation: int, newer: list[dict[str, Any]]) -> str:
    last = max(newer, key=lambda record: int(record["generation"]))
    return (
        f"{folder}: a newer copy of this run has taken over (generation {last['generation']}, on {last['host']}, process "
        f"{last['pid']}, started {last['started']}): this one, generation {generation}, ends and writes nothing more"
    )
