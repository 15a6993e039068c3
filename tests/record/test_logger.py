"""The bar of a run."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from ecgmatch_dist.record import logger as logger_module
from ecgmatch_dist.record.logger import RunLogger
from ecgmatch_dist.recovery.generations import Fence


def test_the_bar_moves_with_every_step(tmp_path: Path) -> None:
    """Numbers come every few steps; where a step takes long, the bar would seem to stand still until then."""
    logger = RunLogger(tmp_path, active=True, steps=9, fence=Fence.acquire(tmp_path))
    logger.console = Console(file=io.StringIO(), force_terminal=True, width=80)
    logger.start(2)
    assert logger.bar
    logger.moved(3)
    assert (logger.bar.tasks[0].completed, logger.bar.tasks[0].total) == (3, 9)
    logger.close()


def test_without_a_terminal_there_is_none(tmp_path: Path) -> None:
    logger = RunLogger(tmp_path, active=True, steps=9, fence=Fence.acquire(tmp_path))
    logger.console = Console(file=io.StringIO())
    logger.start(0)
    logger.moved(1)
    assert logger.bar is None
    logger.close()


def test_the_time_left_does_not_count_what_the_first_step_prepares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first step fills the bank, which may take minutes: the other steps do not."""
    now = [1000.0]
    monkeypatch.setattr(logger_module.time, "monotonic", lambda: now[0])
    logger = RunLogger(tmp_path, active=True, steps=100, fence=Fence.acquire(tmp_path))
    logger.console = Console(file=(printed := io.StringIO()))
    logger.start(0)
    now[0] += 600
    logger.moved(1)
    now[0] += 30
    logger.moved(11)
    logger.progress(11, {"loss": 0.5})
    assert "step 11/100  loss 0.5, 4 min left" in printed.getvalue(), "3 s for each of 89 steps"
    logger.close()
