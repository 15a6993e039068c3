"""Any recording -> `Recording`. FORMATS lists the formats and their suffixes; other files are known by their content."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ecgmatch_dist.data.formats import arrays, clinical, csv_table, edf, hdf5, wfdb_record
from ecgmatch_dist.data.formats.leads import arrange, check_layout, check_signal
from ecgmatch_dist.data.formats.recording import Layout, Recording, RecordRef, Rejected, Tracing
from ecgmatch_dist.data.header_limits import LARGEST_FILE, LEAST_RATE, MOST_RATE, require_regular
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.files.walk import files_below


@dataclass(frozen=True)
class Format:
    """One format: how to know its files, and its reader."""

    name: str
    suffixes: tuple[str, ...]
    read: Callable[[RecordRef, Layout], Tracing]
    begins: tuple[int, bytes] | None = None
    """Offset and bytes of a file's beginning that no other format has."""
    names: Callable[[Path], list[str]] | None = None
    """The recordings in one file; None: always one."""


FORMATS = (
    Format("wfdb", (".hea",), wfdb_record.read),
    Format("csv", (".csv", ".tsv", ".txt"), csv_table.read),
    Format("npy", (".npy",), arrays.read, (0, b"\x93NUMPY")),
    Format("hdf5", (".h5", ".hdf5", ".hdf"), hdf5.read, (0, b"\x89HDF"), hdf5.names),
    Format("edf", (".edf", ".bdf"), edf.read, (0, b"0       ")),
    Format("dicom", (".dcm", ".dicom"), clinical.read, (128, b"DICM")),
    Format("xml", (".xml",), clinical.read),
    Format("scp", (".scp",), clinical.read),
    Format("clinical", (".ecg", ".mwf", ".mfer", ".mfr"), clinical.read),
)
PACKED, PICTURE = "is packed; unpack it first", "is a picture; export the signal itself (DICOM, XML, SCP, CSV)"
OTHERS = (
    (0, b"PK\x03\x04", "zip", PACKED),
    (0, b"\x1f\x8b", "gzip", PACKED),
    (0, b"BZh", "bzip2", PACKED),
    (0, b"\xfd7zXZ", "xz", PACKED),
    (0, b"7z\xbc\xaf", "7-Zip", PACKED),
    (257, b"ustar", "tar", PACKED),
    (0, b"%PDF", "PDF", PICTURE),
    (0, b"\x89PNG", "PNG", PICTURE),
    (0, b"\xff\xd8\xff", "JPEG", PICTURE),
)
"""Offset and bytes of files that people have instead of a recording: what it is, and what to do."""
BY_SUFFIX = {suffix: form for form in FORMATS for suffix in form.suffixes}
NAMES = tuple(form.name for form in FORMATS)


def format_of(path: Path, name: str = "") -> Format:
    """The format of a file: the named one, or by suffix, or by content. Raises Rejected."""
    if not path.is_dir():  # a WFDB record and a folder may have the same name
        require_regular(path)
    if name:
        return next(form for form in FORMATS if form.name == name)
    if path.suffix.lower() in BY_SUFFIX:
        return BY_SUFFIX[path.suffix.lower()]
    if wfdb_record.header_of(path).exists():
        return FORMATS[0]
    try:
        with path.open("rb") as file:
            start = file.read(512)
    except OSError as error:
        raise Rejected("unreadable", f"{error.strerror}: {error.filename}") from None
    for form in FORMATS:
        if form.begins and start[form.begins[0] :].startswith(form.begins[1]):
            return form
    if path.suffix == ".mat":
        raise Rejected("format", "a .mat file without a WFDB header (.hea) beside it; save it as NPY, CSV or HDF5")
    if clinical.recognises(path):
        return BY_SUFFIX[".ecg"]
    for offset, begins, what, remedy in OTHERS:
        if start[offset:].startswith(begins):
            raise Rejected("format", f"a {what} file, which {remedy}")
    raise Rejected("format", f"not one of {', '.join(NAMES[:-1])}")


