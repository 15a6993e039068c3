"""A reader's session: the questions, the answers, and the model that grows beside them. Threads may call it at the same time.

Two threads work behind the page: one measures the recordings and then fits a model after every few answers, one writes the
table. The journal is written by the call that answers, so what the page shows as saved is saved.
"""

import hashlib
import math
import statistics
import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ecgmatch_dist.data.assign import all_units
from ecgmatch_dist.data.labels import UNKNOWN, LabelScheme
from ecgmatch_dist.data.segments import recording_of
from ecgmatch_dist.data.store import ShardStore
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.files.atomic import write_text
from ecgmatch_dist.label.answers import Answers, Labels
from ecgmatch_dist.label.chain import Chain, Workshop
from ecgmatch_dist.label.choose import Chooser
from ecgmatch_dist.label.features import Features
from ecgmatch_dist.label.growing import MODELS, Grown, grow
from ecgmatch_dist.label.journal import FORMAT, Answer, Classes, Journal, Table, Undo, now
from ecgmatch_dist.label.space import Space

EVERY = 10
"""Answers between two models."""
PAUSE = 1.0
"""Seconds from an answer to its table: the journal holds the answer anyway."""


@dataclass(frozen=True)
class Question:
    recording: str
    why: str


@dataclass(frozen=True)
class Wishes:
    """What the command was told."""

    reader: str = "reader"
    random: bool = False
    overlap: float = 0.2
    """Share of the questions that another reader has answered already."""
    run: str = ""
    """Features of this run's network choose; empty: ECG measurements."""
    train_every: int = 0
    """Answers between two trainings of the chain; 0: only when the reader asks for it."""


