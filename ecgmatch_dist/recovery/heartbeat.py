"""Heartbeats: when a collective fails, the remaining ranks report which rank is missing, and where it was last seen.

A process group times out without naming the rank or the step, and the first rank that gives up looks to the others like the one
that died. So a thread of every rank regularly writes the rank's position (whereabouts.py) to the workspace of this copy of the
run (generations.py). A rank that loses contact reads the heartbeats of the others.

A rank that ends with an error of its own (out of memory, a full disk) writes it to the file `ended`, which all ranks read with
every heartbeat. So they end within seconds, although on GPUs they wait in a kernel of NCCL and see no closed connection.
"""

import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from types import TracebackType
from typing import Any

from ecgmatch_dist.distributed.launcher import end_rank
from ecgmatch_dist.distributed.whereabouts import failed_collective, here
from ecgmatch_dist.errors import UserError

SILENT = 3  # periods without a heartbeat after which a rank counts as gone
MAX_ERROR = 2000  # characters of an error message: a heartbeat must fit into one disk block
LOST = 134  # exit code, as after an abort: torchrun and the job script (launch/site.py) restart the run


@contextmanager
def ending_at_once(rank: int, world: int) -> Iterator[None]:
    """With several ranks, an error ends this process as soon as it is written. Not a normal exit: destroying the process group
    would wait for kernels of NCCL that never end, and Python would wait for a checkpoint that the other ranks do not write."""
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        if world == 1:
            raise
        collective = failed_collective(error)

        def leave(code: int) -> None:
            for stream in (sys.stdout, sys.stderr):
                with suppress(Exception):
                    stream.flush()
            os._exit(LOST if code == 1 and collective else code)

        end_rank(error, rank, leave)
        if collective:  # between two runs of a chain, where no heartbeat tells which rank it was
            why = " ".join(str(error).split())[:200]
            end_rank(UserError(f"lost contact in {collective}; a rank that has ended said why ({why})"), rank, leave)
        traceback.print_exception(error)
        leave(1)


