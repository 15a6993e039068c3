"""The checksums in a WFDB header: the 16-bit sum of each signal's samples. A wrong one means that the file was changed."""

import re
from pathlib import Path

import numpy as np

PLAIN = re.compile(r"16(?:x1)?(?:\+(?P<offset>\d+))?")  # format 16, perhaps behind a MATLAB header


def wrong_checksums(header: Path) -> tuple[str, ...]:
    """Names of the signals in one plain 16-bit file whose sum is not what the header says. Other formats: none."""
    lines = [line.split() for line in header.read_text("ascii", "ignore").splitlines() if line.strip()]
    lines = [words for words in lines if not words[0].startswith("#")]
    signals = [words for words in lines[1:] if len(words) >= 9]
    kinds = [PLAIN.fullmatch(words[1]) for words in signals]
    if not signals or len(signals) != len(lines) - 1 or None in kinds or len({words[0] for words in signals}) != 1:
        return ()
    try:
        expected = np.array([int(words[6]) for words in signals])
        samples = int(lines[0][3])
        offset = int((kinds[0] and kinds[0]["offset"]) or 0)
        raw = np.fromfile(header.with_name(signals[0][0]), "<i2", samples * len(signals), offset=offset)
    except (ValueError, IndexError, OSError):  # the reader has its own opinion of such a header
        return ()
    if raw.size != samples * len(signals):
        return ()
    wrong = (raw.reshape(samples, len(signals)).sum(0, dtype=np.int64) - expected) % 2**16 != 0
    return tuple(words[8] for words, bad in zip(signals, wrong, strict=True) if bad)
