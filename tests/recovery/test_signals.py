"""Stop requests: signals set flags, a deadline acts without a signal, handlers are restored, torchrun restarts the run."""

import importlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from ecgmatch_dist.config import Optim
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.recovery.generations import Fence, Superseded
from ecgmatch_dist.recovery.signals import DEADLINE, Signals, Stopped, StopRequest
from tests.support.training import command, run, tiny, wait_for_step

training = importlib.import_module("ecgmatch_dist.train")  # `ecgmatch_dist.train` may be the function


def test_a_signal_only_sets_a_flag() -> None:
    before = signal.getsignal(signal.SIGUSR2)
    with Signals() as signals:
        request = StopRequest(signals)
        assert not request.agreed()
        signal.raise_signal(signal.SIGTERM)
        assert request.agreed()
        assert not request.warned  # a plain SIGTERM may mean that the job was cancelled
        signal.raise_signal(signal.SIGUSR2)
        assert request.agreed()
        assert request.warned
    assert signal.getsignal(signal.SIGUSR2) is before


def test_the_first_ctrl_c_asks_and_a_second_one_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    with Signals() as signals:
        request = StopRequest(signals)
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)  # forwarded by torchrun, although the terminal has sent it to the ranks
        assert request.agreed()
        assert not request.warned
        monkeypatch.setattr("ecgmatch_dist.recovery.signals.SAME_CTRL_C", 0.0)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_a_ctrl_c_that_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Signals() as signals:
            signal.raise_signal(signal.SIGINT)
            assert not StopRequest(signals).agreed()
    finally:
        signal.signal(signal.SIGINT, before)


def test_the_deadline_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DEADLINE, "1")
    request = StopRequest(Signals())
    assert request.agreed()
    assert request.warned


def test_an_empty_or_wrong_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DEADLINE, "")
    assert not StopRequest(Signals()).agreed()
    monkeypatch.setenv(DEADLINE, "12:00")
    with pytest.raises(UserError, match="ECGMATCH_STOP_AT = '12:00': seconds since 1970"):
        StopRequest(Signals())


def test_a_newer_copy_ends_this_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ecgmatch_dist.recovery.generations.POLL_SECONDS", 0.0)
    request = StopRequest(Signals(), Fence.acquire(tmp_path))
    assert not request.agreed()
    Fence.acquire(tmp_path)
    with pytest.raises(Superseded, match="generation 2"):
        request.agreed()


@pytest.mark.parametrize(("when", "of", "step"), [("finish", "supervised", 6), ("build_run", "ecgmatch", 1)])
def test_a_warning_between_two_runs_is_not_lost(
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    when: str,
    of: str,
    step: int,
) -> None:
    """While the supervised run is measured, or while the run that starts from it is built. Until `Signals` is entered, the
    ranks ignore the signal, as slurm/train.sbatch sets it up."""
    before, usual = signal.signal(signal.SIGUSR2, signal.SIG_IGN), getattr(training, when)

    def warned(*args: Any) -> Any:
        if f".{of}/" in f"{args[0].folder.path if when == 'finish' else args[2].path}/":
            signal.raise_signal(signal.SIGUSR2)
        return usual(*args)

    monkeypatch.setattr(training, when, warned)
    try:
        with pytest.raises(Stopped) as stopped:
            run(tiny(data, tmp_path))
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert stopped.value.warned
    folder = tmp_path / f"within-chapman@0.2.s20.{of}"
    assert f"asked to stop: saved at step {step}," in (folder / "log.txt").read_text()
    assert not (folder / "result.json").exists()
    monkeypatch.setattr(training, when, usual)
    assert (run(tiny(data, tmp_path)) / "result.json").exists()


@pytest.mark.slow
def test_torchrun_restarts_a_run_that_was_asked_to_stop(data: Path, tmp_path: Path) -> None:
    config = tiny(data, tmp_path / "runs", optim=Optim(steps=60, labelled_batch=8, unlabelled_batch=16))
    folder = config.runs / "within-chapman@0.2.s20.ecgmatch"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    start = [sys.executable, *launcher, *command(config)[1:], "--init=scratch"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    agent = subprocess.Popen(start, env=environment, stderr=subprocess.DEVNULL)
    try:
        wait_for_step(folder, 10, agent)
        ranks = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
        os.kill(int(ranks[-1]), signal.SIGTERM)  # one rank gets the signal; all stop
        assert agent.wait(200) == 0
    finally:
        agent.kill()
        agent.wait()
    log = (folder / "log.txt").read_text()
    assert "asked to stop: saved at step" in log
    assert "resumed at step" in log
    assert len(list((folder / "generations").iterdir())) == 2


def test_training_in_another_thread_leaves_the_signals_alone() -> None:
    """Only the main thread may set handlers: a program that trains in another one has its own."""
    before = signal.getsignal(signal.SIGTERM)
    seen: list[object] = []

    def body() -> None:
        with Signals() as signals:
            seen.extend((signal.getsignal(signal.SIGTERM), signals.received))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen == [before, {}]
