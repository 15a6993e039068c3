"""Being asked to stop: every rank's signal handler only raises a flag, and all ranks agree on the step at which they stop."""

import signal
from types import FrameType

import torch
from torch import distributed as dist


class Interrupt:
    """SIGTERM and SIGUSR2 (Slurm's warnings). The flag is summed over the ranks behind the step and read one step later, so
    that no step waits for it, on a group of its own that also works while the devices are busy."""

    def __init__(self, signals: tuple[signal.Signals, ...] = (signal.SIGTERM, signal.SIGUSR2)) -> None:
        self.raised = False
        self.distributed = dist.is_initialized() and dist.get_world_size() > 1
        self.group = dist.new_group(backend="gloo") if self.distributed else None
        self.pending: tuple[dist.Work, torch.Tensor] | None = None
        self.previous = {number: signal.signal(number, self._raise) for number in signals}

    def _raise(self, number: int, frame: FrameType | None) -> None:
        self.raised = True

    def agreed(self) -> bool:
        """Called once a step by every rank; true on all of them at the same step."""
        if not self.distributed:
            return self.raised
        answer = False
        if self.pending:
            work, flag = self.pending
            work.wait()
            answer = bool(flag.item())
        flag = torch.tensor([int(self.raised)])
        work = dist.all_reduce(flag, group=self.group, async_op=True)
        assert work is not None
        self.pending = (work, flag)
        return answer

    def close(self) -> None:
        if self.pending:
            self.pending[0].wait()
            self.pending = None
        for number, handler in self.previous.items():
            signal.signal(number, handler)
