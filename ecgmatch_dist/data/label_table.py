"""Tables of labels as people have them: any of four separators, Excel's exports, files with or without a byte-order mark."""

import csv
import io
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from ecgmatch_dist.data.formats.libraries import library
from ecgmatch_dist.errors import UserError

SEPARATORS = ",;\t|"
LARGEST = 2**28
"""Bytes of a workbook, unfolded: some millions of rows."""


@dataclass(frozen=True)
class LabelTable:
    file: Path
    columns: tuple[str, ...]
    rows: tuple[dict[str, str], ...]
    """Cells by column, without spaces around them."""
    lines: tuple[int, ...]
    """The line of the file where each row ends."""

    def column(self, name: str) -> list[str]:
        return [row[name] for row in self.rows]


def read_table(file: Path) -> LabelTable:
    """Read a table with a header line. The separator is the one that gives the header the most cells."""
    text = _decode(file)
    first, _, rest = text.partition("\n")
    separator = ""
    if first.lower().startswith("sep="):  # Excel's hint to itself
        separator, text = first.strip()[4:] or "\t", rest
        first = text.partition("\n")[0]
    try:
        separator = separator or max(SEPARATORS, key=lambda mark: len(next(csv.reader([first], delimiter=mark), [])))
        lines = csv.reader(io.StringIO(text, newline=""), delimiter=separator)
        columns = [name.strip() or f"column {i}" for i, name in enumerate(next(lines, []), 1)]
        rows, numbers = [], []
        for cells in lines:
            if any(cell.strip() for cell in cells):
                rows.append(_row(columns, cells, f"{file}: line {lines.line_num}"))
                numbers.append(lines.line_num)
    except (csv.Error, TypeError) as error:  # TypeError: a separator of several characters
        raise UserError(f"{file}: the table of labels cannot be read ({error})") from None
    if twice := [name for name in columns if name and columns.count(name) > 1]:
        raise UserError(f"{file}: two columns are called `{twice[0]}`; rename one")
    return LabelTable(file, tuple(columns), tuple(rows), tuple(numbers))


def _row(columns: Sequence[str], cells: Sequence[str], where: str) -> dict[str, str]:
    if any(cell.strip() for cell in cells[len(columns) :]):  # what does not fit the header would be lost
        raise UserError(
            f"{where} has {len(cells)} cells, the header {len(columns)}; put cells that hold the separator in quotes"
        )
    filled = [cell.strip() for cell in cells] + [""] * (len(columns) - len(cells))
    return dict(zip(columns, filled, strict=False))


def _first_sheet(file: Path) -> str:
    """The first sheet of an .xlsx workbook as CSV."""
    library("openpyxl")
    try:
        with zipfile.ZipFile(file) as book:
            if (size := sum(member.file_size for member in book.infolist())) > LARGEST:
                raise ValueError(f"it unfolds to {size:,} bytes, at most {LARGEST:,} are read")
        sheet = pd.read_excel(file, header=None, dtype=str, na_filter=False, engine="openpyxl")
    except Exception as error:  # openpyxl raises many kinds for a broken workbook
        raise UserError(f"{file}: the workbook cannot be read ({error}); save the sheet as CSV") from None
    return "sep=,\n" + sheet.to_csv(index=False, header=False, lineterminator="\n")


def _decode(file: Path) -> str:
    try:
        content = file.read_bytes()
    except OSError as error:
        raise UserError(f"{file}: the table of labels cannot be read ({error.strerror})") from None
    if content.startswith(b"\xd0\xcf\x11\xe0"):
        raise UserError(
            f"{file}: a workbook of Excel 2003; save the sheet as .xlsx or CSV (File > Save as > CSV UTF-8)"
        )
    if content.startswith(b"PK\x03\x04"):
        return _first_sheet(file)
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):  # Excel's "Unicode text"
        return content.decode("utf-16", errors="replace")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        return content.decode("cp1252", errors="replace")  # Excel's "CSV" in western Europe