class Heartbeat:
    """`with Heartbeat(...)` around everything that the ranks do together. Does nothing for a single rank.

    An error caused by a lost rank ends the process at once with a diagnosis (`os._exit`): threads that wait in collectives
    forever would block a normal exit, and the checkpoints are on disk.
    """

    def __init__(
        self, workspace: Path, rank: int, world: int, timeout_minutes: float, say: Callable[[str], None] = print
    ) -> None:
        self.folder, self.rank, self.world, self.say = workspace / "heartbeats", rank, world, say
        self.ended = self.folder / "ended"
        self.timeout = 60 * timeout_minutes
        self.period = min(5.0, self.timeout / 20)
        self.stop = Event()
        self.thread = Thread(target=self._beat, name="heartbeat", daemon=True)

    def __enter__(self) -> "Heartbeat":
        if self.world > 1:
            self.folder.mkdir(exist_ok=True)
            here.moved = time.time()
            with self.ended.open("a") as file:  # made now: NFS shows a change of a file sooner than a new one
                file.write(" ")
            self._write()
            self.thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.world == 1:
            return
        collective = failed_collective(error)
        if collective is None:
            self.stop.set()
            self.thread.join()
            if isinstance(error, Exception):
                text = f"{type(error).__name__}: {error}"[:MAX_ERROR]
                with suppress(OSError):  # must not hide the error itself
                    self._write(ended=text)
                with suppress(OSError):
                    self._tell(text)
                return
            self._path(self.rank).unlink(missing_ok=True)
            self.ended.unlink(missing_ok=True)
            return
        reason, code = self._explain()
        message = f"rank {self.rank} lost contact in {collective} at step {here.step}: {reason}"
        if traces := os.environ.get("TORCH_FR_DUMP_TEMP_FILE"):
            message += f"; the flight recorder's dumps, if NCCL made any: {traces}*"
        self.say(message)
        print(f"ecgmatch: {message}", file=sys.stderr, flush=True)
        os._exit(code)

    def _tell(self, text: str) -> None:
        """Tell the other ranks that this one has ended with an error of its own."""
        with self.ended.open("r+") as file:  # on a full disk, the existing file still has its block
            file.write(f"rank {self.rank} ended at step {here.step}: {text}")
            file.truncate()

    def _path(self, rank: int) -> Path:
        return self.folder / f"{rank:05d}.json"

    def _write(self, ended: str | None = None) -> None:
        record = {"step": here.step, "place": str(here), "moved": here.moved, "time": time.time(), "ended": ended}
        text = json.dumps({**record, "host": socket.gethostname(), "process": os.getpid()})
        path = self._path(self.rank)
        temporary = path.with_suffix(".tmp")  # atomic for readers; need not be durable
        try:
            temporary.write_text(text)
            temporary.replace(path)
        except OSError:
            if ended is None:
                raise
            with path.open("r+") as file:  # on a full disk, the existing file still has its block
                file.write(text)
                file.truncate()

    def _beat(self) -> None:
        warned = 0.0
        while not self.stop.wait(self.period):
            with suppress(OSError):  # a full disk is reported elsewhere
                self._write()
            cause = ""
            with suppress(OSError):
                cause = self.ended.read_text(errors="replace").strip()
            if cause and not self.stop.is_set():
                message = f"rank {self.rank} ends at step {here.step}, because {cause}"
                with suppress(Exception):
                    self.say(message)
                print(f"ecgmatch: {message}", file=sys.stderr, flush=True)
                os._exit(1)  # not restarted: the error would only be repeated
            if time.time() - here.moved > self.timeout / 2 and warned != here.moved:
                warned = here.moved
                waited = time.time() - warned
                with suppress(OSError):
                    self.say(f"rank {self.rank}: {waited:.0f} s in {here} at step {here.step}; {self._late()}")

    def _others(self) -> dict[int, dict[str, Any]]:
        beats = {}
        for rank in set(range(self.world)) - {self.rank}:
            with suppress(OSError, ValueError):
                beats[rank] = json.loads(self._path(rank).read_text())
        return beats

    def _explain(self) -> tuple[str, int]:
        """Which rank is gone, and the exit code: 1 (no restart) if a rank ended with an error, which a restart would
        repeat. Waits, because a rank that has just died looks alive until its next heartbeat is due."""
        self.stop.set()
        self.thread.join()
        self._write(ended="")  # ended, but not the cause
        end = time.monotonic() + (SILENT + 1) * self.period
        while True:
            beats = self._others()
            causes = [f"rank {r} ended at step {b['step']}: {b['ended']}" for r, b in beats.items() if b["ended"]]
            silent = {r: b for r, b in beats.items() if time.time() - b["time"] > SILENT * self.period}
            gone = [_describe(r, b) for r, b in silent.items() if b["ended"] is None]
            if causes:
                return "; ".join(causes), 1
            if gone:
                return "; ".join(gone), LOST
            if time.monotonic() > end:
                return self._late(), LOST
            time.sleep(self.period / 4)

    def _late(self) -> str:
        """The rank that the others wait for: at the lowest step, and unmoved for the longest time."""
        beats = {r: b for r, b in self._others().items() if b["ended"] is None}
        if not beats:
            return "all other ranks have ended"
        rank = min(beats, key=lambda r: (beats[r]["step"], beats[r]["moved"]))
        return _describe(rank, beats[rank])


def _describe(rank: int, beat: dict[str, Any]) -> str:
    """The latest heartbeat of a rank in words. Its age is only as good as the nodes' clocks agree."""
    now = time.time()
    return (
        f"rank {rank} was last seen at step {beat['step']} in {beat['place']}, {now - beat['time']:.0f} s ago, and had not "
        f"moved for {beat['time'] - beat['moved']:.0f} s (process {beat['process']} on {beat['host']})"
    )
