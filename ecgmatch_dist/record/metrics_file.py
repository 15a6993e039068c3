"""metrics.jsonl: the numbers of a run, one line per logged step and per validation. Its version is that of config.json."""

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ecgmatch_dist.files.jsonl import read_lines, read_tail, to_line

NAME = "metrics.jsonl"
LARGEST = sys.float_info.max  # JSON takes whole numbers of any length


@dataclass(frozen=True)
class MetricsLine:
    """The numbers of one step."""

    step: int
    kind: str
    """"train" or "validation"."""
    values: dict[str, float]
    """Finite numbers by name."""


def format_line(step: int, kind: str, values: dict[str, float]) -> str:
    """The line that is appended to the file."""
    return to_line({"step": step, "time": round(time.time(), 3), "kind": kind, **values})


def read_metrics(folder: Path) -> Iterator[MetricsLine]:
    """All lines of a run folder's file. A cut or damaged line is passed over."""
    yield from filter(None, map(_parse, read_lines(folder / NAME)))


def read_latest(folder: Path) -> list[MetricsLine]:
    """The last lines of a file that may be long."""
    return list(filter(None, map(_parse, read_tail(folder / NAME))))


def lines_until(folder: Path, step: int) -> str:
    """The text of the file without the lines after `step`: a resumed run writes those again."""
    records = read_lines(folder / NAME)
    return "".join(to_line(record) for record in records if (line := _parse(record)) and line.step <= step)


def _parse(record: dict[str, Any]) -> MetricsLine | None:
    step, kind = record.get("step"), record.get("kind")
    if not isinstance(step, int) or not isinstance(kind, str):
        return None
    numbers = {n: v for n, v in record.items() if isinstance(v, int | float) and n not in ("step", "time")}
    return MetricsLine(step, kind, {name: float(value) for name, value in numbers.items() if abs(value) <= LARGEST})
