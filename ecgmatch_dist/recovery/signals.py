"""Stop requests: the signal handler of each rank only sets a flag, and all ranks agree on the step at which they stop."""

import os
import signal
import threading
import time
from types import FrameType
from typing import Any

import torch
from torch import distributed as dist

from ecgmatch_dist.distributed.session import background_group
from ecgmatch_dist.distributed.whereabouts import during
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.recovery.finite import FiniteCheck
from ecgmatch_dist.recovery.generations import Fence, Superseded

SAME_CTRL_C = 2.0  # seconds: a second SIGINT within this time is the same Ctrl-C, forwarded by torchrun
DEADLINE = "ECGMATCH_STOP_AT"  # seconds since the epoch, for schedulers that send no signal before the time limit


def deadline() -> float:
    text = os.environ.get(DEADLINE) or "inf"
    try:
        return float(text)
    except ValueError:
        raise UserError(f"environment variable {DEADLINE} = {text!r}: seconds since 1970, as date +%s prints") from None


class Signals:
    """Inside `with Signals()`, SIGTERM, SIGUSR2 (Slurm's warning) and Ctrl-C only set a flag; a second Ctrl-C ends at once. One
    object covers all runs of a process, so that a warning between two runs is not lost."""

    def __init__(self) -> None:
        self.received: dict[int, float] = {}
        """Signal number -> time of its first arrival."""

    def __enter__(self) -> "Signals":
        self.previous: dict[signal.Signals, Any] = {}
        if threading.current_thread() is not threading.main_thread():
            return self  # signals belong to the main thread: a program that trains in another one handles them itself
        numbers = [signal.SIGTERM, signal.SIGUSR2]
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # ignored under nohup and for `command &`
            numbers.append(signal.SIGINT)
        self.previous = {number: signal.signal(number, self._handle) for number in numbers}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        first = self.received.setdefault(number, time.monotonic())
        if number == signal.SIGINT and time.monotonic() - first > SAME_CTRL_C:
            raise KeyboardInterrupt


class Stopped(SystemExit):
    """The run was asked to stop and has saved a checkpoint. Exit code 75: torchrun restarts the run."""

    def __init__(self, warned: bool) -> None:
        super().__init__(75)
        self.warned = warned
        """By SIGUSR2 or the deadline: the job should be requeued. A plain SIGTERM may mean that it was cancelled."""


class StopRequest:
    """Combines signals, the deadline, the fence and steps that are not finite over all ranks. The flags are summed in the
    background and read one step later, so that no step waits for them; on a gloo group, which works while the GPUs are busy."""

    def __init__(self, signals: Signals, fence: Fence | None = None, finite: FiniteCheck | None = None) -> None:
        self.received, self.fence, self.finite = signals.received, fence, finite
        self.deadline = deadline()
        self.warned = False  # see `Stopped.warned`
        self.superseded = ""
        self.not_finite = 0
        """The first step whose gradient is not finite, once all ranks know that there is one; 0: none."""
        self.distributed = dist.is_initialized() and dist.get_world_size() > 1
        self.group = background_group("flags")
        self.pending: tuple[dist.Work, torch.Tensor] | None = None

    def _flags(self) -> torch.Tensor:
        """[4] of this rank: stop requested, warned, superseded, not finite."""
        warned = signal.SIGUSR2 in self.received or time.time() > self.deadline
        self.superseded = self.superseded or (self.fence.poll() if self.fence else "")
        bad = bool(self.finite and self.finite.seen())
        return torch.tensor([int(bool(self.received) or warned), int(warned), int(bool(self.superseded)), int(bad)])

    def agreed(self) -> bool:
        """Called by every rank once per step (or per part that `finish` measures); returns the same on all ranks."""
        flags = self._flags()
        if self.distributed:
            before = self.pending
            work = dist.all_reduce(flags, group=self.group, async_op=True)
            assert work is not None
            self.pending = (work, flags)
            if before is None:
                return False
            with during("flags"):
                before[0].wait()
            flags = before[1]
        asked, warned, superseded, bad = flags.tolist()
        if superseded:
            raise Superseded(self.superseded or "a newer copy of this run has taken over: rank 0 reports which")
        self.warned = warned > 0
        self.not_finite = self.finite.now() if self.finite and bad else 0
        return bool(asked > 0)

    def close(self) -> None:
        if self.pending:
            self.pending[0].wait()
            self.pending = None
