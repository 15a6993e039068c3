"""Writing files so that a reader finds the old one or the new one, never half of one."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


def sync_folder(folder: Path) -> None:
    """Make a rename inside `folder` survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomic(path: Path, write: Callable[[Path], object], check: Callable[[], None] | None = None) -> None:
    """`write` a temporary file beside `path`, `check` whether that is still wanted, then put it in its place."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        if check:
            check()
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def write_text(path: Path, text: str, check: Callable[[], None] | None = None) -> None:
    write_atomic(path, lambda temporary: temporary.write_text(text, encoding="utf-8"), check)


def write_json(path: Path, value: Any, check: Callable[[], None] | None = None) -> None:
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n", check)
