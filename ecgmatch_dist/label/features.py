"""Features of all recordings, measured beside the person who labels, and kept: `labels.csv.features`.

ECG measurements, by processes of their own, or the features of a run's network. The file is one line of JSON, then float32 rows
in a random order, appended as they are made: after a kill the same command goes on where it was, and the first rows are a fair
sample of all recordings. It may be deleted at any time.
"""

import hashlib
import json
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ecgmatch_dist.config import OPINION
from ecgmatch_dist.data.processes import end_with_parent
from ecgmatch_dist.data.store import ShardStore
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.measurements.measure import measure_all

if TYPE_CHECKING:
    from ecgmatch_dist.predict.model import Predictor

FORMAT = 1
MOST = 10_000  # features of a recording
CHUNK = 64  # recordings that a process measures at a time
Rows = NDArray[np.int64]
Points = NDArray[np.float32]


class Features:
    """Rows of numbers of the recordings `rows` of a store. `order` [N]: in which order they are measured."""

    def __init__(self, path: Path, shards: str, store: ShardStore, rows: Rows, run: str = "") -> None:
        """`run`: a run folder whose network gives the features; empty: ECG measurements."""
        self.path, self.shards, self.store, self.rows, self.run = path, shards, store, rows, run
        self.order = np.random.default_rng(0).permutation(len(rows))
        self.done = 0
        self._values: Points | None = None
        self._key = self._identity()
        self._read()

    @property
    def complete(self) -> bool:
        return self.done == len(self.rows)

    def all(self) -> Points:
        """[N, F], row by row as in `rows`, when all are measured."""
        assert self._values is not None
        assert self.complete
        return self._values

    def measured(self) -> Rows:
        """Rows that are measured already."""
        return self.order[: self.done]

    def measure(self, stop: threading.Event, tell: Callable[[int], None] = lambda done: None) -> None:
        """Measure what is missing; ends early when `stop` is set."""
        if self.complete:
            return
        chunks = [self.order[at : at + CHUNK] for at in range(self.done, len(self.rows), CHUNK)]
        with self.path.open("ab") as file:
            made = self._by_network(chunks) if self.run else self._by_hand(chunks)
            for chunk, values in zip(chunks, made, strict=True):
                if stop.is_set():
                    return
                if self.done == 0:
                    head = {"format": FORMAT, "of": self._key, "columns": values.shape[1]}
                    file.write(json.dumps(head).encode() + b"\n")
                file.write(np.ascontiguousarray(values, "<f4").tobytes())
                file.flush()
                self._keep(chunk, values)
                tell(self.done)

    def _by_hand(self, chunks: list[Rows]) -> Iterator[Points]:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        workers = max(1, (os.cpu_count() or 2) - 1)
        start = (self.shards, self.store.databases)
        with ProcessPoolExecutor(workers, context, _open_store, start) as pool:
            waiting = [pool.submit(_measure, self.rows[chunk]) for chunk in chunks[: 2 * workers]]
            try:
                for number in range(len(chunks)):
                    yield waiting.pop(0).result()
                    if number + 2 * workers < len(chunks):
                        waiting.append(pool.submit(_measure, self.rows[chunks[number + 2 * workers]]))
            finally:
                for future in waiting:
                    future.cancel()

    def _by_network(self, chunks: list[Rows]) -> Iterator[Points]:
        model = self._network()
        if self.store.preprocess != model.inputs.preprocess:
            raise UserError(f"{self.run}: trained on shards of another preprocessing than {self.shards}")
        for chunk in chunks:
            yield np.asarray(model.forward(self.store.read(self.rows[chunk]))[0], np.float32)

    def _network(self) -> "Predictor":
        from ecgmatch_dist.predict.model import Predictor  # torch takes seconds to import

        return Predictor(self.run)

    def _keep(self, chunk: Rows, values: Points) -> None:
        if self._values is None:
            self._values = np.zeros((len(self.rows), values.shape[1]), np.float32)
        self._values[chunk] = values
        self.done += len(chunk)

    def _identity(self) -> str:
        """What the file belongs to: these recordings, measured like this."""
        manifests = [self.store.datasets[name].manifest_sha256 for name in self.store.databases]
        weights = [str(self._network().weights.stat().st_mtime_ns)] if self.run else []
        parts = [*self.store.databases, *manifests, str(len(self.rows)), self.run, *(weights or [str(OPINION)])]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def _read(self) -> None:
        """Take the rows that an earlier start has measured. A file of something else is begun anew."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            with self.path.open("rb") as file:
                line = file.readline(4096)
                head = json.loads(line)
                columns = int(head["columns"])
                fits = (head["format"], head["of"]) == (FORMAT, self._key) and 0 < columns < MOST
                content = file.read(4 * columns * len(self.rows)) if fits else b""
            whole = len(content) // (4 * columns)
            values = np.frombuffer(content, "<f4", whole * columns).reshape(whole, columns)
            if whole and np.isfinite(values).all():
                self._keep(self.order[:whole], values)
                os.truncate(self.path, len(line) + values.nbytes)  # without a row that a kill has cut
                return
        self.path.unlink(missing_ok=True)


_store: ShardStore
"""In a measuring process."""


def _open_store(shards: str, databases: tuple[str, ...]) -> None:
    global _store
    _store = ShardStore(shards, databases)
    os.nice(5)  # the page answers first
    threading.Thread(target=end_with_parent, daemon=True).start()


def _measure(rows: Rows) -> Points:
    return measure_all(_store.read(rows), _store.rate)
