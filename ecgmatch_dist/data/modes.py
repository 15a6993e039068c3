"""The three ways to read shards for training, side by side: random access, windows through a cache, webdataset's pipeline.

Each is measured in a new process, so that memory is its own. The cache is filled by a web server on this machine, which serves
the same shards. Window and shuffle buffer hold about a quarter of the recordings each, so that neither has more to mix than the
other.
"""

import json
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np

from ecgmatch_dist.data.order import Ints
from ecgmatch_dist.data.store import ShardStore
from ecgmatch_dist.data.stream import Stream
from ecgmatch_dist.data.unlabelled import shards_of_part
from ecgmatch_dist.data.web_stream import WebStream
from ecgmatch_dist.errors import UserError

MODES = ("random access", "windows through a cache", "webdataset's pipeline")
BATCH, MOST_BATCHES = 64, 40


@dataclass(frozen=True)
class Measured:
    """One way to read."""

    mode: str
    first_batch: float
    """Seconds until the first batch, with opening the shards."""
    per_second: float
    """Recordings after that."""
    memory: float
    """Peak MiB beyond the imports."""
    mixing: float
    """Different shards in a batch, relative to what a random draw of all recordings gives: 1 is as good as random."""


def compare_modes(root: Path, database: str) -> list[Measured]:
    """All three, on the shards of a database in the local folder `root`."""
    with served(root) as url, tempfile.TemporaryDirectory(prefix="ecgmatch-cache-") as cache:
        where = dict.fromkeys(MODES, str(root)) | {MODES[1]: url}
        return [in_new_process(place, database, mode, cache) for mode, place in where.items()]


def table(found: list[Measured]) -> list[str]:
    """One line per mode, with a header."""
    header = f"{'':26}{'first batch':>13}{'recordings/s':>14}{'memory':>11}{'mixing':>9}"
    return [header] + [
        f"{m.mode:26}{m.first_batch:>11.2f} s{m.per_second:>14,.0f}{m.memory:>7.0f} MiB{m.mixing:>9.2f}" for m in found
    ]


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """A web server for the folder, on loopback; its URL."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None: ...


def in_new_process(root: str, database: str, mode: str, cache: str) -> Measured:
    command = [sys.executable, "-m", "ecgmatch_dist.data.modes", root, database, mode, cache]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise UserError(f"{mode}: the measurement failed: {result.stderr.strip().splitlines()[-1]}")
    return Measured(**json.loads(result.stdout))


def measure(root: str, database: str, mode: str, cache: str) -> Measured:
    """In the process itself."""
    before, begin = peak_memory(), time.perf_counter()
    store = ShardStore(root, [database], cache=Path(cache))
    rows = np.arange(len(store))
    stream = open_mode(store, rows, mode)
    count = min(MOST_BATCHES, -(-len(rows) // stream.batch))
    batches = stream.iterate(0, count)
    seen = [next(batches).ids]
    first = time.perf_counter()
    seen += [batch.ids for batch in batches]
    rate = (count - 1) * stream.batch / (time.perf_counter() - first)
    mixing = relative_mixing(store.shards_of_rows(rows), seen)
    return Measured(mode, first - begin, rate, max(peak_memory() - before, 0.1), mixing)


def open_mode(store: ShardStore, rows: Ints, mode: str) -> Stream | WebStream:
    batch = max(1, min(BATCH, len(rows) // 4))
    if mode == MODES[0]:
        return Stream(store, rows, batch, 0, 0, 1)
    if mode == MODES[1]:
        return Stream(store, rows, batch, 0, 0, 1, max(1, len(store.shards) // 4))
    return WebStream(shards_of_part(store, rows), store.length, batch, 0, 0, 1, buffer=max(1, len(rows) // 4))


def relative_mixing(shard_of_row: Ints, batches: list[Ints]) -> float:
    """Mean number of different shards in a batch, divided by the expected one of as many random draws."""
    shares = np.unique(shard_of_row, return_counts=True)[1] / len(shard_of_row)
    expected = [np.sum(1 - (1 - shares) ** len(ids)) for ids in batches]
    return float(np.mean([len(np.unique(shard_of_row[ids])) for ids in batches]) / np.mean(expected))


def peak_memory() -> float:
    """MiB that this process has had at most. Not getrusage: its maximum is inherited from the parent process."""
    match = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match
    return int(match[1]) / 1024


if __name__ == "__main__":
    print(json.dumps(asdict(measure(*sys.argv[1:]))))
