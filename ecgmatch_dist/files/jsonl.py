"""JSON lines: one record per line. Files are appended to, so that a kill loses at most the last line."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

TAIL = 65536  # bytes that `read_tail` reads


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a file; none if it is missing. Cut and damaged lines are skipped."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            yield from parse_lines(file)
    except OSError:
        return


def read_tail(path: Path) -> list[dict[str, Any]]:
    """The last records of a long file."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL))
            return list(parse_lines(file.read().decode("utf-8", "replace").splitlines()))
    except OSError:
        return []


def parse_lines(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The records of the lines that are complete JSON objects."""
    for line in lines:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict):
            yield record


def to_line(record: dict[str, Any]) -> str:
    return json.dumps(record) + "\n"
