"""What the entries of a journal come to: the standing answer of each reader, the common label, the table for `ecgmatch split`.

A label is 1, 0 or UNKNOWN, as everywhere. A class is unknown where every reader was unsure, where two readers disagree, or
where it was not asked for at the time of the answer.
"""

import csv
import io
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ecgmatch_dist.data.annotations import NOTHING
from ecgmatch_dist.data.labels import NONE, NOT_ANNOTATED, UNKNOWN, LabelScheme
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.files.plain import plain_cell
from ecgmatch_dist.label.journal import Answer, Classes, Entry, Table, Undo

Labels = NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class Given:
    """An answer and the label that it means, uint8 [C]."""

    answer: Answer
    label: Labels
    number: int
    """Of the answer in the journal: later ones have higher numbers."""


COLUMNS = ("recording", "dx", "readers", "at", "seconds", "disagreement")


class Answers:
    """The answers of a journal; a `journal.Follower`."""

    def __init__(self, scheme: LabelScheme, recordings: Collection[str]) -> None:
        check_scheme(scheme)
        self.scheme, self._recordings = scheme, recordings
        self.asked: tuple[str, ...] = ()
        """The classes that the last line of their kind names."""
        self.of_reader: dict[str, dict[str, list[Given]]] = {}
        """Reader -> recording -> answers that were not taken back; the last one counts."""
        self.tables: set[str] = set()
        """Checksums of the tables that were written."""
        self.revision = 0
        """Grows with every answer and every undo."""

    def check(self, entry: Entry) -> None:
        if isinstance(entry, Classes):
            self._check_classes(entry.classes)
        elif isinstance(entry, Answer):
            if entry.recording not in self._recordings:
                raise UserError(f"`{entry.recording}` is not in these shards")
            for name in (*entry.classes, *entry.unsure):
                if name not in self.asked:
                    raise UserError(f"`{name}` is no class of the scheme; known are {', '.join(self.asked)}")
            if both := {*entry.classes} & {*entry.unsure}:
                raise UserError(f"`{min(both)}` is both there and unsure")
            if not entry.reader.strip() or not 0 <= entry.seconds < 1e7:
                raise UserError("an answer needs a reader's name and the seconds that it took")
        elif isinstance(entry, Undo) and not self.of_reader.get(entry.reader, {}).get(entry.undo):
            raise UserError(f"{entry.reader} has no answer on `{entry.undo}` to take back")

    def add(self, entry: Entry) -> None:
        if isinstance(entry, Classes):
            self.asked = entry.classes
        elif isinstance(entry, Answer):
            self.of_reader.setdefault(entry.reader, {}).setdefault(entry.recording, []).append(
                Given(entry, self._encode(entry), self.revision)
            )
            self.revision += 1
        elif isinstance(entry, Undo):
            answers = self.of_reader[entry.reader]
            answers[entry.undo].pop()
            if not answers[entry.undo]:
                del answers[entry.undo]
            self.revision += 1
        elif isinstance(entry, Table):
            self.tables.add(entry.table)

    def _check_classes(self, classes: Sequence[str]) -> None:
        gone = [name for name in classes if name not in self.scheme.short]
        if gone:
            raise UserError(
                f"readers were asked for `{gone[0]}`, which the scheme {self.scheme.name} does not have "
                f"({', '.join(self.scheme.short)}): give the scheme of these answers, or another --to"
            )

    def _encode(self, answer: Answer) -> Labels:
        """uint8 [C]. A class that was not asked for then is unknown."""
        label = np.full(len(self.scheme.short), UNKNOWN, np.uint8)
        for c, name in enumerate(self.scheme.short):
            if name in self.asked and name not in answer.unsure:
                label[c] = name in answer.classes
        return label

    def standing(self, reader: str) -> dict[str, Answer]:
        """Recording -> the reader's answer that counts; in the order of these answers."""
        last = sorted((given[-1] for given in self.of_reader.get(reader, {}).values()), key=lambda given: given.number)
        return {given.answer.recording: given.answer for given in last}

    def label(self, reader: str, recording: str) -> Labels | None:
        """The reader's label of the recording, uint8 [C]; None: no answer."""
        answers = self.of_reader.get(reader, {}).get(recording)
        return answers[-1].label if answers else None

    def readers_of(self, recording: str) -> list[str]:
        return [reader for reader, answers in self.of_reader.items() if recording in answers]

    def answered(self) -> list[str]:
        """Recordings that somebody has answered, in the order of their first answer."""
        first: dict[str, int] = {}
        for answers in self.of_reader.values():
            for recording, given in answers.items():
                first[recording] = min(first.get(recording, given[0].number), given[0].number)
        return sorted(first, key=lambda recording: first[recording])

    def common(self) -> dict[str, Labels]:
        """Recording -> the label that its readers agree on, uint8 [C]."""
        return {recording: merge(self._labels_of(recording)) for recording in self.answered()}

    def _labels_of(self, recording: str) -> list[Labels]:
        found = (self.label(reader, recording) for reader in self.of_reader)
        return [label for label in found if label is not None]

    def table(self) -> str:
        """The label file: any table of labels is read by `ecgmatch split --labels`, this one by its column `dx`."""
        out = io.StringIO()
        rows = csv.writer(out, lineterminator="\n")
        rows.writerow(COLUMNS)
        for recording in sorted(self.answered()):
            labels = self._labels_of(recording)
            last = [self.of_reader[reader][recording][-1].answer for reader in self.readers_of(recording)]
            disputed = [name for c, name in enumerate(self.scheme.short) if disagree([label[c] for label in labels])]
            rows.writerow(
                [
                    recording,
                    self.codes(merge(labels)),
                    plain_cell("|".join(answer.reader for answer in last)),
                    max(answer.at for answer in last),
                    f"{sum(answer.seconds for answer in last):.1f}",
                    "|".join(disputed),
                ]
            )
        return out.getvalue()

    def codes(self, label: Labels) -> str:
        """A cell that `split` reads back as this label: classes that are there, or `none`; `?ST` where nobody knows."""
        if (label == UNKNOWN).all():
            return "unknown"
        there = [name for name, y in zip(self.scheme.short, label, strict=True) if y == 1] or [NONE]
        return "|".join(
            there + [NOT_ANNOTATED + name for name, y in zip(self.scheme.short, label, strict=True) if y == UNKNOWN]
        )


def disagree(states: Sequence[int]) -> bool:
    return {0, 1} <= {*map(int, states)}


def merge(labels: Sequence[Labels]) -> Labels:
    """Labels of several readers [C] -> one: unknown where they disagree, else what those say who are sure."""
    there = np.any([label == 1 for label in labels], 0)
    absent = np.any([label == 0 for label in labels], 0)
    return np.where(there == absent, UNKNOWN, there).astype(np.uint8)


def check_scheme(scheme: LabelScheme) -> None:
    """Each class must be found again by its short name, or the table would say something else than the reader."""
    for c, name in enumerate(scheme.short):
        alone = [int(i == c) for i in range(len(scheme.short))]
        means_nothing = name.casefold() in {NONE, *NOTHING} or set(name) & set(",;|?")
        if means_nothing or scheme.states([name]).tolist() != alone:
            raise UserError(
                f"scheme {scheme.name}: `{name}` cannot be written into a table of labels: it is a code of another class, a "
                "word for nothing, or holds one of , ; | ?; rename the class"
            )
