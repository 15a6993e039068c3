"""What the doctor finds: one line per check, with a state and a remedy."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Timer
from typing import Literal

State = Literal["ok", "warning", "refused"]


@dataclass(frozen=True)
class Finding:
    """One line of the table."""

    what: str
    state: State
    found: str
    remedy: str = ""


def ok(what: str, found: str) -> Finding:
    return Finding(what, "ok", found)


def warning(what: str, found: str, remedy: str) -> Finding:
    return Finding(what, "warning", found, remedy)


def refused(what: str, found: str, remedy: str) -> Finding:
    return Finding(what, "refused", found, remedy)


Check = tuple[Callable[[], list[Finding]], str]
"""A check, and the remedy if it fails in a way that it did not expect."""


def careful(what: str, check: Callable[[], list[Finding]], remedy: str) -> list[Finding]:
    """The findings of a check; an error that it did not expect is one, too."""
    try:
        return check()
    except Exception as error:
        return [refused(what, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}", remedy)]


@contextmanager
def answered(what: str, seconds: float, give_up: Callable[[Finding], object]) -> Iterator[None]:
    """Call `give_up`, in another thread, if the body takes longer. A collective of NCCL that waits for ever raises nothing."""
    remedy = "another rank failed or waits elsewhere: see its lines above; NCCL_DEBUG=INFO and GLOO_SOCKET_IFNAME for networks"
    timer = Timer(seconds, give_up, [refused(what, f"no answer for {seconds:.0f} s", remedy)])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
