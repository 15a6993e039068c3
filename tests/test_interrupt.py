"""Asked to stop: torchrun restarts the exit code 75, a deadline stops without a signal, handlers are put back."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_train import command, data, run, tiny, wait_for_step  # noqa: F401 (data is a fixture)

from ecgmatch_dist import train as training
from ecgmatch_dist.config import Optim
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.fence import Fence, Superseded
from ecgmatch_dist.interrupt import DEADLINE, Interrupt, Signals


def test_a_signal_raises_a_flag_and_nothing_else() -> None:
    before = signal.getsignal(signal.SIGUSR2)
    with Signals() as signals:
        interrupt = Interrupt(signals)
        assert not interrupt.agreed()
        signal.raise_signal(signal.SIGTERM)
        assert interrupt.agreed()
        assert not interrupt.warned  # a plain SIGTERM is a cancelled job, unless Slurm knows better
        signal.raise_signal(signal.SIGUSR2)
        assert interrupt.agreed()
        assert interrupt.warned
    assert signal.getsignal(signal.SIGUSR2) is before


def test_the_first_ctrl_c_asks_and_a_second_one_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    with Signals() as signals:
        interrupt = Interrupt(signals)
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)  # torchrun hands on what the ranks have got from the terminal
        assert interrupt.agreed()
        assert not interrupt.warned
        monkeypatch.setattr("ecgmatch_dist.interrupt.AGAIN", 0.0)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_a_ctrl_c_that_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Signals() as signals:
            signal.raise_signal(signal.SIGINT)
            assert not Interrupt(signals).agreed()
    finally:
        signal.signal(signal.SIGINT, before)


def test_the_deadline_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DEADLINE, "1")
    interrupt = Interrupt(Signals())
    assert interrupt.agreed()
    assert interrupt.warned


def test_a_deadline_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DEADLINE, "")
    assert not Interrupt(Signals()).agreed()
    monkeypatch.setenv(DEADLINE, "12:00")
    with pytest.raises(UserError, match="ECGMATCH_STOP_AT = '12:00': seconds since 1970"):
        Interrupt(Signals())


def test_a_newer_copy_ends_this_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ecgmatch_dist.fence.EVERY", 0.0)
    interrupt = Interrupt(Signals(), Fence.take(tmp_path))
    assert not interrupt.agreed()
    Fence.take(tmp_path)
    with pytest.raises(Superseded, match="generation 2"):
        interrupt.agreed()


@pytest.mark.parametrize(("when", "of", "step"), [("finish", "supervised", 6), ("build", "ecgmatch", 1)])
def test_a_warning_between_two_runs_is_not_forgotten(
    data: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    when: str,
    of: str,
    step: int,
) -> None:
    """While the supervised run is measured, or while the run that starts from it is built. slurm/train.sbatch has torchrun
    and its ranks ignore the signal, until the run listens."""
    before, usual = signal.signal(signal.SIGUSR2, signal.SIG_IGN), getattr(training, when)

    def warned(*args: Any) -> Any:
        if f".{of}/" in f"{args[0].folder.path if when == 'finish' else args[2].path}/":
            signal.raise_signal(signal.SIGUSR2)
        return usual(*args)

    monkeypatch.setattr(training, when, warned)
    try:
        with pytest.raises(training.Stopped) as stopped:
            run(tiny(data, tmp_path))
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert stopped.value.warned
    folder = tmp_path / f"within-chapman@0.2.s20.{of}"
    assert f"asked to stop: saved at step {step}," in (folder / "log.txt").read_text()
    assert not (folder / "result.json").exists()
    monkeypatch.setattr(training, when, usual)
    assert (run(tiny(data, tmp_path)) / "result.json").exists()


def test_torchrun_restarts_a_run_that_was_asked_to_stop(data: Path, tmp_path: Path) -> None:  # noqa: F811
    config = tiny(data, tmp_path / "runs", optim=Optim(steps=60, labelled_batch=8, unlabelled_batch=16))
    folder = config.runs / "within-chapman@0.2.s20.ecgmatch"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    start = [sys.executable, *launcher, *command(config)[1:], "--init=scratch"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    agent = subprocess.Popen(start, env=environment, stderr=subprocess.DEVNULL)
    try:
        wait_for_step(folder, 10, agent)
        ranks = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
        os.kill(int(ranks[-1]), signal.SIGTERM)  # one of them; all stop
        assert agent.wait(200) == 0
    finally:
        agent.kill()
        agent.wait()
    log = (folder / "log.txt").read_text()
    assert "asked to stop: saved at step" in log
    assert "resumed at step" in log
    assert len(list((folder / "generations").iterdir())) == 2
