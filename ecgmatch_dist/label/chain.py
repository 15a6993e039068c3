"""The chain of the preset, trained beside the page on what has been answered: a model to use, then its MAP by cross-validation.

Splits and run folders are ordinary, `ecgmatch report runs` shows them. Training is a process of its own with a low priority.
It ends with the page, at a checkpoint; the same answers go on from there. What has been reached is read from the run folders.
"""

import hashlib
import multiprocessing
import os
import re
import runpy
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ecgmatch_dist.data.assign import Protocol, all_units
from ecgmatch_dist.data.label_file import read_label_file
from ecgmatch_dist.data.labels import LabelScheme, known
from ecgmatch_dist.data.make_split import make_split
from ecgmatch_dist.data.processes import end_with_parent
from ecgmatch_dist.data.split_file import labels_of
from ecgmatch_dist.data.store import ShardStore
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.files.atomic import write_text
from ecgmatch_dist.files.lock import only_one
from ecgmatch_dist.forecast import Range
from ecgmatch_dist.label.growing import map_interval
from ecgmatch_dist.record.predictions import predictions_file, read_predictions

FOLDS = 3
LEAST = 20
"""Answers; with fewer the chain learns nothing."""
PATIENCE = 30.0
"""Seconds that a run has for its checkpoint when it is asked to stop."""


@dataclass(frozen=True)
class Workshop:
    """Where training reads and writes. `options`: of `ecgmatch train`, such as --preset few_labels."""

    shards: str
    scheme: str
    options: tuple[str, ...] = ()
    splits: Path = Path("splits")
    runs: Path = Path("runs")
    seed: int = 20
    nice: int = 15
    """How much other programs go before it."""


@dataclass(frozen=True)
class Reached:
    """What a chain has come to."""

    answers: int
    run: str
    """The folder of the model to use."""
    map: Range | None
    """By cross-validation, when all its runs are finished."""


@dataclass
class State:
    """Of the training under way, for the page."""

    running: bool = False
    step: str = ""
    error: str = field(default="")


class Chain:
    """One training at a time. `name` begins the names of its splits and runs."""

    def __init__(self, place: Workshop, store: ShardStore, rule: LabelScheme, name: str, log: Path) -> None:
        self.place, self.store, self.rule, self.log = place, store, rule, log
        self.name = re.sub(r"[^\w-]", "_", name)
        self.state = State()
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._known: dict[str, Range] = {}
        """MAP of cross-validations that were read already."""

    def start(self, table: str) -> None:
        """Train on a table of labels, in the background."""
        if self.state.running:
            raise UserError("a training is under way; stop it first")
        count = table.count("\n") - 1
        if count < LEAST:
            raise UserError(f"{count} answers: training begins with {LEAST}")
        self._stop.clear()
        self.state = State(running=True, step="making the splits")
        self._thread = threading.Thread(target=self._work, args=(table, count), daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Stop what is under way; it keeps its last checkpoint."""
        self._stop.set()
        if self._thread:
            self._thread.join()

    def last_line(self) -> str:
        """What the training has printed last."""
        if not self.state.running or not self.log.is_file():
            return ""
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - 1000))
            lines = file.read().decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")

    def reached(self) -> list[Reached]:
        """All finished models of this table of labels, in the order of their answers."""
        found = []
        for result in self.place.runs.glob(f"{self.name}-*/result.json"):
            match = re.fullmatch(re.escape(self.name) + r"-(\d+)-([0-9a-f]{6})(\..+)", result.parent.name)
            if match and ".supervised" not in match[3]:
                folds = [result.parent.with_name(f"{self.name}-{match[1]}-{match[2]}{end}{match[3]}") for end in ENDS]
                found.append(Reached(int(match[1]), str(result.parent), self._pooled(result.parent.name, folds)))
        return sorted(found, key=lambda one: one.answers)

    def _pooled(self, run: str, folds: list[Path]) -> Range | None:
        """MAP of every answered recording, each predicted by a run that has not seen it."""
        if run not in self._known and all((folder / "result.json").is_file() for folder in folds):
            parts = [read_predictions(predictions_file(folder, "test")) for folder in folds]
            labels, p = np.concatenate([a.labels for a in parts]), np.concatenate([a.probabilities for a in parts])
            self._known[run] = map_interval(labels, p, seed=0)
        return self._known.get(run)

    def _work(self, table: str, count: int) -> None:
        busy = "another reader is training from these labels; one at a time"
        try:
            with only_one(self.log.with_name(f"{self.log.name}.lock"), busy):
                names = self._splits(table, count)
                for number, name in enumerate(names):
                    kind = f"cross-validation, {number} of {FOLDS}" if number else "the model"
                    self.state.step = f"{count} answers, run {number + 1} of {len(names)} ({kind})"
                    self._train(self.place.splits / f"{name}.json")
        except (UserError, OSError) as error:
            self.state.error = "" if self._stop.is_set() else str(error)
        finally:
            self.state.running = False

    def _splits(self, table: str, count: int) -> list[str]:
        """The split of the model, and of its cross-validation: each is tested on a part of the answers, by patients."""
        name = f"{self.name}-{count}-{hashlib.sha256(table.encode()).hexdigest()[:6]}"
        labels = self.place.splits / f"{name}.csv"
        labels.parent.mkdir(parents=True, exist_ok=True)
        write_text(labels, table)
        file = read_label_file(labels, self.store.ids(), self.rule)
        scheme, seed = self.place.scheme, self.place.seed
        protocol: Protocol = "within" if len(self.store.databases) == 1 else "mix"
        splits = [make_split(self.store, protocol, 1.0, seed, scheme, labels=file, name=name)]
        rows = np.flatnonzero(known(labels_of(self.store, scheme, file.codes)))
        patient = np.unique(all_units(self.store)[rows], return_inverse=True)[1]
        fold = (np.random.default_rng(seed).permutation(patient.max() + 1) % FOLDS)[patient]
        for k, end in enumerate(ENDS):
            lists = {"labelled": self.store.ids(rows[fold != k]), "test": self.store.ids(rows[fold == k])}
            splits.append(
                make_split(self.store, "given", 1.0, seed, scheme, labels=file, listed=lists, name=name + end)
            )
        for split in splits:
            split.save(self.place.splits / f"{split.name}.json")
        return [split.name for split in splits]

    def _train(self, split: Path) -> None:
        words = ["train", "--split", str(split), "--shards", self.place.shards, "--runs", str(self.place.runs)]
        process = multiprocessing.get_context("spawn").Process(
            target=_command, args=([*words, *self.place.options], self.log, self.place.nice)
        )
        process.start()
        while process.is_alive() and not self._stop.wait(0.2):
            pass
        if process.is_alive():
            process.terminate()
            process.join(PATIENCE)
            process.kill()
        process.join()
        if process.exitcode:
            raise UserError(f"training ended: {self.last_line()} (all of it: {self.log})")
        if self._stop.is_set():
            raise UserError("stopped")


ENDS = tuple(f"-fold{k}" for k in range(1, FOLDS + 1))


def _command(words: list[str], log: Path, nice: int) -> None:
    """In a process of its own: an `ecgmatch` command whose output goes to a file. It ends with the page."""
    threading.Thread(target=end_with_parent, daemon=True).start()
    os.nice(nice)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.argv = ["ecgmatch", *words]
    runpy.run_module("ecgmatch_dist", run_name="__main__")
