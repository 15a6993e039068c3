"""Writing files so that a reader finds the old one or the new one, never half of one."""

import json
import os
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

UMASK = os.umask(0)  # it can only be read by being set
os.umask(UMASK)


def sync_folder(folder: Path) -> None:
    """Make a rename inside `folder` survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def let_others_read(path: Path) -> None:
    """The permissions of any other new file: safetensors writes for the owner alone, but run folders are shared."""
    with suppress(OSError):  # a file system without permissions
        path.chmod(0o666 & ~UMASK)


def sync_file(path: Path) -> None:
    """Make what was written survive a power cut."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def write_atomic(
    path: Path,
    write: Callable[[Path], object],
    check: Callable[[], None] | None = None,
    desk: Path | None = None,
) -> None:
    """`write` a temporary file (on the `desk`, or beside `path`), `check` whether that is still wanted, then put it in its
    place."""
    temporary = (desk or path.parent) / f".{path.name}.{os.getpid()}.tmp"
    try:
        write(temporary)
        let_others_read(temporary)
        sync_file(temporary)
        if check:
            check()
        temporary.replace(path)
    except OSError as error:
        if error.filename is None:  # a full disk: Python names the file when it opens one, not when it writes
            error.filename = str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def write_text(path: Path, text: str) -> None:
    write_atomic(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def write_json(path: Path, value: Any) -> None:
    write_text(path, json_text(value))


def json_text(value: Any) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"


def checksum(path: Path) -> str:
    """CRC-32 of a file: against damage, not against malice. Other threads run on meanwhile."""
    value = 0
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            value = zlib.crc32(piece, value)
    return f"{value:08x}"


def describe(path: Path) -> dict[str, Any]:
    """By which a file is known again."""
    return {"bytes": path.stat().st_size, "checksum": checksum(path)}
