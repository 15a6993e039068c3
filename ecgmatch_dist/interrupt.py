"""Being asked to stop: every rank's signal handler only raises a flag, and all ranks agree on the step at which they stop."""

import os
import signal
import time
from types import FrameType

import torch
from torch import distributed as dist

from ecgmatch_dist.distributed import group_beside
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.fence import Fence, Superseded
from ecgmatch_dist.watchdog import during

AGAIN = 2.0  # seconds: a Ctrl-C that comes sooner is the same one, by way of torchrun
DEADLINE = "ECGMATCH_STOP_AT"  # seconds since the epoch: where no signal tells of the time limit, this does


def deadline() -> float:
    text = os.environ.get(DEADLINE) or "inf"
    try:
        return float(text)
    except ValueError:
        raise UserError(f"environment variable {DEADLINE} = {text!r}: seconds since 1970, as date +%s prints") from None


class Signals:
    """While it is entered, SIGTERM, SIGUSR2 (Slurm's warnings) and Ctrl-C raise a flag and do nothing else; a second Ctrl-C
    ends at once. It stands around all that a process trains: a warning that comes while one run is measured or the next one
    is built must not be forgotten."""

    def __init__(self) -> None:
        self.received: dict[int, float] = {}
        """Signal -> when it came first."""

    def __enter__(self) -> "Signals":
        numbers = [signal.SIGTERM, signal.SIGUSR2]
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as it is under nohup, and behind `command &`
            numbers.append(signal.SIGINT)
        self.previous = {number: signal.signal(number, self._raise) for number in numbers}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        first = self.received.setdefault(number, time.monotonic())
        if number == signal.SIGINT and time.monotonic() - first > AGAIN:
            raise KeyboardInterrupt


class Interrupt:
    """Signals, the deadline, and a newer copy of the run. The flags are summed over the ranks behind the step and read one step
    later, so that no step waits for them, on a group of its own that also works while the devices are busy."""

    def __init__(self, signals: Signals, fence: Fence | None = None) -> None:
        self.received, self.fence = signals.received, fence
        self.deadline = deadline()
        self.warned = False  # by SIGUSR2 or the deadline: whoever gave the warning expects the run to be started again
        self.superseded = ""
        self.distributed = dist.is_initialized() and dist.get_world_size() > 1
        self.group = group_beside()
        self.pending: tuple[dist.Work, torch.Tensor] | None = None

    def _flags(self) -> torch.Tensor:
        """What this rank knows: asked to stop, warned, superseded."""
        warned = signal.SIGUSR2 in self.received or time.time() > self.deadline
        self.superseded = self.superseded or (self.fence.lost() if self.fence else "")
        return torch.tensor([int(bool(self.received) or warned), int(warned), int(bool(self.superseded))])

    def agreed(self) -> bool:
        """Called once a step (or part of the measurements) by every rank; true on all of them at the same one."""
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
        asked, warned, superseded = flags.tolist()
        if superseded:
            raise Superseded(self.superseded or "a newer copy of this run has taken over: rank 0 tells which")
        self.warned = warned > 0
        return bool(asked > 0)

    def close(self) -> None:
        if self.pending:
            self.pending[0].wait()
            self.pending = None
