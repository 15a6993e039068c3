"""Recordings on disk: find them, and read one as the twelve standard leads in mV with its labels.

wfdb's header parser takes ten times as long as reading the samples. So headers that differ only in name, first values and
checksums are parsed once, and plain 16-bit signal files are read by numpy (tests compare with wfdb)."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import wfdb
from numpy.typing import NDArray
from wfdb.io.header import HeaderSyntaxError, parse_header_content, rx_record

from ecgmatch_dist.data.annotations import Annotation, parse_comments
from ecgmatch_dist.data.databases import Recipe
from ecgmatch_dist.data.preprocess import LEADS as LEADS
from ecgmatch_dist.errors import UserError

MILLIVOLTS = {"mv": 1.0, "uv": 1e-3, "v": 1e3}
SIGNAL_FIELDS = (
    "file_name", "fmt", "samps_per_frame", "skew", "byte_offset", "adc_gain", "baseline", "units", "sig_name",
)  # fmt: skip
MISSING = -(2**15)
"""The sample value that means "no value" in format 16."""


class Rejected(Exception):
    """A recording that cannot be used: the kind of fault, and details."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(kind, detail)
        self.kind, self.detail = kind, detail

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}"


@dataclass(frozen=True)
class RecordRef:
    key: str
    path: Path
    """Of the header, without suffix."""


@dataclass(frozen=True)
class Recording:
    key: str
    signal: NDArray[np.float32]
    """[12, n], mV, leads in the order of LEADS; NaN where the recording has no value."""
    rate: float
    codes: tuple[str, ...]
    patient: str
    age: str
    sex: str
    fold: str


def find_folder(recipe: Recipe, raw: Path) -> Path:
    """The folder of recordings: the first of the recipe's folders that exists under `raw`, otherwise `raw` itself."""
    if not raw.is_dir():
        raise UserError(f"{raw}: no such folder; --raw is the folder of the recordings of {recipe.database}")
    return next((raw / name for name in recipe.folders if (raw / name).is_dir()), raw)


def find_records(recipe: Recipe, raw: Path) -> list[RecordRef]:
    """All recordings, sorted by name."""
    folder = find_folder(recipe, raw)
    paths = {path for pattern in recipe.files for path in folder.glob(pattern)}
    if not paths:
        places = ", ".join(recipe.folders)
        raise UserError(
            f"{folder}: no recordings ({' or '.join(recipe.files)}) of {recipe.database}; --raw must be their folder, "
            f"or the one that holds {places or 'it'}"
        )
    refs: dict[str, RecordRef] = {}
    for path in sorted(paths):
        ref = RecordRef(recipe.key(path.stem), path.with_suffix(""))
        if ref.key in refs:
            raise UserError(
                f"two recordings are named {ref.key}: {refs[ref.key].path}.hea and {path}; "
                f"remove one, or rename them with `rename` in the recipe"
            )
        refs[ref.key] = ref
    return [refs[key] for key in sorted(refs)]


def read_recording(
    ref: RecordRef, annotations: dict[str, Annotation] | None = None, keep_unlisted: bool = False
) -> Recording:
    """Read one recording, with labels from `annotations`, or from its header if None. `keep_unlisted`: one that the table
    lacks has no codes. Raises Rejected."""
    if not re.fullmatch(r"[\w-]+", ref.key, re.ASCII):
        raise Rejected(
            "name", f"`{ref.key}` has other characters than letters, digits, _ and - (see `rename` in the recipe)"
        )
    try:
        lines, comments = parse_header_content(ref.path.with_suffix(".hea").read_text("ascii", "ignore"))
        rate, signal = _read_signal(ref.path, lines)
    except OSError as error:
        raise Rejected("unreadable", f"{error.strerror}: {error.filename}") from None
    if annotations is None:
        labels = parse_comments(comments)
    elif ref.key in annotations:
        labels = annotations[ref.key]
    elif keep_unlisted:
        labels = Annotation(())
    else:
        raise Rejected("no label", "not in the table of labels")
    return Recording(ref.key, signal, rate, labels.codes, labels.patient, labels.age, labels.sex, labels.fold)


