"""What a header may claim. A header is a text that anybody can write: its numbers are checked before memory is asked for."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ecgmatch_dist.data.formats.recording import Rejected

LONGEST = 2_000_000
"""Samples per lead, before and after resampling: over an hour at 500 Hz."""
LEAST_RATE, MOST_RATE = 1, 50_000
"""Sampling rates in Hz. The filter that resamples others would take gigabytes."""
LARGEST_HEADER = 2**20
"""Bytes; a header of twelve leads has about 1,000."""
MOST_SIGNALS = 10_000
LARGEST_FILE = 2**28
"""Bytes of a file with one recording: LONGEST samples of twelve leads, as text too."""
MOST_RECORDINGS = 1_000_000
"""In one file."""


def read_header(file: Path) -> str:
    require_regular(file)
    if (size := file.stat().st_size) > LARGEST_HEADER:
        raise Rejected("header", f"{size:,} bytes, at most {LARGEST_HEADER:,} are read")
    return file.read_text("ascii", "ignore")


def require_regular(file: Path) -> None:
    """Reject a pipe, a device or a folder: reading one may never end."""
    if file.exists() and not file.is_file():
        raise Rejected("unreadable", f"{file.name} is not a regular file")


def whole_number(text: str | None, most: int, what: str) -> int:
    """A number of a header's first line; 0 where there is none."""
    digits = (text or "").lstrip("0") or "0"
    if len(digits) > len(str(most)) or int(digits) > most:
        raise Rejected("header", f"{shortened(digits)} {what}, at most {most:,} are read")
    return int(digits)


def sampling_rate(text: str | None) -> float:
    """In Hz; WFDB's default where there is none."""
    try:
        rate = float(text or 250)
    except ValueError:  # a lone dot
        rate = 0.0
    if not LEAST_RATE <= rate <= MOST_RATE:
        raise Rejected("header", f"sampling rate {rate:g}, {LEAST_RATE} to {MOST_RATE:,} Hz are read")
    return rate


def check_length(samples: int, rate: float, target: float) -> None:
    """Reject a recording that would be too long after resampling to `target`."""
    if (longer := samples * target / rate) > LONGEST:
        raise Rejected(
            "too long",
            f"{samples:,} samples at {rate:g} Hz are {longer:,.0f} at {target:g} Hz, at most {LONGEST:,} fit",
        )


def check_layout(fields: dict[str, list[Any]], samples: int, folder: Path, record: str) -> None:
    """Signal files for wfdb: regular ones, no frames or skews that would need more memory than LONGEST samples."""
    for name in set(fields["file_name"]):
        require_regular(folder / name.replace("~", record))
    most = max(samples, 1) * max(frame or 1 for frame in fields["samps_per_frame"])
    most += max(skew or 0 for skew in fields["skew"])
    if most > LONGEST:
        raise Rejected("header", f"frames and skews of {shortened(str(most))} samples, at most {LONGEST:,} are read")


def finite_numbers(values: Sequence[float], kind: type[np.floating]) -> NDArray[np.floating]:
    """Gains or baselines of a header."""
    try:
        found = np.array(values, np.float64)
    except OverflowError:
        found = np.full(1, np.inf)
    if not np.isfinite(found).all():
        raise Rejected("header", "a gain or baseline that is not a finite number")
    return found.astype(kind)


def shortened(text: str, most: int = 20) -> str:
    return text if len(text) <= most else f"{text[:most]}..."
