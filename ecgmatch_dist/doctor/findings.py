"""What the doctor finds: one line per check, with a state and a remedy."""

from collections.abc import Callable
from dataclasses import dataclass
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


def careful(what: str, check: Callable[[], list[Finding]], remedy: str) -> list[Finding]:
    """The findings of a check; an error that it did not expect is one, too."""
    try:
        return check()
    except Exception as error:
        return [refused(what, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}", remedy)]
