"""Files -> inputs of the network, read and preprocessed in parallel processes, in order, a bounded number ahead."""

import multiprocessing
import os
import signal
import threading
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from difflib import get_close_matches

from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from ecgmatch_dist.data.formats.arrays import EXAMPLE
from ecgmatch_dist.data.formats.leads import LEADS, lead_of
from ecgmatch_dist.data.formats.read import read
from ecgmatch_dist.data.formats.recording import Recording, RecordRef, Rejected
from ecgmatch_dist.data.formats.wfdb_record import header_of
from ecgmatch_dist.data.processes import end_with_parent
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.predict.checksum import wrong_checksums
from ecgmatch_dist.predict.prepare import Inputs, Prepared, prepare
from ecgmatch_dist.predict.result import Failure, Prediction

CHUNK = 8  # recordings that a process takes at once
NO_LEAD = "-"
MEANT = 0.5  # a name that is so much like a lead's was meant to be it
FEW = 64  # recordings that are read before another process would have started


@dataclass(frozen=True)
class Reader:
    """Reads a recording and prepares it. `rate`, `unit` and `leads`: what files do not say themselves."""

    inputs: Inputs
    rate: float | None = None
    unit: str = ""
    leads: tuple[str, ...] = ()

    def read(self, ref: RecordRef) -> Recording:
        """Raises Rejected, or UserError where a library is missing."""
        recording = read(ref, rate=self.rate, unit=self.unit, leads=self.leads)
        header = header_of(ref.path)
        wrong = wrong_checksums(header) if header.is_file() else ()
        return replace(recording, flags=(*recording.flags, *(f"checksum:{lead}" for lead in wrong)))

    def __call__(self, ref: RecordRef) -> Prepared | Failure:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of libraries about damaged files: the answer has flags and a reason
                return prepare(self.read(ref), self.inputs, label(ref))
        except (Rejected, UserError) as error:
            gone = not os.path.exists(ref.path) and not os.path.exists(header_of(ref.path))  # never raises
            return Failure(label(ref), "No such file" if gone else one_sentence(str(error)))
        except Exception as error:  # one strange file must not end the work on 100,000
            return Failure(label(ref), f"unreadable: {type(error).__name__}: {error}")

    def several(self, refs: Sequence[RecordRef]) -> list[Prepared | Failure]:
        return [self(ref) for ref in refs]


def label(ref: RecordRef) -> str:
    """The name of a recording in tables: its file, and `#3` for the third of those that one file holds."""
    return str(ref.path) if ref.item is None else f"{ref.path}#{ref.item}"


def lead_names(text: str) -> tuple[str, ...]:
    """Names of leads in one text. Refuses what is no lead: the lead that was meant would be a flat line."""
    names = tuple(text.replace(",", " ").split())
    for name in names:
        if lead_of(name) is None and name != NO_LEAD:
            near = get_close_matches(name.upper(), LEADS, 1, MEANT)
            meant = f"; did you mean {near[0]}?" if near else ""
            raise UserError(
                f"leads: {name} is none of {' '.join(LEADS)}, nor {NO_LEAD} for a column of something else{meant}"
            )
    return names


def one_sentence(error: str) -> str:
    """`does not say A or say B`: without the second verb."""
    what, mark, rest = error.partition("the file does not ")
    said, name, remedy = rest.partition("; name ")
    first, *others = said.split(" or say ")
    link = " or say " if first.startswith("name ") else " or "
    return what + mark + (f"{first}{link}{' or '.join(others)}" if others else first) + name + remedy


def as_options(answer: Prediction | Failure) -> Prediction | Failure:
    """A failure of `ecgmatch predict`: what the file does not say is said by options, not by the keys of a recipe."""
    if isinstance(answer, Prediction) or "the file does not " not in answer.error:
        return answer
    error = answer.error.replace(f"leads = [{EXAMPLE}]", f"--leads '{' '.join(LEADS)}'")
    error = error.replace("rate = 500", "--rate 500").replace('unit = "mV" or "uV"', "--unit mV or --unit uV")
    return replace(answer, error=error)


def read_all(refs: Sequence[RecordRef], reader: Reader, workers: int) -> Iterator[Prepared | Failure]:
    """All recordings in the order of `refs`, by `workers` processes; a few are read by this one. At most three chunks per
    process wait for the network, so memory does not grow with their number."""
    if workers < 1:
        raise UserError(f"workers = {workers}: at least 1")
    if workers == 1 or len(refs) <= FEW:
        yield from map(reader, refs)
        return
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])  # imported once, not by each process
    chunks = (refs[start : start + CHUNK] for start in range(0, len(refs), CHUNK))
    waiting: deque[Future[list[Prepared | Failure]]] = deque()
    with ProcessPoolExecutor(workers, context, _start) as pool:
        try:
            for chunk in chunks:
                waiting.append(pool.submit(reader.several, chunk))
                if len(waiting) > 3 * workers:
                    yield from waiting.popleft().result()
            while waiting:
                yield from waiting.popleft().result()
        except BrokenProcessPool:
            raise UserError(
                "a reading process has ended: out of memory (try fewer workers; the same command continues where it stopped), "
                'or started by a script that lacks `if __name__ == "__main__":`'
            ) from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _start() -> None:
    """In a reading process: it ends with Ctrl-C, without a traceback, and with the process that started it. One thread each:
    there is a process per core."""
    threadpool_limits(1)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    threading.Thread(target=end_with_parent, daemon=True).start()
