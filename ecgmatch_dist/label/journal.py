"""`labels.csv.journal`: every answer of every reader, one JSON object per line, appended and synced, never rewritten.

The first line names the format and the classes that readers are asked for; it comes again where the classes change. Then
answers, answers that are taken back, and the checksum of each table that was written from them:

    {"format": 1, "classes": ["AF", "ST"]}
    {"recording": "my_hospital/ecg7", "reader": "anna", "at": "2026-11-17T15:30:00+00:00", "seconds": 4.2, "classes": ["AF"],
     "unsure": ["ST"], "why": "uncertain"}
    {"undo": "my_hospital/ecg7", "reader": "anna", "at": "2026-11-17T15:30:09+00:00"}
    {"table": "<sha256 of labels.csv>"}

Several processes may append: each takes the lock, reads what the others wrote, and appends its line. A kill cuts at most the
last line, which nobody was told to be saved.
"""

import json
import os
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from ecgmatch_dist.errors import UserError
from ecgmatch_dist.files.atomic import sync_folder
from ecgmatch_dist.files.jsonl import to_line
from ecgmatch_dist.files.lock import locked
from ecgmatch_dist.files.strict import convert

FORMAT = 1
REMEDY = "correct the line, or delete it"
LONGEST = 65536  # bytes of a line; answers have some hundred


@dataclass(frozen=True)
class Classes:
    """What readers are asked for from here on."""

    format: int
    classes: tuple[str, ...]


@dataclass(frozen=True)
class Answer:
    """What one reader said about one recording."""

    recording: str
    reader: str
    at: str
    seconds: float
    """That the recording was on the screen."""
    classes: tuple[str, ...]
    unsure: tuple[str, ...] = ()
    """Classes that the reader could not decide: unknown, not absent."""
    why: str = ""
    """Why the recording was shown: random, spread, uncertain, second reader, check, again."""


@dataclass(frozen=True)
class Undo:
    """The reader takes the last answer on a recording back; the one before it counts again."""

    undo: str
    reader: str
    at: str


@dataclass(frozen=True)
class Table:
    """The label table that is written next has this checksum."""

    table: str


Entry = Classes | Answer | Undo | Table
KINDS: dict[str, type[Entry]] = {"format": Classes, "undo": Undo, "table": Table}


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


class Follower(Protocol):
    """What is made of the entries."""

    def check(self, entry: Entry) -> None:
        """Raise a UserError if the entry does not fit: a class that nobody asks for, a recording that is not there."""

    def add(self, entry: Entry) -> None:
        """Take an entry that was checked. Called in the order of the file."""


class Journal:
    """An open journal. `follower` gets each entry once, whoever wrote it."""

    def __init__(self, path: Path, follower: Follower) -> None:
        self.path, self._follower = path, follower
        self._offset = self._line = 0
        self._last = b""
        self.warning = ""
        """What was wrong with the last line, if it was cut."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with self._locked():
            self._catch_up(repair=True)

    @property
    def exists(self) -> bool:
        return self._line > 0

    def append(self, entry: Entry) -> None:
        """Write an entry; when this returns, it is on the disk. Entries of other processes are followed first."""
        with self._locked():
            self._catch_up(repair=True)
            self._follower.check(entry)  # nothing is written that a later start would refuse
            line = to_line({name: value for name, value in asdict(entry).items() if value != ""}).encode()
            assert len(line) <= LONGEST
            new = not self.path.exists()
            with self.path.open("ab") as file:
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
            if new:
                sync_folder(self.path.parent)
            self._advance(line)

    def catch_up(self) -> None:
        """Follow what other processes have appended."""
        if self._size() != self._offset:
            with self._locked():
                self._catch_up(repair=False)

    def _locked(self) -> Any:
        return locked(self.path.with_name(f"{self.path.name}.lock"))

    def _size(self) -> int:
        return self.path.stat().st_size if self.path.is_file() else 0

    def _catch_up(self, repair: bool) -> None:
        """Read from where we stopped. A last line without its end: a whole entry gets its line break, a piece is cut off."""
        if self._size() < self._offset:
            self._refuse_change()
        if not self.path.is_file():
            return
        with self.path.open("rb") as file:
            file.seek(self._offset - len(self._last))
            if file.read(len(self._last)) != self._last:
                self._refuse_change()
            for line in file:
                if not line.endswith(b"\n"):
                    if repair:
                        self._mend(line)
                    return
                self._advance(line)

    def _refuse_change(self) -> None:
        raise UserError(f"{self.path}: it was changed by another program while in use; give the same command again")

    def _advance(self, line: bytes) -> None:
        self._line += 1
        if self._line == 1 or line.strip():
            self._follow_line(line)
        self._offset += len(line)
        self._last = line[-256:]

    def _follow_line(self, line: bytes) -> None:
        where = f"{self.path}: line {self._line}"
        entry = parse(line, where)
        if self._line == 1 and not isinstance(entry, Classes):
            raise UserError(f"{where} does not name the format and the classes: this is no journal of labels")
        try:
            self._follower.check(entry)
        except UserError as error:
            raise UserError(f"{where}: {error}; {REMEDY}") from None
        self._follower.add(entry)

    def _mend(self, line: bytes) -> None:
        try:
            parse(line, "")
            whole = True
        except UserError:
            whole = False
        with self.path.open("r+b") as file:
            if whole:  # somebody's editor wrote no line break at the end
                file.seek(0, os.SEEK_END)
                file.write(b"\n")
            else:
                file.truncate(self._offset)
            file.flush()
            os.fsync(file.fileno())
        if whole:
            self._advance(line + b"\n")
            return
        self.warning = (
            f"{self.path}: line {self._line + 1} was cut by a kill and is left out ({line.decode(errors='replace'):.80}); "
            "all lines before it are complete"
        )


def parse(line: bytes, where: str) -> Entry:
    """A line of the file, or a UserError that says what is wrong with it."""
    if len(line) > LONGEST:
        raise UserError(f"{where} has {len(line):,} bytes, more than any answer; {REMEDY}")
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not JSON ({error}); {REMEDY}") from None
    if not isinstance(value, dict):
        raise UserError(f"{where} is a {type(value).__name__}, not an object; {REMEDY}")
    kind = next((kind for key, kind in KINDS.items() if key in value), Answer)
    entry: Entry = convert(value, kind, where)
    if isinstance(entry, Classes) and entry.format != FORMAT:
        raise UserError(f"{where}: format {entry.format}, but this version of ecgmatch_dist reads {FORMAT}")
    return entry
