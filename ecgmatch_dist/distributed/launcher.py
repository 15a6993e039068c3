"""Starting ranks on this machine, and telling torchrun why one has ended."""

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from ecgmatch_dist.errors import ending
from ecgmatch_dist.files.plain import plain_lines


def tell_launcher(line: str) -> None:
    """Write the error where torchrun looks for it: its long summary then ends in our line. Without torchrun, nothing."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        error = {"message": line, "extraInfo": {"timestamp": str(int(time.time()))}}
        with suppress(OSError):
            Path(path).write_text(json.dumps({"message": error}), encoding="utf-8")


def end_rank(error: BaseException, rank: int, leave: Callable[[int], None] = sys.exit) -> None:
    """Tell an error that a user can mend in one line, also to the launcher, and leave. Another error: returns."""
    if end := ending(error, rank):
        if end.line and not isinstance(error, KeyboardInterrupt):  # that one the launcher tells, once for all ranks
            sys.stderr.write(f"{plain_lines(end.line)}\n")  # at once: another rank may write its own in between
            tell_launcher(end.line)
        leave(end.code)


def start_ranks(ranks: int, module: str, args: Sequence[str]) -> None:
    """What `torchrun --standalone --nproc-per-node RANKS -m MODULE ARGS` does, without its 48 lines after an error: the rank
    that failed has already said why."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)
    os.environ.setdefault(
        "OMP_NUM_THREADS", "1"
    )  # torchrun would set it with a warning; the run chooses its own threads
    command = ["--standalone", f"--nproc-per-node={ranks}", "-m", module, *args]
    try:
        run.run(run.parse_args(command))  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        # torchrun ends the others by a signal, and may take one of them for the first: a code that a rank chose tells more.
        code = max(failure.exitcode for failure in error.failures.values())
        sys.exit(code if code > 0 else 128 - code)
    except SignalException as signal:
        sys.exit(128 + int(signal.sigval))
