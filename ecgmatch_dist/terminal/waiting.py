"""A bar with the time left for everything that may take longer than two seconds."""

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

PATIENCE = 2.0  # seconds without a bar: shorter waits need none
WIDE = 120  # columns of a terminal in which a run's name, its bar, its loss and both times have room
SHORT_BAR = 12
T = TypeVar("T")


def make_bar(console: Console, note: str = "", transient: bool = True) -> Progress:
    """What is done, how much of how many, the time so far and the time left; nothing without a terminal. `note`: a field of
    the task to show, where there is room for it: in a narrow terminal the time left must not make way for it."""
    notes = (TextColumn(f"{{task.fields[{note}]}}"),) if note and console.width >= WIDE else ()
    bar = BarColumn(bar_width=SHORT_BAR if note else 40)
    columns = (TextColumn("{task.description}"), bar, MofNCompleteColumn(), *notes)
    times = (TimeElapsedColumn(), TimeRemainingColumn())
    return Progress(*columns, *times, console=console, transient=transient, disable=not console.is_terminal)


def track(items: Iterable[T], what: str, total: int, console: Console | None = None) -> Iterator[T]:
    """The items, one after the other. On a terminal a bar appears after two seconds, and goes when the last item is done."""
    console = console or Console(stderr=True)
    begin, bar = time.monotonic(), make_bar(console)
    task = bar.add_task(what, total=total)
    try:
        for item in items:
            yield item
            bar.advance(task)
            if not bar.live.is_started and time.monotonic() - begin > PATIENCE:
                bar.start()
    finally:
        bar.stop()


@contextmanager
def waiting(what: str, console: Console | None = None) -> Iterator[None]:
    """Around one long piece of work of unknown length: on a terminal, after two seconds, what it is and the time so far."""
    console = console or Console(stderr=True)
    line = Progress(
        TextColumn("{task.description}"),
        BarColumn(),  # it runs to and fro: nobody knows how long
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    line.add_task(what, total=None)
    timer = threading.Timer(PATIENCE, line.start)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()  # if it is just starting the line, that must be over before the line ends
        line.stop()


def time_left(done: int, left: int, seconds: float) -> str:
    """For a line instead of a bar, as in "12 min"; empty: not known yet, or nothing is left."""
    if done < 1 or left < 1:
        return ""
    rest = seconds / done * left
    return f"{rest:.0f} s" if rest < 100 else f"{rest / 60:.0f} min" if rest < 6000 else f"{rest / 3600:.0f} h"