def find(path: str | Path) -> Iterator[RecordRef]:
    """The recordings of a file, or of a folder and the folders in it, sorted by path. Files whose suffix is no format's are
    left out; hidden ones too."""
    path = Path(path)
    if not path.exists() and not wfdb_record.header_of(path).exists():
        raise UserError(f"{path}: no such file or folder")
    if not path.is_dir():
        yield from refs_in(path)
        return
    for file in files_below(path):
        if file.suffix.lower() in BY_SUFFIX and not file.name.startswith("."):
            yield from refs_in(file)


def refs_in(path: Path, name: str = "") -> list[RecordRef]:
    """The recordings of one file. A file that cannot be opened is one recording, whose reading tells why."""
    one = [RecordRef(stem(path), path)]
    try:
        with _rejected(path):
            names = format_of(path, name).names
            return one if names is None else [RecordRef(key, path, i) for i, key in enumerate(names(path))]
    except Rejected:
        return one


def stem(name: str | Path) -> str:
    """A recording's name from its file's: without folder and without the suffix of a format. Blanks and dots stay."""
    path = Path(str(name).replace("\\", "/"))
    known = path.suffix.lower() in BY_SUFFIX or path.suffix.lower() in (".dat", ".mat")
    return path.stem if known else path.name


def read(
    path: str | Path | RecordRef,
    *,
    rate: float | None = None,
    unit: str | None = None,
    leads: Sequence[str] | None = None,
    lead_map: Mapping[str, str] | None = None,
) -> Recording:
    """Read one recording. `rate`, `unit` and `leads` say what the file does not; `lead_map` translates its own lead names.

    Raises Rejected if the file cannot be used, UserError if an argument is wrong or a library is missing."""
    ref = path if isinstance(path, RecordRef) else RecordRef(stem(path), Path(path))
    layout = Layout(rate, unit or "", tuple(leads or ()), dict(lead_map or {}))
    check_layout(layout, "")
    return _recording(ref.key, read_tracing(ref, layout), layout)


def from_array(
    signal: NDArray[np.generic], *, rate: float, unit: str, leads: Sequence[str], key: str = "array"
) -> Recording:
    """An array [leads, samples] or [samples, leads] as a recording. Raises as `read` does."""
    layout = Layout(rate, unit, tuple(leads))
    check_layout(layout, "")
    return _recording(key, arrays.tracing_of(np.asarray(signal), layout), layout)


def _recording(key: str, tracing: Tracing, layout: Layout) -> Recording:
    signal, flags = arrange(tracing, layout.lead_map, fill=True)
    flags += check_signal(signal)
    return Recording(key, signal, tracing.rate, tracing.codes, tracing.patient, tracing.age, tracing.sex, flags=flags)


def read_tracing(ref: RecordRef, layout: Layout, name: str = "") -> Tracing:
    """What the file says, by the reader of its format (or of the format `name`). Raises Rejected for whatever goes wrong."""
    with _rejected(ref.path):
        form = format_of(ref.path, name)
        if form.names is None and (size := ref.path.stat().st_size if ref.path.is_file() else 0) > LARGEST_FILE:
            raise Rejected("too long", f"{size:,} bytes, at most {LARGEST_FILE:,} are read")
        tracing = form.read(ref, layout)
    if not LEAST_RATE <= tracing.rate <= MOST_RATE:
        raise Rejected("header", f"sampling rate {tracing.rate:g}, {LEAST_RATE} to {MOST_RATE:,} Hz are read")
    return tracing


@contextmanager
def _rejected(path: Path) -> Iterator[None]:
    """Whatever a reader raises for a broken file is Rejected."""
    try:
        yield
    except (Rejected, UserError):
        raise
    except OSError as error:
        raise Rejected("unreadable", f"{error.strerror or error}: {error.filename or path.name}") from None
    except Exception as error:  # readers raise many kinds
        raise Rejected(
            "unreadable", f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        ) from None
