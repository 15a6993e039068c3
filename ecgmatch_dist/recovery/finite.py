"""Finds the first step whose loss or gradient is not finite, without making the host wait for the device."""

from collections import deque

import numpy as np
import torch
from torch import Tensor

from ecgmatch_dist.data.stream import Batch


class FiniteCheck:
    """The gradient's norm is the same on all ranks (`train_step`), so the answer for a step is, too. When the
    host learns it is not: on a GPU the number arrives later, and `StopRequest` agrees on the step at which all ranks end."""

    def __init__(self, device: torch.device) -> None:
        self.first = torch.zeros((), dtype=torch.int64, device=device)
        self.arriving: deque[tuple[Tensor, torch.cuda.Event | None]] = deque()
        self.known = 0

    def add(self, norm: Tensor, step: int) -> None:
        """`norm`: of the gradient of `step`, on the device."""
        bad = norm.isfinite().logical_not() & (self.first == 0)
        self.first = self.first.masked_fill(bad, step)
        if self.first.device.type != "cuda":
            self.arriving.append((self.first, None))
            return
        host = torch.empty((), dtype=torch.int64, pin_memory=True)
        host.copy_(self.first, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self.arriving.append((host, event))

    def seen(self) -> int:
        """The first bad step, as far as it is known without waiting; 0: none."""
        while self.arriving:
            number, event = self.arriving[0]
            if event is not None and not event.query():  # type: ignore[no-untyped-call]
                break
            self.arriving.popleft()
            self.known = self.known or int(number)
        return self.known

    def now(self) -> int:
        """The first bad step up to now; 0: none. Waits for the device, as saving, validating and logging do anyway."""
        self.known = self.known or int(self.first)
        return self.known


def named(batch: Batch, names: list[str]) -> tuple[list[str], list[str]]:
    """The `names` of a batch's recordings, and those of them that are not finite."""
    finite = np.isfinite(batch.x.reshape(len(names), -1).astype(np.float32).sum(1)).tolist()
    return names, [name for name, ok in zip(names, finite, strict=True) if not ok]
