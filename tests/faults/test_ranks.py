"""A rank without memory says so, and ends all. A slow rank, or one that is stopped for a while, changes nothing."""

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from ecgmatch_dist.data.stream import Stream
from tests.support.ranks import run_processes
from tests.support.training import assert_same_bits, final_state, run, tiny


def _no_memory() -> None:
    raise MemoryError("Unable to allocate 9 TiB")


def _slow() -> None:
    time.sleep(0.4)


def _stopped() -> None:
    # Waits until the process stands still: a signal to go on that came before the one to stop would be lost.
    me = os.getpid()
    go_on = f"until grep -q '^State:.T' /proc/{me}/status; do sleep 0.1; done; sleep 3; kill -CONT {me}"
    with subprocess.Popen(["sh", "-c", go_on]):
        os.kill(me, signal.SIGSTOP)


def _train(rank: int, world: int, data: Path, runs: Path, way: str) -> None:
    read = Stream._read
    act, steps = {"no memory": (_no_memory, {3}), "slow": (_slow, {*range(12)}), "stopped": (_stopped, {5})}.get(
        way, (_slow, set[int]())
    )

    def disturbed(self: Stream, g: int, pool: Any = None) -> Any:
        if rank == 1 and g in steps:
            act()
        return read(self, g, pool)

    Stream._read = disturbed  # type: ignore[method-assign]
    run(tiny(data, runs, init="scratch"))


@pytest.mark.slow
def test_a_rank_without_memory_says_so_and_ends_all(data: Path, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"UserError: out of memory \(Unable to allocate 9 TiB\): on more ranks"):
        run_processes(2, _train, data, tmp_path, "no memory", timeout=200)


@pytest.mark.slow
def test_a_rank_that_is_slow_or_stopped_for_a_while_changes_nothing(data: Path, tmp_path: Path) -> None:
    states = {}
    for way in ("undisturbed", "slow", "stopped"):
        run_processes(2, _train, data, tmp_path / way, way, timeout=200)
        folder = tmp_path / way / "within-chapman@0.2.s20.ecgmatch"
        assert "lost contact" not in (folder / "log.txt").read_text()
        states[way] = final_state(folder)
    assert_same_bits(states["undisturbed"], states["slow"])
    assert_same_bits(states["undisturbed"], states["stopped"])
