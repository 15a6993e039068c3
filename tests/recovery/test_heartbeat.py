"""One of four ranks dies, freezes, stalls or fails in the middle of a step: the other three end in time and report it."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest
import torch

from ecgmatch_dist.config import Config, Runtime
from ecgmatch_dist.data.stream import LoadedPart, Stream
from ecgmatch_dist.distributed.whereabouts import CollectiveFailed, during, failed_collective
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.launch import train_job as launch_job
from ecgmatch_dist.methods import ecgmatch
from ecgmatch_dist.record.logger import RunLogger
from ecgmatch_dist.recovery import heartbeat
from ecgmatch_dist.recovery.generations import Fence
from ecgmatch_dist.recovery.heartbeat import LOST, Heartbeat
from ecgmatch_dist.train import train
from tests.support.ranks import fork_server, free_port
from tests.support.training import command, tiny, wait_for_step

WORLD, CULPRIT, STEP, TIMEOUT = 4, 2, 4, 10.0


def _kill(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _freeze(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _raise(*_: Any) -> None:
    raise ValueError("a lead is missing")


def _stall(*_: Any) -> None:
    time.sleep(600)


def sabotage(way: str) -> None:
    """Make this process fail at step `STEP`: between the exchange of the bank and the gradients, or while it reads."""
    calls = 0
    if way == "stall":
        read = Stream._read

        def slow(self: Stream, g: int, pool: Any = None) -> Any:
            return _stall() if g == STEP - 1 else read(self, g, pool)

        Stream._read = slow  # type: ignore[method-assign]
        return
    act = {"kill": _kill, "freeze": _freeze, "raise": _raise}[way]
    bce = ecgmatch.bce

    def failing(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        return act() if calls == 2 * STEP - 1 else bce(*args)  # twice per step

    ecgmatch.bce = failing


def _rank(rank: int, port: str, config: Config, out: Path, way: str) -> None:
    place = {"RANK": rank, "WORLD_SIZE": WORLD, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": WORLD}
    os.environ.update({name: str(value) for name, value in place.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, GLOO_SOCKET_IFNAME="lo")
    sys.stderr = (out / f"{rank}.txt").open("w", buffering=1)
    if rank == CULPRIT:
        sabotage(way)
    train(config)


@pytest.mark.parametrize("way", ["kill", "freeze", "stall", "raise"])
def test_the_others_end_and_name_the_rank_the_step_and_the_collective(
    data: Path,
    tmp_path: Path,
    way: str,
) -> None:
    runtime = Runtime(device="cpu", threads=1, readers=1, timeout_minutes=TIMEOUT / 60)
    config = replace(tiny(data, tmp_path / "runs", runtime=runtime), init="scratch")
    context = fork_server()
    port = free_port()
    ranks = [context.Process(target=_rank, args=(r, port, config, tmp_path, way)) for r in range(WORLD)]
    for process in ranks:
        process.start()
    folder = config.runs / "within-chapman@0.2.s20.ecgmatch"
    try:
        end = time.monotonic() + 120
        while _step(folder) < STEP:
            assert time.monotonic() < end, "the ranks did not reach the step"
            time.sleep(0.05)
        began = time.monotonic()
        others = [process for r, process in enumerate(ranks) if r != CULPRIT]
        while alive := [process for process in others if process.is_alive()]:
            wait([process.sentinel for process in alive], timeout=1)
            assert time.monotonic() < began + 2.5 * TIMEOUT, f"{len(alive)} ranks hang"
        seconds = time.monotonic() - began
    finally:
        for process in ranks:
            if process.is_alive():
                process.kill()
            process.join()
    assert seconds < (TIMEOUT if way in ("kill", "raise") else 2 * TIMEOUT)  # with a margin for a slow machine
    for r, process in enumerate(ranks):
        if r == CULPRIT:
            continue
        text = (tmp_path / f"{r}.txt").read_text()
        assert process.exitcode == (1 if way == "raise" else LOST), text  # a restart would only repeat an error
        # An error of its own is told in two ways: by a closed connection, and by the heartbeat.
        told = way == "raise" and f"ecgmatch: rank {r} ends at step {STEP}, because rank {CULPRIT} " in text
        assert told or f"ecgmatch: rank {r} lost contact in " in text
        assert told or f"at step {STEP}: rank {CULPRIT} " in text, text
        # The last heartbeat of a killed rank may be half a second old, so its place may differ.
        expected = {
            "kill": "was last seen at step",
            "freeze": "was last seen at step",
            "stall": f"was last seen at step {STEP} in reading",
            "raise": f"ended at step {STEP}: ValueError: a lead is missing",
        }
        assert expected[way] in text, text
    assert re.search("lost contact|because rank", (folder / "log.txt").read_text())


def _rank_like_nccl(rank: int, port: str, config: Config, out: Path) -> None:
    """As on GPUs: ending the process group waits for kernels, and so does a rank whose peer is gone, without an error."""
    wait_for_ever: Any = lambda *_: time.sleep(600)  # noqa: E731
    torch.distributed.destroy_process_group = wait_for_ever
    bce = ecgmatch.bce
    calls = 0

    def stuck(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        return wait_for_ever() if rank != CULPRIT and calls == 2 * STEP - 1 else bce(*args)

    ecgmatch.bce = stuck
    _rank(rank, port, config, out, "raise")


def test_an_error_of_its_own_ends_a_rank_at_once_and_the_others_within_seconds(data: Path, tmp_path: Path) -> None:
    runtime = Runtime(device="cpu", threads=1, readers=1, timeout_minutes=2.0)
    config = replace(tiny(data, tmp_path / "runs", runtime=runtime), init="scratch")
    context = fork_server()
    port = free_port()
    ranks = [context.Process(target=_rank_like_nccl, args=(r, port, config, tmp_path)) for r in range(WORLD)]
    for process in ranks:
        process.start()
    try:
        ranks[CULPRIT].join(120)
        assert ranks[CULPRIT].exitcode == 1, "it did not end"
        began = time.monotonic()
        for process in ranks:
            process.join(60)
        seconds = time.monotonic() - began
    finally:
        for process in ranks:
            if process.is_alive():
                process.kill()
            process.join()
    texts = [(tmp_path / f"{r}.txt").read_text() for r in range(WORLD)]
    assert [process.exitcode for process in ranks] == [1] * WORLD, texts
    assert seconds < 30, seconds  # a heartbeat, not a timeout of two minutes
    assert "ValueError: a lead is missing" in texts[CULPRIT]
    for r in {*range(WORLD)} - {CULPRIT}:
        assert f"because rank {CULPRIT} ended at step {STEP}: ValueError: a lead is missing" in texts[r]


@pytest.mark.slow
def test_torchrun_starts_a_run_again_that_hangs(data: Path, tmp_path: Path) -> None:
    runtime = Runtime(device="cpu", threads=1, readers=1, log_every=1, save_every=2)
    config = tiny(data, tmp_path / "runs", runtime=runtime)
    folder = config.runs / "within-chapman@0.2.s20.ecgmatch"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    options = ["--init=scratch", "--optim.steps=30", f"--runtime.timeout-minutes={TIMEOUT / 60}"]
    start = [sys.executable, *launcher, *command(config)[1:], *options]
    with (tmp_path / "errors").open("wb") as errors:
        agent = subprocess.Popen(start, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=errors)
    try:
        wait_for_step(folder, 10, agent)
        ranks = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
        os.kill(int(ranks[-1]), signal.SIGSTOP)
        code = agent.wait(200)
    finally:
        agent.kill()
        agent.wait()
    text = (tmp_path / "errors").read_text()
    assert code == 0, text
    assert "rank 0 lost contact in " in text
    assert f"exitcode: {LOST})" in text, text
    assert "resumed at step" in (folder / "log.txt").read_text()
    steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(steps)
    assert steps[-1] == 30


@pytest.mark.slow
@pytest.mark.parametrize("what", ["the checkpoint", "the kept model"])
def test_a_full_disk_ends_all_ranks(data: Path, tmp_path: Path, what: str) -> None:
    """With files limited to 60 KiB, the first large one cannot be written, and no rank waits for it."""
    every = ("--runtime.save-every=2", "--evaluate.every=100")
    options = every if what == "the checkpoint" else ("--runtime.save-every=100", "--evaluate.every=2")
    config = tiny(data, tmp_path / "runs")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    start = [sys.executable, *launcher, *command(config)[1:], "--init=scratch", "--runtime.timeout-minutes=4", *options]
    done = subprocess.run(
        ["bash", "-c", 'ulimit -f 60; exec "$@"', "bash", *start],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=180,  # less than the timeout of a collective
        check=False,
    )
    assert done.returncode == 1, done.stderr
    named = "checkpoints: the checkpoint" if what == "the checkpoint" else "best.safetensors:"
    assert re.search(f"^ecgmatch: .*{named} could not be written.*File too large.*goes on", done.stderr, re.M), (
        done.stderr
    )
    assert "[rank0]: Traceback" not in done.stderr  # torchrun prints its own traceback
    folder = config.runs / "within-chapman@0.2.s20.ecgmatch"
    assert list((folder / "checkpoints").iterdir()) == []
    assert not (folder / "best.safetensors").exists()


def _job(rank: int, port: str, config: Config, out: Path, where: str) -> None:
    """One rank of a sweep's job in which a rank fails before the first step."""
    place = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2}
    os.environ.update({name: str(value) for name, value in place.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, GLOO_SOCKET_IFNAME="lo")
    sys.stderr = (out / f"{rank}.txt").open("w", buffering=1)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    if where == "shards" and rank == 1:
        LoadedPart.__init__ = full  # type: ignore[method-assign, assignment]
    elif where != "shards" and rank == 0:
        owner, name = {"generations": (Fence, "acquire"), "log": (RunLogger, "__init__")}[where]
        setattr(owner, name, full)
    launch_job.export_ranks = lambda: rank
    launch_job.TrainJob("a", config.to_json(), ())()


@pytest.mark.parametrize("where", ["generations", "log", "shards"])
def test_a_rank_that_cannot_start_is_not_taken_for_a_lost_one(data: Path, tmp_path: Path, where: str) -> None:
    """The job script requeues a job that lost a rank. This error would only be repeated."""
    runtime = Runtime(device="cpu", threads=1, readers=1, timeout_minutes=TIMEOUT / 60)
    config = replace(tiny(data, tmp_path / "runs", runtime=runtime), init="scratch")
    context = fork_server()
    port = free_port()
    ranks = [context.Process(target=_job, args=(r, port, config, tmp_path, where)) for r in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
    errors = [(tmp_path / f"{r}.txt").read_text() for r in range(2)]
    assert [process.exitcode for process in ranks] == [1, 1], errors
    assert "No space left on device" in errors[where == "shards"]
    assert ("rank 0 could not enter it" if where == "generations" else "No space left") in errors[where != "shards"]


def _step(folder: Path) -> int:
    """The highest step that a rank has reached."""
    try:
        beats = [json.loads(path.read_text()) for path in folder.glob("copies/*/heartbeats/*.json")]
    except (OSError, ValueError):
        return 0
    return max((beat["step"] for beat in beats), default=0)


def test_only_errors_of_collectives_count_as_lost_peers() -> None:
    with pytest.raises(ValueError, match="mine"), during("gradients"):
        raise ValueError("mine")
    with pytest.raises(RuntimeError, match="shape") as caught, during("gradients"):
        raise RuntimeError("shape [3] is invalid")
    assert failed_collective(caught.value) is None
    assert failed_collective(ValueError("gloo")) is None
    circle = ValueError("raised from itself")
    circle.__cause__ = circle
    assert failed_collective(circle) is None
    with pytest.raises(CollectiveFailed, match=r"bank/rows: .*gloo") as lost, during("gradients"), during("bank/rows"):
        raise RuntimeError("[third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer")
    assert failed_collective(lost.value) == "bank/rows"
    wrapped = ValueError("the checkpoint could not be written")
    wrapped.__cause__ = lost.value
    assert failed_collective(wrapped) == "bank/rows"
    assert str(heartbeat.here) == "computing"


def test_a_run_that_ends_well_leaves_no_heartbeats(tmp_path: Path) -> None:
    with Heartbeat(tmp_path, 0, 2, 1.0), during("reading", 7):
        beat = json.loads((tmp_path / "heartbeats" / "00000.json").read_text())
        assert beat["process"] == os.getpid()
    assert list((tmp_path / "heartbeats").iterdir()) == []  # the run removes the folder (Fence.release)
    (tmp_path / "heartbeats").rmdir()
    with Heartbeat(tmp_path, 0, 1, 1.0):
        assert not (tmp_path / "heartbeats").exists()


def test_a_full_disk_is_still_reported_to_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No new file can be written. The error goes into the existing heartbeat, or the others would think that the rank died."""

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    def fail() -> None:
        monkeypatch.setattr(Path, "write_text", full)
        raise UserError("no room" + 10_000 * "!")

    with pytest.raises(UserError, match="no room"), Heartbeat(tmp_path, 0, 2, 1.0):
        fail()
    other = Heartbeat(tmp_path, 1, 2, 1.0)
    assert other._others()[0]["ended"].startswith("UserError: no room!!")


def test_a_stall_is_reported_at_half_the_timeout(tmp_path: Path) -> None:
    lines: list[str] = []
    with Heartbeat(tmp_path, 0, 2, 0.4 / 60, lines.append), during("bank/exchange", 3):
        other = Heartbeat(tmp_path, 1, 2, 1.0)
        other._write()
        end = time.monotonic() + 30
        while not lines and time.monotonic() < end:
            time.sleep(0.05)
    line = lines[0]
    assert "in bank/exchange at step 3; rank 1 was last seen at step 3 in bank/exchange" in line
