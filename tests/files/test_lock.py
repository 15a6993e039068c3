"""Locks exclude threads and processes, and a killed holder releases its lock."""

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ecgmatch_dist.errors import UserError
from ecgmatch_dist.files.lock import is_free, locked, only_one

HOLD = """
import pathlib, sys, time
from ecgmatch_dist.files.lock import locked
with locked(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_only_one_holds_it(tmp_path: Path) -> None:
    path = tmp_path / "new" / "lock"
    with only_one(path, "busy"), pytest.raises(UserError, match="busy"), only_one(path, "busy"):
        pass
    with only_one(path, "busy"):
        assert not is_free(path)
    assert is_free(path)


def test_threads_wait_for_each_other(tmp_path: Path) -> None:
    inside = []

    def enter(_: int) -> int:
        with locked(tmp_path / "lock"):
            inside.append(1)
            count = len(inside)
            time.sleep(0.005)
            inside.pop()
        return count

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(enter, range(24))) == {1}


def test_a_killed_process_releases_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        assert not is_free(path)
        process.kill()
        process.wait()
        with locked(path):
            pass


def test_an_error_releases_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="mine"), only_one(tmp_path / "lock", "busy"):
        raise ValueError("mine")
    assert is_free(tmp_path / "lock")