class Session:
    def __init__(
        self,
        shards: str,
        store: ShardStore,
        scheme: LabelScheme,
        to: Path,
        wishes: Wishes,
        workshop: Workshop | None = None,
    ) -> None:
        """`workshop`: where the chain is trained; None: it cannot be trained from here."""
        self.store, self.scheme, self.to, self.wishes = store, scheme, to, wishes
        ids = store.ids()
        first = {recording_of(name): row for row, name in reversed(list(enumerate(ids)))}
        rows = np.array(sorted(first.values()), np.int64)
        self.ids: list[str] = [ids[row] for row in rows]
        """Recordings that may be asked about: of one in several pieces, the first."""
        self.store_rows = rows
        self.row_of = {name: row for row, name in enumerate(self.ids)}
        self.answers = Answers(scheme, self.row_of)
        self.lock = threading.RLock()
        self._wake, self._stop = threading.Condition(self.lock), threading.Event()
        self.journal = Journal(to.with_name(f"{to.name}.journal"), self.answers)
        if self.answers.asked != scheme.short:
            self.journal.append(Classes(FORMAT, scheme.short))
        self.warning = self.journal.warning
        self._check_table()
        self.features = Features(to.with_name(f"{to.name}.features"), shards, store, rows, wishes.run)
        log = to.with_name(f"{to.name}.training.log")
        self.chain = Chain(workshop, store, scheme, to.stem, log) if workshop else None
        self._trained_at = max((one.answers for one in self.chain.reached()), default=0) if self.chain else 0
        self.chooser: Chooser | None = None
        self.grown: Grown | None = None
        self.checking = False
        self._current: Question | None = None
        self._ahead: list[Question] = []
        """What comes after the question on the screen: put back unanswered, or chosen while its reader looks at it."""
        self._written = -1
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._learn, self._keep_table)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """Stop the threads, and write the table a last time."""
        self._stop.set()
        if self.chain:
            self.chain.end()
        with self.lock:
            self._wake.notify_all()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()
        self.write_table()

    # Questions and answers

    def question(self) -> Question | None:
        """What to ask next; the same until it is answered. None: everything is answered."""
        with self.lock:
            self.journal.catch_up()
            mine = self.answers.of_reader.get(self.wishes.reader, {})
            if self._current is None or (self._current.recording in mine and self._current.why != "check"):
                self._current = self._next_doubt() or self._next_ahead() or self._choose()
            return self._current

    def look_ahead(self) -> Question | None:
        """What comes after the question on the screen. To be called while its reader looks at it, so that nobody waits."""
        with self.lock:
            if not self._ahead and self._current is not None and not self.checking:
                found = self._choose(self._current.recording)
                self._ahead = [found] if found else []
            return self._ahead[0] if self._ahead else None

    def _next_doubt(self) -> Question | None:
        doubts = self.doubts() if self.checking else []
        self.checking = bool(doubts)
        return Question(doubts[0], "check") if doubts else None

    def _next_ahead(self) -> Question | None:
        """The first that nobody has answered in the meantime."""
        while self._ahead:
            found = self._ahead.pop(0)
            readers = self.answers.readers_of(found.recording)
            if self.wishes.reader not in readers and (not readers or found.why == "second reader"):
                return found
        return None

    def _put_back(self) -> None:
        """The question on the screen gives way to another one, and comes after it."""
        if self._current is not None and self._current.why != "check":
            self._ahead.insert(0, self._current)
        self._current = None

    def _choose(self, asked: str = "") -> Question | None:
        """`asked`: the recording on the screen, which counts as answered."""
        mine = {*self.answers.of_reader.get(self.wishes.reader, {}), asked} - {""}
        answered = self.answers.answered()
        others = [name for name in answered if name not in mine]
        if others and self._second_reading_is_due(len(mine)):
            return Question(others[0], "second reader")
        if self.chooser is not None:
            for name in {*answered, *mine}:
                self.chooser.take(self.row_of[name])
            found = self.chooser.next(random=self.wishes.random)
            row, why = found if found else (-1, "")
        else:  # nothing is known of the recordings yet: the order in which they are measured is random
            gone = {*answered, *mine}
            row, why = next((int(row) for row in self.features.order if self.ids[row] not in gone), -1), "random"
        if row >= 0:
            return Question(self.ids[row], why)
        return Question(others[0], "second reader") if others else None

    def _second_reading_is_due(self, answered: int) -> bool:
        share = self.wishes.overlap
        return math.floor((answered + 1) * share) > math.floor(answered * share)

    def answer(self, recording: str, classes: list[str], unsure: list[str], seconds: float, why: str) -> None:
        """Save an answer. When this returns, it is on the disk."""
        known = [name for name in self.scheme.short if name in classes or name in unsure]
        if len(known) != len({*classes, *unsure}):
            raise UserError(f"{', '.join(sorted({*classes, *unsure} - {*known}))}: no class of the scheme")
        normal = None if self.scheme.normal is None else self.scheme.short[self.scheme.normal]
        if normal in classes and len(classes) > 1:
            raise UserError(f"{normal} cannot be beside another class")
        yes, open_ = (tuple(name for name in self.scheme.short if name in some) for some in (classes, unsure))
        with self.lock:
            entry = Answer(recording, self.wishes.reader, now(), round(seconds, 1), yes, open_, why)
            self.journal.append(entry)
            if self._current and self._current.recording == recording:
                self._current = None
            self._wake.notify_all()
            every, answered = self.wishes.train_every, len(self.answers.answered())
            if self.chain and every and answered - self._trained_at >= every and not self.chain.state.running:
                self.train()

    def undo(self) -> str:
        """Take the reader's last answer back and ask about its recording again."""
        with self.lock:
            standing = self.answers.standing(self.wishes.reader)
            if not standing:
                raise UserError("there is no answer to take back")
            recording, last = list(standing.items())[-1]
            self.journal.append(Undo(recording, self.wishes.reader, now()))
            self._put_back()
            self._current = Question(recording, last.why)
            self._wake.notify_all()
            return recording

    def check(self) -> int:
        """Ask next about the labels that the model doubts; how many these are."""
        with self.lock:
            self.checking = True
            self._put_back()
            return len(self.doubts())

    def history(self) -> list[str]:
        """Recordings that the reader has answered, the last one last."""
        return list(self.answers.standing(self.wishes.reader))

    def train(self) -> None:
        """Train the chain on all answers, in the background."""
        if self.chain is None:
            raise UserError("no preset is meant for these shards; build them with `ecgmatch shards build --preset cpu`")
        with self.lock:
            self.chain.start(self.answers.table())
            self._trained_at = len(self.answers.answered())

    # What the model says

    def doubts(self) -> list[str]:
        """Recordings whose label the model doubts and that this reader has answered, but not looked at twice."""
        if self.grown is None:
            return []
        standing = self.answers.standing(self.wishes.reader)
        names = (self._order[doubt.row] for doubt in self.grown.doubts)
        return [name for name in names if name in standing and standing[name].why != "check"]

    def alike(self, recording: str, count: int = 3) -> list[tuple[str, float, Labels]]:
        """The most similar answered recordings: name, distance (1: as far as a recording usually is from its nearest),
        label."""
        with self.lock:
            common = self.answers.common()
            if self.chooser is None or recording not in self.row_of:
                return []
            rows = np.array([self.row_of[name] for name in common if name != recording], np.int64)
            nearest = self.chooser.space.nearest(self.row_of[recording], rows, count)
            return [(self.ids[row], away, common[self.ids[row]]) for row, away in nearest]

    def seconds(self) -> float:
        """The median time of the reader's answers."""
        times = [answer.seconds for answer in self.answers.standing(self.wishes.reader).values()]
        return statistics.median(times) if times else 0.0

    # Behind the page

    _order: list[str]
    """Names of the recordings that the model has learnt from."""

    def _learn(self) -> None:
        self.features.measure(self._stop)
        if self._stop.is_set():
            return
        values = self.features.all()
        space = Space(values)
        with self.lock:
            self.chooser = Chooser(space, all_units(self.store)[self.store_rows])
        learnt = -EVERY
        while not self._stop.is_set():
            with self.lock:
                common = self.answers.common()
                if abs(len(common) - learnt) < EVERY and not self._wake.wait(timeout=5):
                    continue
                common = self.answers.common()
                if abs(len(common) - learnt) < EVERY:
                    continue
            learnt = len(common)
            if common:
                self._fit(values, common)

    def _fit(self, values: "np.ndarray[tuple[int, int], np.dtype[np.float32]]", common: dict[str, Labels]) -> None:
        labels = np.stack([*common.values()])
        if not (labels != UNKNOWN).any():
            return
        rows = np.array([self.row_of[name] for name in common], np.int64)
        grown = grow(values, rows, labels, models=tuple(MODELS) if self.wishes.run else ("forest",))
        with self.lock:
            assert self.chooser is not None
            self.chooser.learn(grown.probabilities, labels)
            self.grown, self._order = grown, list(common)
            # What was put back stays; what the model before has chosen is chosen anew.
            self._ahead = [one for one in self._ahead if self.chooser.taken[self.row_of[one.recording]]]
            self.look_ahead()

    def _keep_table(self) -> None:
        while not self._stop.is_set():
            with self.lock:
                if self._written == self.answers.revision:
                    self._wake.wait(timeout=5)
                    continue
            self._stop.wait(PAUSE)  # the answer that woke us is still to be told, and the next question to be asked
            try:
                self.write_table()
            except (UserError, OSError) as error:
                self.warning = str(error)
                self._stop.wait(5)

    def write_table(self) -> None:
        """Write labels.csv from the answers, unless somebody else has changed it."""
        with self.lock:
            self.journal.catch_up()
            revision, text = self.answers.revision, self.answers.table()
            self._check_table()
            digest = hashlib.sha256(text.encode()).hexdigest()
            if digest not in self.answers.tables:  # before the file: a kill between them must not look like a hand
                self.journal.append(Table(digest))
        write_text(self.to, text)  # nobody waits for the disk
        self._written = revision

    def _check_table(self) -> None:
        if not self.to.is_file():
            return
        if hashlib.sha256(self.to.read_bytes()).hexdigest() not in self.answers.tables:
            what = "was changed by hand or by another program" if self.answers.tables else "is there already"
            raise UserError(
                f"{self.to}: it {what} and would be overwritten; the answers are safe in {self.journal.path.name}. Rename it "
                "(ecgmatch split --labels takes it under any name), or give another --to"
            )
