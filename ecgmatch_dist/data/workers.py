"""Building many shards in parallel processes, with progress."""

import multiprocessing
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.sharedctypes import Synchronized

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from ecgmatch_dist.data.processes import end_with_parent
from ecgmatch_dist.data.shard import BuiltShard, ShardJob, build_shard
from ecgmatch_dist.errors import UserError


def build_shards(jobs: Sequence[ShardJob], workers: int) -> list[BuiltShard]:
    """Run all jobs in `workers` processes (1: in this one). Shows a progress bar on a terminal, else one line per shard."""
    with _progress_bar(jobs) as bar:
        if workers == 1:
            return [_report(build_shard(job, bar.advance)) for job in jobs]
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([build_shard.__module__])  # imported once, not by each worker
        done = context.Value("q", 0)
        shards: dict[int, BuiltShard] = {}
        with ProcessPoolExecutor(workers, context, _start_worker, (done,)) as pool:
            futures = {pool.submit(_build_in_worker, job): job.number for job in jobs}
            try:
                while futures:
                    for future in wait(futures, timeout=0.25, return_when=FIRST_COMPLETED).done:
                        shards[futures.pop(future)] = _report(future.result())
                    bar.show(done.value)
            except BrokenProcessPool:
                raise UserError(
                    "a worker process was killed (out of memory?): try fewer --workers; "
                    "the same command continues where it stopped"
                ) from None
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return [shards[job.number] for job in jobs]


_done: "Synchronized[int]"
"""In a worker process: the number of recordings done by all workers, shared with the parent."""


def _start_worker(done: "Synchronized[int]") -> None:
    global _done
    _done = done
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a worker at once, without a traceback
    threading.Thread(target=end_with_parent, daemon=True).start()


def _build_in_worker(job: ShardJob) -> BuiltShard:
    return build_shard(job, _count_done)


def _count_done(count: int) -> None:
    with _done.get_lock():
        _done.value += count


def _report(shard: BuiltShard) -> BuiltShard:
    if not sys.stderr.isatty():
        print(f"{shard.name}: {shard.recordings} kept, {shard.rejected} rejected", file=sys.stderr)
    return shard


class _Bar:
    """Recordings done and the estimated time left."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress, self._task = progress, task

    def advance(self, count: int) -> None:
        self._progress.advance(self._task, count)

    def show(self, done: int) -> None:
        self._progress.update(self._task, completed=done)


@contextmanager
def _progress_bar(jobs: Sequence[ShardJob]) -> Iterator[_Bar]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        yield _Bar(progress, progress.add_task(jobs[0].database, total=sum(len(job.refs) for job in jobs)))
