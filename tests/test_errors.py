"""Errors of disk and memory in one line."""

import errno
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from ecgmatch_dist.config import Evaluate
from ecgmatch_dist.errors import UserError, ending, file_sentence, memory_sentence
from ecgmatch_dist.files.atomic import write_atomic
from tests.support.training import run, tiny


def test_real_errors_of_memory_are_known() -> None:
    for ask in (lambda: np.empty(10**15), lambda: torch.empty(10**15), lambda: bytearray(10**17)):
        with pytest.raises((MemoryError, RuntimeError)) as caught:
            ask()
        sentence = memory_sentence(caught.value)
        assert sentence is not None
        assert sentence.startswith("out of memory")
        assert "\n" not in sentence
    assert memory_sentence(MemoryError()) == "out of memory"
    assert memory_sentence(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.")) is not None
    for text in (
        "CUDA error: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    ):
        assert memory_sentence(RuntimeError(text)) == f"out of memory ({text})"
    assert memory_sentence(RuntimeError("CUDA error: an illegal memory access was encountered")) is None
    assert memory_sentence(RuntimeError("shape mismatch")) is None


def test_a_run_that_needs_too_much_memory_says_what_to_change(data: Path, tmp_path: Path) -> None:
    config = tiny(data, tmp_path, init="scratch")
    with pytest.raises(UserError, match=r"^out of memory .*: on more ranks.* goes on .*; smaller evaluate\.batch"):
        run(replace(config, evaluate=Evaluate(every=4, batch=10**10)))


def test_a_command_without_memory_is_one_line() -> None:
    code = "from ecgmatch_dist import cli; cli.resolve = lambda args: ('', lambda: bytearray(10**17), []); cli.main()"
    done = subprocess.run([sys.executable, "-c", code, "report"], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines() == [
        "ecgmatch: out of memory: end other programs, or take a larger machine; the same command continues where it stopped"
    ]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE])
def test_an_error_of_the_disk_names_the_file_and_not_what_stands_for_it(tmp_path: Path, number: int) -> None:
    def fail(temporary: Path) -> None:
        raise OSError(number, "sorry", str(temporary) if number != errno.EIO else None)

    with pytest.raises(OSError, match="sorry") as caught:
        write_atomic(tmp_path / "table.csv", fail)
    sentence = file_sentence(caught.value)
    assert sentence == f"{tmp_path}/table.csv: sorry; make room or repair the disk, then give the same command again"


def test_too_many_open_files_are_one_line() -> None:
    """Python names no file there: it was a traceback."""
    limit = "import os, resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))"
    code = f"{limit}; from ecgmatch_dist import cli; cli.resolve = lambda args: ('', OPEN, []); cli.main()"
    done = subprocess.run(
        [sys.executable, "-c", code.replace("OPEN", "lambda: [os.pipe() for _ in range(99)]"), "x"],
        capture_output=True,
        text=True,
        check=False,
    )
    remedy = "allow more of them (ulimit -n 4096), then give the same command again"
    assert (done.returncode, done.stderr) == (1, f"ecgmatch: Too many open files; {remedy}\n")


def test_how_a_rank_ends() -> None:
    assert ending(UserError("no"), rank=3) == ("ecgmatch (rank 3): no", 1)
    assert ending(OSError(errno.ENOSPC, "full", "x.tar"), rank=2) == (
        "ecgmatch (rank 2): x.tar: full; make room or repair the disk, then give the same command again",
        1,
    )
    assert ending(BrokenPipeError(errno.EPIPE, "Broken pipe")) == ("", 128 + signal.SIGPIPE)
    assert ending(ValueError("a fault of the program")) is None
    assert ending(ConnectionResetError(errno.ECONNRESET, "peer")) is None  # of a rank that is lost: see heartbeat.py