def _read_signal(path: Path, lines: Sequence[str]) -> tuple[float, NDArray[np.float32]]:
    """Header lines -> rate and signal [12, n] in mV."""
    match = rx_record.match(lines[0]) if lines else None
    if match is None or match["n_seg"] or len(lines) < 2 or len(lines) != int(match["n_sig"]) + 1:
        raise Rejected("header", "not a single-segment WFDB header with one line per lead")
    fields = _signal_fields(path, match["record_name"], lines[1:])
    order = _standard_order(fields["sig_name"])
    units = [str(fields["units"][v]).lower() for v in order]
    if not MILLIVOLTS.keys() >= set(units):
        raise Rejected("units", f"{' '.join(sorted(set(units)))}: not a voltage")
    rate = float(match["fs"] or 250)  # WFDB's default
    if rate < 1:
        raise Rejected("header", f"sampling rate {rate:g}")
    to_mv = np.array([MILLIVOLTS[unit] for unit in units])
    if _is_plain(fields):
        name = fields["file_name"][0].replace("~", match["record_name"])
        signal = _read_plain(path.parent / name, fields, order, to_mv, int(match["sig_len"] or 0))
    else:
        signal = _read_with_wfdb(path)[order] * to_mv[:, None]
    if not np.isfinite(signal).any():
        raise Rejected("no signal", "not one sample has a value")
    return rate, signal.astype(np.float32, copy=False)


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
        except (ValueError, TypeError, IndexError, HeaderSyntaxError) as error:
            raise Rejected("header", str(error)) from None
        fields = {name: getattr(header, name) for name in SIGNAL_FIELDS}
        fields["file_name"] = [line.split()[0] for line in kind]
        _parsed[kind] = fields
    return _parsed[kind]


@lru_cache(maxsize=4096)
def _order_of(names: tuple[str, ...]) -> tuple[int, ...]:
    found = [name.upper() for name in names]
    missing = [lead for lead in LEADS if lead.upper() not in found]
    if missing:
        raise Rejected("leads", f"{' '.join(missing)} missing; there are {len(names)}: {' '.join(names)}")
    twice = [lead for lead in LEADS if found.count(lead.upper()) > 1]
    if twice:
        raise Rejected("leads", f"{' '.join(twice)} more than once")
    return tuple(found.index(lead.upper()) for lead in LEADS)


def _standard_order(names: Sequence[str | None]) -> list[int]:
    """The index of each standard lead in `names`, which may be in any case and order. Other signals are left out."""
    return list(_order_of(tuple(str(name).strip() for name in names)))


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
    """Signal file -> [12, n] in mV; NaN where there is no value. `samples` 0: all in the file."""
    offset, signals = fields["byte_offset"][0] or 0, len(fields["fmt"])
    held = max(file.stat().st_size - offset, 0) // (2 * signals)
    if held < max(samples, 1):
        raise Rejected("cut short", f"{file.name} holds {held} of {samples} samples")
    raw = np.fromfile(file, "<i2", count=(samples or held) * signals, offset=offset)
    digital = raw.reshape(-1, signals).T[order]
    signal = digital.astype(np.float32)
    signal -= np.array([fields["baseline"][v] for v in order], np.float32)[:, None]
    signal *= (to_mv / np.array([fields["adc_gain"][v] for v in order])).astype(np.float32)[:, None]
    if digital.min() == MISSING:
        signal[digital == MISSING] = np.nan
    return signal


def _read_with_wfdb(path: Path) -> NDArray[np.float64]:
    """Any other format -> [signals, n] in the header's units; NaN where there is no value."""
    try:
        return np.asarray(wfdb.rdrecord(str(path)).p_signal).T
    except Exception as error:  # for a file that contradicts its header wfdb raises many kinds, even bare Exception
        raise Rejected("unreadable", f"{type(error).__name__}: {error}") from None
