"""The table of predictions: CSV, JSON lines or Parquet, by the suffix of its name. It can be continued after an interruption.

Rows are appended to `<name>.part`, JSON lines, as they come. At the end the part becomes the table in one step: whoever
finds the table finds all of it.
"""

import csv
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any

from ecgmatch_dist.errors import UserError
from ecgmatch_dist.files.atomic import naming, write_atomic
from ecgmatch_dist.files.jsonl import read_lines, to_line
from ecgmatch_dist.files.plain import plain_cell, plain_line
from ecgmatch_dist.predict.result import Failure, Prediction

ROWS_AT_ONCE = 4096  # of a Parquet file
LONGEST_ROW = 1 << 20  # bytes
Row = dict[str, Any]
Rows = Callable[[], Iterator[Row]]
Writer = Callable[[Rows, list[str], Path], None]


class Table:
    """A table under way. `done`: paths that have their row; `failed`: how many of the rows are failures."""

    def __init__(self, path: Path, about: Row, classes: Sequence[str]) -> None:
        """`about`: the model and the settings. A part that was begun with others is refused. `classes`: for the columns."""
        self.path, self._write, self._columns = path, writer_of(path), columns(classes)
        self.part = path.with_name(path.name + ".part")
        if path.exists():
            self.part.unlink(missing_ok=True)  # killed after the last step
            raise UserError(f"{path}: exists already; remove it, or give another --out")
        self.done: set[str] = set()
        self.failed = 0
        self._resume(about)

    def _resume(self, about: Row) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        rows = read_lines(self.part)
        begun = next(rows, None)
        if begun is not None and begun != about:
            raise UserError(
                f"{self.part}: begun with another model or other settings; remove it, or give another --out"
            )
        for row in rows:
            self.done.add(row["path"])
            self.failed += bool(row["error"])
        with naming(self.part):
            if begun is None:
                self.part.write_text(to_line(about), encoding="utf-8")
            _cut_torn_line(self.part)
            self._file = self.part.open("a", encoding="utf-8")

    def add(self, answer: Prediction | Failure) -> None:
        with naming(self.part):
            self._file.write(to_line(answer.to_json()))
        self.failed += bool(answer.error)

    def flush(self) -> None:
        with naming(self.part):
            self._file.flush()

    def __enter__(self) -> "Table":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        """Complete the table; after an error, leave the part for the next time."""
        if kind is not None:
            with suppress(OSError):  # it tries to write again: that second error must not hide the first
                self._file.close()
            return
        with naming(self.part):
            self._file.close()
        write_atomic(self.path, lambda temporary: self._write(self.rows, self._columns, temporary))
        self.part.unlink()

    def rows(self) -> Iterator[Row]:
        rows = read_lines(self.part)
        next(rows)  # `about`
        return rows


def _cut_torn_line(path: Path) -> None:
    """A kill may leave half a line: the next one must not be glued to it."""
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(max(0, size - LONGEST_ROW))
        end = file.read()
        file.truncate(size - (len(end) - end.rfind(b"\n") - 1))


def flat(row: Row) -> Row:
    """A row without nesting, for tables of columns."""
    out = {name: plain_line(row[name]) for name in ("path", "record", "error")}
    out |= {name: " ".join(row[name]) for name in ("predicted", "likely", "flags")}
    for name, values in row["classes"].items():
        out |= {name: values["probability"]}
        out |= {f"{name}_{what}": values[what] for what in ("calibrated", "threshold")}
    out["nearest"] = " ".join(f"{case['id']}={case['similarity']}" for case in row["nearest"])
    return out


def columns(classes: Sequence[str]) -> list[str]:
    """Of the table; the same, whether or not a file could be predicted."""
    numbers = {name: {"probability": 0.0, "calibrated": 0.0, "threshold": 0.0} for name in classes}
    return list(flat(Failure("", "").to_json() | {"classes": numbers}))


def write_csv(part: Rows, columns: list[str], path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, columns, lineterminator="\n")
        table.writeheader()
        for row in map(flat, part()):
            table.writerow({name: plain_cell(cell) if isinstance(cell, str) else cell for name, cell in row.items()})


def write_jsonl(part: Rows, _: list[str], path: Path) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(map(to_line, part()))


def write_parquet(part: Rows, columns: list[str], path: Path) -> None:
    import pyarrow as pa
    from pyarrow.parquet import ParquetWriter

    texts = {"path", "record", "error", "predicted", "likely", "flags", "nearest"}
    schema = pa.schema([(name, pa.string() if name in texts else pa.float32()) for name in columns])
    rows = map(flat, part())
    with ParquetWriter(path, schema) as file:
        while some := list(islice(rows, ROWS_AT_ONCE)):
            file.write_table(pa.Table.from_pylist(some, schema))


def writer_of(path: Path) -> Writer:
    """By the suffix. Asked before the first ECG is read."""
    writers = {".csv": write_csv, ".jsonl": write_jsonl, ".parquet": write_parquet}
    if path.suffix not in writers:
        raise UserError(
            f"--out {path}: a name that ends with {', '.join(writers)}; pages with pictures: --pages FOLDER"
        )
    if path.suffix == ".parquet" and find_spec("pyarrow") is None:
        raise UserError(f"--out {path}: Parquet needs the extra `parquet`: pip install 'ecgmatch-dist[parquet]'")
    return writers[path.suffix]
