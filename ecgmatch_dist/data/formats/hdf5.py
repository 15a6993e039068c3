"""HDF5: many recordings in one file, as in CODE-15: `tracings` [N, samples, leads] and `exam_id` [N]."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ecgmatch_dist.data.formats.arrays import tracing_of
from ecgmatch_dist.data.formats.libraries import library
from ecgmatch_dist.data.formats.recording import Layout, RecordRef, Rejected, Tracing
from ecgmatch_dist.data.header_limits import LARGEST_FILE, LONGEST, MOST_RECORDINGS

IDS = ("exam_id", "id", "ids", "record", "ecg_id", "name")


@contextmanager
def _open(path: Path) -> Iterator[tuple[Any, Any]]:
    """The file, and its dataset of signals: `tracings`, or the only one with three axes."""
    h5py = library("h5py")
    try:
        file = h5py.File(path, "r")
    except OSError as error:
        raise Rejected("unreadable", str(error)) from None
    with file:
        names = [name for name in file if isinstance(file.get(name, getlink=True), h5py.HardLink)]
        found = {name: data for name in names if getattr(data := file[name], "ndim", 0) == 3}
        if "tracings" not in found and len(found) != 1:
            held = ", ".join(names) or "none"
            raise Rejected("layout", f"no dataset `tracings` [recordings, samples, leads]; there are {held}")
        tracings = found.get("tracings", next(iter(found.values())))
        _check(tracings)
        yield {name: file[name] for name in names}, tracings


def _check(data: Any) -> None:
    """What a dataset claims, before memory is asked for; and that its numbers are in this file, not in one that it names."""
    if data.external or data.is_virtual:
        raise Rejected("layout", "its numbers are in another file, which is not opened")
    count, *shape = data.shape
    if count > MOST_RECORDINGS or max(shape, default=0) > LONGEST:
        raise Rejected("header", f"{list(data.shape)} numbers, at most [{MOST_RECORDINGS}, {LONGEST}, leads] are read")
    bytes_at_once = data.dtype.itemsize * max(math.prod(shape), math.prod(data.chunks or ()))
    if bytes_at_once > LARGEST_FILE:
        raise Rejected("header", f"{bytes_at_once:,} bytes at once, at most {LARGEST_FILE:,} are read")


def names(path: Path) -> list[str]:
    """The names of the file's recordings, in their order. CODE-15 ends a file with an empty row of the id 0: no recording."""
    with _open(path) as (file, tracings):
        column = next((i for i in IDS if getattr(file.get(i), "shape", None) == tracings.shape[:1]), None)
        if column is None:
            return [f"{path.stem}_{i}" for i in range(len(tracings))]
        _check(file[column])
        found = [i.decode() if isinstance(i, bytes) else str(i) for i in file[column][:].tolist()]
        return found[:-1] if found[-1] == "0" else found


def read(ref: RecordRef, layout: Layout) -> Tracing:
    with _open(ref.path) as (_, tracings):
        if ref.item is None and len(tracings) != 1:
            raise Rejected("layout", f"the file holds {len(tracings):,} recordings; `find` lists them")
        array = np.asarray(tracings[ref.item or 0])
    time = 0 if array.shape[0] > array.shape[1] else 1
    # CODE-15 pads recordings of 7 s with zeros at both ends.
    used = np.flatnonzero(array.any(axis=1 - time))
    if not len(used):
        raise Rejected("no signal", "all samples are zero")
    return tracing_of(array.take(range(used[0], used[-1] + 1), axis=time), layout)
