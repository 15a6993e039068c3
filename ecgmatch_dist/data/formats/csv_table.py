"""CSV: one column per lead. A header line may name leads and units, a column of time gives the rate."""

import io
import re

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ecgmatch_dist.data.formats.arrays import ask, tracing_of
from ecgmatch_dist.data.formats.leads import places
from ecgmatch_dist.data.formats.recording import Layout, RecordRef, Rejected, Tracing

SEPARATORS = (",", ";", "\t", "|")
TIME = {"time": 1.0, "t": 1.0, "seconds": 1.0, "sec": 1.0, "s": 1.0, "zeit": 1.0, "ms": 1e-3, "milliseconds": 1e-3}
"""Names of a column of time -> seconds."""
COUNTERS = {"", "sample", "samples", "index", "n", "no", "nr", "#"}
"""Names of a column that counts the samples."""
_UNIT = re.compile(r"\s*[(\[]\s*([0-9.e+-]*\s*[nuµμm]?V(?:olts?)?|m?s(?:ec)?)\s*[)\]]$", re.IGNORECASE)


def read(ref: RecordRef, layout: Layout) -> Tracing:
    text = ref.path.read_bytes()
    if b"\0" in text[:4096]:
        raise Rejected("unreadable", "not a text file")
    lines = [line for line in text.decode("utf-8-sig", "replace").splitlines() if line.strip() and line[0] != "#"]
    if len(lines) < 3:
        raise Rejected("layout", f"{len(lines)} lines: one line per sample is needed")
    separator, decimal = _separator(lines)
    first = _cells(lines[0], separator)
    named = any(_number(cell, decimal) is None for cell in first)
    try:
        table = pd.read_csv(
            io.StringIO("\n".join(lines[named:])), sep=separator, decimal=decimal, header=None, dtype=np.float64,
            na_values=["NaN", "nan", "-", ""], skipinitialspace=True,
        )  # fmt: skip
    except (ValueError, pd.errors.ParserError) as error:
        raise Rejected("layout", f"not a table of numbers ({str(error).splitlines()[0]})") from None
    return _from_columns(first, table.to_numpy(), layout) if named else tracing_of(table.to_numpy(), layout)


def _separator(lines: list[str]) -> tuple[str, str]:
    """The separator and the decimal sign. Of several separators, the one with the most cells in every line counts."""
    counts = {mark: min(line.count(mark) for line in lines[1:20]) for mark in SEPARATORS}
    if counts[";"] or counts["\t"] or counts["|"]:  # then a comma is a decimal sign
        best = max(";\t|", key=lambda mark: counts[mark])
        return best, "," if counts[","] or any("," in line for line in lines[1:20]) else "."
    return ("," if counts[","] else r"\s+"), "."


def _cells(line: str, separator: str) -> list[str]:
    cells = line.split() if separator == r"\s+" else line.split(separator)
    return [cell.strip().strip("\"'").strip() for cell in cells]


def _number(cell: str, decimal: str) -> float | None:
    try:
        return float(cell.replace(decimal, "."))
    except ValueError:
        return None


def _from_columns(header: list[str], values: NDArray[np.float64], layout: Layout) -> Tracing:
    """Columns with names. If these are no names of leads, the layout's count."""
    if values.shape[1] != len(header):
        raise Rejected("layout", f"{values.shape[1]} columns under {len(header)} names")
    units: list[str] = []
    names: list[str] = []
    kept: list[int] = []
    rate = None
    for place, cell in enumerate(header):
        unit = _UNIT.search(cell)
        name = cell[: unit.start()] if unit else cell
        if name.lower() in TIME:
            scale = 1e-3 if unit and unit[1].lower().startswith("ms") else TIME[name.lower()]
            rate = _rate(values[:, place] * scale)
        elif name.lower() not in COUNTERS:
            names.append(name)
            units.append(unit[1] if unit else "")
            kept.append(place)
    nameless = len(places(names, layout.lead_map)) < 2  # these are no names of leads
    said = f" ({', '.join(names[:12])})"
    rate = ask(layout, len(kept) if nameless else 0, said, found=rate, unit=not all(units))
    if nameless:
        names = list(layout.leads)
        if len(names) != len(kept):
            raise Rejected("layout", f"{len(kept)} columns of numbers, but `leads` names {len(names)}")
    return Tracing(values[:, kept].T, names, [unit or layout.unit for unit in units], rate)


def _rate(seconds: NDArray[np.float64]) -> float | None:
    """Samples per second from a column of time; None if it does not grow evenly."""
    if len(seconds) < 2 or not np.isfinite(seconds).all() or seconds[-1] <= seconds[0]:
        return None
    rate = float((len(seconds) - 1) / (seconds[-1] - seconds[0]))
    return float(round(rate)) if abs(rate - round(rate)) < 0.001 * rate else round(rate, 3)
