"""A heartbeat for every rank: when a collective fails, the ranks that are left say who is missing, and where it was.

Process groups end a collective that waits too long, but know neither names nor steps, and the first rank that gives up looks
to its neighbours like the one that died. So every rank notes where it is, a thread writes that to the run's desk (fence.py),
and whoever loses contact reads what the others wrote. A newer copy of the run clears the desk: an older one's beats end there.
"""

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread, get_ident
from types import TracebackType
from typing import Any

import torch.distributed as dist

SILENT = 3  # periods without a beat after which a rank counts as gone
MOST = 2000  # characters of an error in a beat, which must fit into a block of the disk
LOST = (
    134  # exit code, as after an abort: the launchers start the run again (launch/site.py), as torchrun does by itself
)


class CollectiveFailed(RuntimeError):
    """Another rank did not answer."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name}: {reason}")
        self.name = name


class Whereabouts:
    """Where the threads of this process are."""

    def __init__(self) -> None:
        self.step = 0
        self.moved = time.time()
        self.places: dict[int, list[str]] = {}

    def __str__(self) -> str:
        innermost = [names[-1] for names in list(self.places.values()) if names]
        return " and ".join(innermost) or "computing"


here = Whereabouts()


def lost_peer(error: BaseException) -> bool:
    """Is this how gloo or NCCL say that another rank is gone or late."""
    return isinstance(error, CollectiveFailed | dist.DistError) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in ("gloo", "NCCL", "Connection closed"))
    )


@contextmanager
def during(name: str, step: int | None = None) -> Iterator[None]:
    """This thread is in `name`, a collective or another place where it may have to wait."""
    names = here.places.setdefault(get_ident(), [])
    names.append(name)
    here.moved = time.time()
    here.step = here.step if step is None else step
    try:
        yield
    except CollectiveFailed:
        raise
    except RuntimeError as error:
        if lost_peer(error):
            raise CollectiveFailed(name, str(error)) from error
        raise
    finally:
        names.pop()
        here.moved = time.time()


def failed_collective(error: BaseException | None) -> str | None:
    """The name of the collective whose failure lies behind an error."""
    found, seen = None, set[int]()
    while error is not None and id(error) not in seen:  # an error may have been raised from itself
        seen.add(id(error))
        if lost_peer(error):
            found = error.name if isinstance(error, CollectiveFailed) else found or "a collective"
        error = error.__cause__ or error.__context__
    return found


class Heartbeat:
    """`with Heartbeat(...)` around what the ranks do together; of one rank, nothing.

    An error behind which another rank's absence lies ends the process at once, with the diagnosis: threads that wait in
    collectives that will never end would keep it from ending in any gentler way, and all that counts is on disk.
    """

    def __init__(
        self, desk: Path, rank: int, world: int, timeout_minutes: float, say: Callable[[str], None] = print
    ) -> None:
        self.folder, self.rank, self.world, self.say = desk / "heartbeats", rank, world, say
        self.timeout = 60 * timeout_minutes
        self.period = min(5.0, self.timeout / 20)
        self.stop = Event()
        self.thread = Thread(target=self._beat, name="heartbeat", daemon=True)

    def __enter__(self) -> "Heartbeat":
        if self.world > 1:
            self.folder.mkdir(exist_ok=True)
            here.moved = time.time()
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
                with suppress(OSError):  # the error itself counts more than its note
                    self._write(ended=f"{type(error).__name__}: {error}"[:MOST])
                return
            self._path(self.rank).unlink(missing_ok=True)
            return
        reason, code = self._explain()
        message = f"rank {self.rank} lost contact in {collective} at step {here.step}: {reason}"
        self.say(message)
        print(f"ecgmatch: {message}", file=sys.stderr, flush=True)
        os._exit(code)

    def _path(self, rank: int) -> Path:
        return self.folder / f"{rank:05d}.json"

    def _write(self, ended: str | None = None) -> None:
        record = {"step": here.step, "place": str(here), "moved": here.moved, "time": time.time(), "ended": ended}
        text = json.dumps({**record, "host": socket.gethostname(), "process": os.getpid()})
        path = self._path(self.rank)
        temporary = path.with_suffix(".tmp")  # a reader finds a whole record; none has to survive a power cut
        try:
            temporary.write_text(text)
            temporary.replace(path)
        except OSError:
            if ended is None:
                raise
            with path.open("r+") as file:  # a full disk has no room for another file, but this one has its block
                file.write(text)
                file.truncate()

    def _beat(self) -> None:
        warned = 0.0
        while not self.stop.wait(self.period):
            with suppress(OSError):  # a full disk is not what this thread is there to report
                self._write()
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
        """Who is gone, and the exit code: an error of a rank's own would only come again if the run were started again. A rank
        that died a moment ago looks alive until its next beat is due."""
        self.stop.set()
        self.thread.join()
        self._write(ended="")  # lost contact: not the cause
        end = time.monotonic() + (SILENT + 1) * self.period
        while True:
            beats = self._others()
            causes = [f"rank {r} ended at step {b['step']}: {b['ended']}" for r, b in beats.items() if b["ended"]]
            silent = {r: b for r, b in beats.items() if time.time() - b["time"] > SILENT * self.period}
            gone = [describe(r, b) for r, b in silent.items() if b["ended"] is None]
            if causes:
                return "; ".join(causes), 1
            if gone:
                return "; ".join(gone), LOST
            if time.monotonic() > end:
                return self._late(), LOST
            time.sleep(self.period / 4)

    def _late(self) -> str:
        """The rank that all others wait for: the one that is behind, and has not moved for the longest time."""
        beats = {r: b for r, b in self._others().items() if b["ended"] is None}
        if not beats:
            return "all other ranks have ended"
        rank = min(beats, key=lambda r: (beats[r]["step"], beats[r]["moved"]))
        return describe(rank, beats[rank])


def describe(rank: int, beat: dict[str, Any]) -> str:
    """One rank's latest heartbeat in words; times are as good as the clocks of the nodes agree."""
    now = time.time()
    return (
        f"rank {rank} was last seen at step {beat['step']} in {beat['place']}, {now - beat['time']:.0f} s ago, and had not "
        f"moved for {beat['time'] - beat['moved']:.0f} s (process {beat['process']} on {beat['host']})"
    )
