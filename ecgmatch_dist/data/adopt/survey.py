"""What lies in a folder: recordings of which format, rate, length, leads and unit; and which files are tables of labels."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from ecgmatch_dist.data.databases import safe_name
from ecgmatch_dist.data.formats.leads import LEADS, arrange, check_signal, places
from ecgmatch_dist.data.formats.read import BY_SUFFIX, format_of, read_tracing, refs_in
from ecgmatch_dist.data.formats.recording import Layout, Recording, RecordRef, Rejected, Tracing
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.files.walk import files_below

TABLES = (".csv", ".tsv", ".txt", ".xlsx")
GUESSES: dict[str, dict[str, object]] = {"leads": {"leads": LEADS}, "units": {"unit": "mV"}, "rate": {"rate": 500.0}}
"""What a file does not say (the kind of its refusal) -> a guess, to look further."""


@dataclass(frozen=True)
class Found:
    """One recording that was looked at."""

    ref: RecordRef
    format: str
    problem: str = ""
    """Why it cannot be read; empty if it can."""
    unsaid: tuple[str, ...] = ()
    """Of leads, units and rate: what the file does not say."""
    rate: float = 0
    samples: int = 0
    names: tuple[str, ...] = ()
    units: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    """Leads that it has not, and that cannot be derived."""
    codes: tuple[str, ...] = ()
    patient: str = ""
    span: float = 0
    """Of the middle lead in the file's unit: 99th minus 1st percentile."""
    recording: Recording | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Archive:
    """The files of a folder."""

    folder: Path
    refs: tuple[RecordRef, ...]
    tables: tuple[Path, ...]

    @property
    def names(self) -> set[str]:
        return {safe_name(ref.key) for ref in self.refs}


def list_files(folder: Path) -> Archive:
    """All recordings of a folder and the folders in it, and the tables that hold no signals."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder")
    files = [path for path in files_below(folder) if not path.name.startswith((".", "~$"))]
    tables = [path for path in files if path.suffix.lower() in TABLES and not is_signal_table(path)]
    left_out = set(tables)
    refs = [ref for path in files if path.suffix.lower() in BY_SUFFIX and path not in left_out for ref in refs_in(path)]
    if not refs:
        raise UserError(f"{folder}: no recordings in it; known are files with {' '.join(BY_SUFFIX)}")
    return Archive(folder, tuple(refs), tuple(tables))


def is_signal_table(path: Path) -> bool:
    """Whether a text table holds samples: its header names leads, or it has no header but numbers only."""
    if path.suffix.lower() == ".xlsx":
        return False
    with path.open("rb") as file:
        lines = [line for line in file.read(65536).decode("utf-8-sig", "replace").splitlines() if line[:1] != "#"]
    first = next((line for line in lines if line.strip()), "")
    for mark in (";", "\t", "|", ","):
        if mark in first:
            cells = [cell.strip(" \"'") for cell in first.split(mark)]
            try:
                named = len(places([cell.split("[")[0].split("(")[0] for cell in cells], {})) >= 2
            except Rejected:
                named = True
            return named or all(_is_number(cell) for cell in cells)
    return len(lines) > 100 and all(_is_number(word) for word in first.split())


def _is_number(cell: str) -> bool:
    try:
        float(cell.replace(",", "."))
    except ValueError:
        return False
    return True


def some(refs: Sequence[RecordRef], count: int) -> list[RecordRef]:
    """At most `count` recordings, evenly spread over the formats and the archive."""
    if len(refs) <= count:
        return list(refs)
    by_format: dict[str, list[RecordRef]] = {}
    for ref in refs:
        by_format.setdefault(ref.path.suffix.lower(), []).append(ref)
    share = max(count // len(by_format), 1)
    chosen: list[RecordRef] = []
    for of_format in by_format.values():
        step = max(len(of_format) / share, 1)
        chosen += [of_format[int(i * step)] for i in range(min(share, len(of_format)))]
    return chosen


def look_at(ref: RecordRef) -> Found:
    """Read one recording. What the file does not say is guessed, and noted."""
    unsaid: list[str] = []
    layout, kind = Layout(), "unknown"
    try:
        kind = format_of(ref.path).name
        while True:
            try:
                tracing = read_tracing(ref, layout)
                break
            except Rejected as fault:
                if fault.kind not in GUESSES or fault.kind in unsaid or "does not" not in fault.detail:
                    raise
                unsaid.append(fault.kind)
                layout = replace(layout, **GUESSES[fault.kind])  # type: ignore[arg-type]
        return _describe(ref, kind, tracing, tuple(unsaid))
    except Rejected as fault:
        return Found(ref, kind, str(fault), tuple(unsaid))


def _describe(ref: RecordRef, kind: str, tracing: Tracing, unsaid: tuple[str, ...]) -> Found:
    signal, flags = arrange(tracing, {}, fill=True)
    check_signal(signal)
    recording = Recording(ref.key, signal, tracing.rate, tracing.codes, flags=flags)
    finite = [lead[np.isfinite(lead)] for lead in signal if np.isfinite(lead).any()]
    spans = [float(np.subtract(*np.percentile(lead, (99, 1)))) for lead in finite if lead.any()]
    missing = tuple(flag.removeprefix("missing:") for flag in flags if flag.startswith("missing:"))
    return Found(
        ref, kind, "", unsaid, tracing.rate, signal.shape[1], tuple(tracing.names), tuple(tracing.units), missing,
        tracing.codes, tracing.patient, float(np.median(spans)) if spans else 0.0, recording,
    )  # fmt: skip
