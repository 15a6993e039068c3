"""WFDB: a header and one or more signal files.

wfdb's header parser takes ten times as long as reading the samples. So headers that differ only in name, first values and
checksums are parsed once, and plain 16-bit signal files are read by numpy (tests compare with wfdb)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import wfdb
from numpy.typing import NDArray
from wfdb.io.header import HeaderSyntaxError, parse_header_content, rx_record

from ecgmatch_dist.data.annotations import parse_comments
from ecgmatch_dist.data.formats.leads import millivolts, places
from ecgmatch_dist.data.formats.recording import Layout, RecordRef, Rejected, Tracing
from ecgmatch_dist.data.header_limits import (
    LONGEST,
    MOST_SIGNALS,
    check_layout,
    finite_numbers,
    read_header,
    require_regular,
    sampling_rate,
    whole_number,
)
from ecgmatch_dist.errors import UserError

SIGNAL_FIELDS = (
    "file_name", "fmt", "samps_per_frame", "skew", "byte_offset", "adc_gain", "baseline", "units", "sig_name",
)  # fmt: skip
MISSING = -(2**15)
"""The sample value that means "no value" in format 16."""


def header_of(path: Path) -> Path:
    """The header of a record that is named by its header, by a signal file, or without a suffix. Names may hold dots."""
    if path.suffix == ".hea":
        return path
    plain = path.with_name(path.name + ".hea")
    return path.with_suffix(".hea") if path.suffix in (".dat", ".mat") and not plain.exists() else plain


def read(ref: RecordRef, layout: Layout) -> Tracing:
    """The standard leads that the record has, in their order."""
    header = header_of(ref.path)
    lines, comments = parse_header_content(read_header(header))
    match = rx_record.match(lines[0]) if lines else None
    signals = 0 if match is None else whole_number(match["n_sig"], MOST_SIGNALS, "leads")
    if match is None or match["n_seg"] or len(lines) < 2 or len(lines) != signals + 1:
        raise Rejected("header", "not a single-segment WFDB header with one line per lead")
    rate, samples = sampling_rate(match["fs"]), whole_number(match["sig_len"], LONGEST, "samples per lead")
    record = header.with_name(header.name.removesuffix(".hea"))
    fields = _signal_fields(record, match["record_name"], lines[1:])
    names = [str(name).strip() for name in fields["sig_name"]]
    order = list(places(names, layout.lead_map).values())
    to_mv = np.array([millivolts(str(fields["units"][v])) for v in order])
    if _is_plain(fields):
        name = fields["file_name"][0].replace("~", match["record_name"])
        signal = _read_plain(record.parent / name, fields, order, to_mv, samples)
    else:
        check_layout(fields, samples, record.parent, match["record_name"])
        signal = (_read_with_wfdb(record)[order] * to_mv[:, None]).astype(np.float32)
    try:
        said = parse_comments(comments)
    except UserError as error:
        raise Rejected("label", str(error)) from None
    others = [name for v, name in enumerate(names) if v not in order]  # named in messages, but not read
    kept = [names[v] for v in order]
    return Tracing(signal, kept, ["mV"] * len(kept), rate, said.codes, said.patient, said.age, said.sex, others)


def _without_values(line: str, record: str) -> str:
    """A signal line without the values that differ between similar recordings: name, first value and checksum."""
    words = line.split(maxsplit=8)
    if len(words) == 9:
        words[5:7] = "0", "0"
    stem, dot, suffix = words[0].partition(".")
    return " ".join(["~" + dot + suffix if stem == record else words[0], *words[1:]])


_parsed: dict[tuple[str, ...], dict[str, list[Any]]] = {}


def _signal_fields(path: Path, record: str, lines: Sequence[str]) -> dict[str, list[Any]]:
    """Fields of the signal lines as wfdb parses them; `~` stands for the record's name."""
    kind = tuple(_without_values(line, record) for line in lines)
    if kind not in _parsed:
        try:
            header = wfdb.rdheader(str(path))
        except (ValueError, TypeError, IndexError, OverflowError, HeaderSyntaxError) as error:
            raise Rejected("header", str(error)) from None
        fields = {name: getattr(header, name) for name in SIGNAL_FIELDS}
        fields["file_name"] = [line.split()[0] for line in kind]
        _parsed[kind] = fields
    return _parsed[kind]


def _is_plain(fields: dict[str, list[Any]]) -> bool:
    """Whether the signals are in one file of little-endian 16-bit samples, interleaved sample by sample."""
    return (
        set(fields["fmt"]) == {"16"}
        and len(set(fields["file_name"])) == 1
        and set(fields["samps_per_frame"]) <= {1, None}
        and set(fields["skew"]) <= {0, None}
    )


def _read_plain(
    file: Path, fields: dict[str, list[Any]], order: list[int], to_mv: NDArray[np.float64], samples: int
) -> NDArray[np.float32]:
    """Signal file -> [k, n] in mV; NaN where there is no value. `samples` 0: all in the file."""
    require_regular(file)
    offset, signals = fields["byte_offset"][0] or 0, len(fields["fmt"])
    held = max(file.stat().st_size - offset, 0) // (2 * signals)
    if held < max(samples, 1):
        raise Rejected("cut short", f"{file.name} holds {held} of {samples} samples")
    if not samples and held > LONGEST:
        raise Rejected("header", f"no length, and {file.name} holds {held:,} samples, at most {LONGEST:,} are read")
    raw = np.fromfile(file, "<i2", count=(samples or held) * signals, offset=offset)
    digital = raw.reshape(-1, signals).T[order]
    signal = digital.astype(np.float32)
    signal -= finite_numbers([fields["baseline"][v] for v in order], np.float32)[:, None]
    signal *= (to_mv / finite_numbers([fields["adc_gain"][v] for v in order], np.float64)).astype(np.float32)[:, None]
    if digital.min(initial=0) == MISSING:
        signal[digital == MISSING] = np.nan
    return signal


def _read_with_wfdb(path: Path) -> NDArray[np.float64]:
    """Any other format -> [signals, n] in the header's units; NaN where there is no value."""
    try:
        return np.asarray(wfdb.rdrecord(str(path)).p_signal).T
    except Exception as error:  # for a file that contradicts its header wfdb raises many kinds, even bare Exception
        raise Rejected("unreadable", f"{type(error).__name__}: {error}") from None
