"""Reading tars that somebody else may have made: webdataset's samples, from plain tars with plain members alone."""

import tarfile
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

from webdataset.tariterators import group_by_keys

LARGEST = 2**28
"""Bytes of a member; a recording of a million samples per lead has 24 MB."""
MOST = 10**7
"""Members of a tar."""


def tar_samples(tars: Iterable[tuple[str, BinaryIO]]) -> Iterator[dict[str, Any]]:
    """The samples in tars, given by name and stream: `__key__`, `__url__`, and bytes by suffix. Raises tarfile.TarError."""
    return iter(group_by_keys(_members(tars)))


def _members(tars: Iterable[tuple[str, BinaryIO]]) -> Iterator[dict[str, Any]]:
    for url, stream in tars:
        # Not webdataset's reader: it also unpacks compressed and sparse files, where a few bytes become terabytes.
        with tarfile.open(fileobj=stream, mode="r|") as tar:
            for number, member in enumerate(tar):
                _check(member, number)
                if member.isdir():
                    continue
                file = tar.extractfile(member)
                assert file is not None
                yield {"fname": member.name, "data": file.read(), "__url__": url}
                tar.members = []  # type: ignore[attr-defined]  # tarfile would keep them all
        yield {}  # samples do not go on in the next tar


def _check(member: tarfile.TarInfo, number: int) -> None:
    """Links and devices are refused, not skipped: nobody puts them into a shard for training."""
    parts = member.name.split("/")
    if not (member.isreg() or member.isdir()) or member.issparse():
        raise tarfile.ReadError(f"{member.name!r} is not a plain file")
    if member.name.startswith("/") or ".." in parts:
        raise tarfile.ReadError(f"{member.name!r} leads out of the tar")
    if member.size > LARGEST or number >= MOST:
        raise tarfile.ReadError(f"{member.name!r}: {member.size:,} bytes, member {number + 1:,}: too large")
