"""The types of this room: what to read, what a file does not say itself, what a reader returns, what everybody else gets."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray


class Rejected(Exception):
    """A recording that cannot be used: the kind of fault, and details."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(kind, detail)
        self.kind, self.detail = kind, detail

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}"


@dataclass(frozen=True)
class RecordRef:
    """Where a recording is."""

    key: str
    path: Path
    """The file. The header of a WFDB record, whose suffix may be left out."""
    item: int | None = None
    """Which recording of a file that holds many (HDF5)."""


@dataclass(frozen=True)
class Layout:
    """What a file may not say about itself. A CSV or NPY file needs most of it, an XML file nothing."""

    rate: float | None = None
    """Samples per second."""
    unit: str = ""
    """uV, mV or V, also with a factor (`1e-4 V`, `4.88 uV`): the value of 1 in the file."""
    leads: tuple[str, ...] = ()
    """Names of the columns in their order."""
    lead_map: dict[str, str] = field(default_factory=dict)
    """The file's own names -> standard ones: {"Kanal 1": "I"}."""


@dataclass(frozen=True)
class Tracing:
    """What a file holds, as it says it."""

    signal: NDArray[np.floating]
    """[k, n]; NaN where there is no value."""
    names: Sequence[str]
    units: Sequence[str]
    """Of each of the k signals."""
    rate: float
    codes: tuple[str, ...] = ()
    patient: str = ""
    age: str = ""
    sex: str = ""
    others: Sequence[str] = ()
    """Names of signals that the file holds too."""


NOBODY = re.compile(
    r"[0x\W_]*|(anon|anonym[^\W\d_]*|de-?identified|unknown|removed|none|n/?a)( patient)?", re.IGNORECASE
)
"""What stands in the place of a patient's number in files that were made anonymous."""


def known_patient(text: str) -> str:
    """A patient's number in a file; empty where it names nobody: all recordings of an archive would be of one patient."""
    return "" if NOBODY.fullmatch(text.strip()) else text


@dataclass(frozen=True)
class Recording:
    """A recording that can be used."""

    key: str
    signal: NDArray[np.float32]
    """[12, n], mV, leads in the order of LEADS; NaN where the recording has no value."""
    rate: float
    codes: tuple[str, ...] = ()
    patient: str = ""
    age: str = ""
    sex: str = ""
    fold: str = ""
    flags: tuple[str, ...] = ()
    """What was done to the leads: `derived:III`, `missing:V3`, `unit?`."""
