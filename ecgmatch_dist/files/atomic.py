"""Atomic writes: a reader finds the old file or the new one, never a part of it."""

import json
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

UMASK = os.umask(0)  # reading it means setting it
os.umask(UMASK)


def sync_folder(folder: Path) -> None:
    """Make a rename inside `folder` durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def let_others_read(path: Path) -> None:
    """Set the usual permissions of a new file: safetensors lets only the owner read, but run folders are shared."""
    with suppress(OSError):  # on a file system without permissions
        path.chmod(0o666 & ~UMASK)


def sync_file(path: Path) -> None:
    """Make the content of a file durable."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


@contextmanager
def naming(path: Path, temporary: Path | None = None) -> Iterator[None]:
    """An error inside is about `path`: Python names the file in errors of open, not of write (a full disk), and both files in
    those of a copy. `temporary`: what stands for it meanwhile."""
    try:
        yield
    except OSError as error:
        if error.filename is None or str(error.filename) == str(temporary) or error.filename2 is not None:
            error.filename = str(path)
            del error.filename2  # None would be printed
        raise


def write_atomic(
    path: Path,
    write: Callable[[Path], object],
    check: Callable[[], None] | None = None,
    workspace: Path | None = None,
) -> None:
    """`write` a temporary file (in `workspace`, or beside `path`), then rename it to `path`. `check` runs right before the
    rename and may raise to prevent it."""
    temporary = (workspace or path.parent) / f".{path.name}.{os.getpid()}.tmp"
    try:
        with naming(path, temporary):
            write(temporary)
            let_others_read(temporary)
            sync_file(temporary)
            if check:
                check()
            temporary.replace(path)
    finally:
        with suppress(OSError):  # usually it is gone; a disk that fails here must not hide what went before
            temporary.unlink()
    sync_folder(path.parent)


def write_text(path: Path, text: str) -> None:
    """Names of files that are not UTF-8 are written as `\\udcfc`, which JSON reads back as the same name."""
    write_atomic(path, lambda temporary: temporary.write_text(text, encoding="utf-8", errors="backslashreplace"))


def write_json(path: Path, value: Any) -> None:
    write_text(path, json_text(value))


def json_text(value: Any) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"


def checksum(path: Path) -> str:
    """CRC-32 of a file: detects damage, not tampering. Releases the GIL."""
    value = 0
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            value = zlib.crc32(piece, value)
    return f"{value:08x}"


def size_and_checksum(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "checksum": checksum(path)}
