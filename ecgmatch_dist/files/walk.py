"""The files of a folder and of all folders in it. Links to folders are not followed.

A folder that may not be read is an error (OSError) here: `Path.glob` passes over it, and its recordings would be missing
without a word."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn


def files_below(folder: Path) -> list[Path]:
    """Sorted by path."""
    return sorted(
        path for place, names in _walk(folder) for path in (Path(place, name) for name in names) if path.is_file()
    )


def require_readable(folder: Path) -> None:
    """Refuse a folder of which a part may not be read."""
    for _ in _walk(folder):
        pass


def _walk(folder: Path) -> Iterator[tuple[str, list[str]]]:
    def refuse(error: OSError) -> NoReturn:
        raise error

    return ((place, names) for place, _, names in os.walk(folder, onerror=refuse))
