"""A bar appears where a wait is long and somebody looks, and nowhere else."""

import io
import time

import pytest
from rich.console import Console

from ecgmatch_dist.terminal import waiting


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("patience", [0.0, 60.0])
def test_the_bar_waits_and_counts(monkeypatch: pytest.MonkeyPatch, terminal: bool, patience: float) -> None:
    monkeypatch.setattr(waiting, "PATIENCE", patience)
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=100)
    assert list(waiting.track(iter("abc"), "letters", 3, console)) == ["a", "b", "c"]
    assert ("letters" in out.getvalue()) == (terminal and not patience)
    if terminal and not patience:
        assert "3/3" in out.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("patience", [0.0, 60.0])
def test_a_piece_of_work_of_unknown_length(monkeypatch: pytest.MonkeyPatch, terminal: bool, patience: float) -> None:
    monkeypatch.setattr(waiting, "PATIENCE", patience)
    out = io.StringIO()
    with waiting.waiting("loading", Console(file=out, force_terminal=terminal, width=100)):
        time.sleep(0.05)
    for sign in ("loading", "━"):  # what it is, and a bar
        assert (sign in out.getvalue()) == (terminal and not patience)


def test_time_left() -> None:
    assert [waiting.time_left(*case) for case in ((0, 5, 1.0), (10, 0, 1.0))] == ["", ""]
    cases = ((10, 20, 5.0, "10 s"), (10, 3600, 10.0, "60 min"), (1, 7200, 2.0, "4 h"))
    assert [waiting.time_left(*case[:3]) for case in cases] == [case[3] for case in cases]


@pytest.mark.parametrize("width", [80, 160])
def test_a_narrow_terminal_keeps_the_bar_and_the_time_left(width: int) -> None:
    out = io.StringIO()
    with waiting.make_bar(Console(file=out, force_terminal=True, width=width), note="note") as bar:
        task = bar.add_task("within-my_hospital@1.s20.supervised (1 of 2)", total=600, completed=10, note="loss 0.3722")
        bar.update(task, completed=300, note="loss 0.3722  lr 0.001766  time/step 0.2861")
        bar.refresh()
    last = [line for line in out.getvalue().splitlines() if "hospital" in line][-1]
    assert "300/600" in last
    assert "━" in last
    assert last.count(":") >= 4  # time so far, time left
    assert ("loss" in last) == (width == 160)
    assert "…" not in last
