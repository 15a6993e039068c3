"""The current position of each thread of this process, and the collective that an error came from.

A process group times out without naming the collective or the step. So every place where a rank may wait has a name
(`during`), and the heartbeat (recovery/heartbeat.py) writes it to a file for the other ranks.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident

import torch.distributed as dist


class CollectiveFailed(RuntimeError):
    """Another rank is gone or too late."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name}: {reason}")
        self.name = name


class Whereabouts:
    """The step and the named places of the threads of this process."""

    def __init__(self) -> None:
        self.step = 0
        self.first: int | None = None
        """The step at which this process began; None: before it."""
        self.moved = time.time()
        self.places: dict[int, list[str]] = {}

    def __str__(self) -> str:
        innermost = [names[-1] for names in list(self.places.values()) if names]
        return " and ".join(innermost) or "computing"


here = Whereabouts()
# What NCCL says when another rank is gone. In its other errors a GPU, an interface or a library of this rank is wrong.
REMOTE = (
    "ncclRemoteError",
    "remote process exited",
    "timeout",
    "timed out",
    "Connection closed",
    "connection closed by",
)


def lost_peer(error: BaseException) -> bool:
    """True for the errors of gloo and NCCL that mean that another rank is gone or too late.

    An error of NCCL before the first step is done (two ranks on one GPU, no network interface) is the run's own, unless it says
    that the other side is gone: a restart would only repeat it.
    """
    if isinstance(error, CollectiveFailed):
        return True
    text = str(error)
    if "NCCL" in text and here.step in (0, here.first) and not any(words in text for words in REMOTE):
        return False
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(word in text for word in ("gloo", "NCCL", "Connection closed"))
    )


@contextmanager
def during(name: str, step: int | None = None) -> Iterator[None]:
    """Mark this thread as being in `name`: a collective, or another place where it may wait."""
    names = here.places.setdefault(get_ident(), [])
    names.append(name)
    here.moved = time.time()
    if step is not None:
        here.step, here.first = step, here.first or step
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
    """The name of the collective that caused an error, or None."""
    found, seen = None, set[int]()
    while error is not None and id(error) not in seen:  # an error may be its own cause
        seen.add(id(error))
        if lost_peer(error):
            found = error.name if isinstance(error, CollectiveFailed) else found or "a collective"
        error = error.__cause__ or error.__context__
    return found
