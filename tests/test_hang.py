"""One of four ranks dies, freezes or waits for its data in the middle of a step: the other three end in time and say so."""

import json
import multiprocessing
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
from test_distributed import free_port
from test_train import command, data, tiny, wait_for_step  # noqa: F401

from ecgmatch_dist import watchdog
from ecgmatch_dist.config import Config, Runtime
from ecgmatch_dist.data.stream import Stream
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.fence import Fence
from ecgmatch_dist.job import Loaded
from ecgmatch_dist.launch import job as launch_job
from ecgmatch_dist.methods import ecgmatch
from ecgmatch_dist.monitor import Monitor
from ecgmatch_dist.train import execute
from ecgmatch_dist.watchdog import LOST, CollectiveFailed, Heartbeat, during, failed_collective

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
    """Let this process fail at step `STEP`: between the exchange of the bank and the gradients, or while it reads."""
    calls = 0
    if way == "stall":
        read = Stream.__getitem__

        def slow(self: Stream, g: int) -> Any:
            return _stall() if g == STEP - 1 else read(self, g)

        Stream.__getitem__ = slow  # type: ignore[method-assign]
        return
    act = {"kill": _kill, "freeze": _freeze, "raise": _raise}[way]
    bce = ecgmatch.bce

    def failing(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        return act() if calls == 2 * STEP - 1 else bce(*args)  # twice a step

    ecgmatch.bce = failing


def _rank(rank: int, port: str, config: Config, out: Path, way: str) -> None:
    place = {"RANK": rank, "WORLD_SIZE": WORLD, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": WORLD}
    os.environ.update({name: str(value) for name, value in place.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, GLOO_SOCKET_IFNAME="lo")
    sys.stderr = (out / f"{rank}.txt").open("w", buffering=1)
    if rank == CULPRIT:
        sabotage(way)
    execute(config)


@pytest.mark.parametrize("way", ["kill", "freeze", "stall", "raise"])
def test_the_others_end_and_name_the_rank_the_step_and_the_collective(
    data: Path,  # noqa: F811
    tmp_path: Path,
    way: str,
) -> None:
    runtime = Runtime(device="cpu", threads=1, readers=1, timeout_minutes=TIMEOUT / 60)
    config = replace(tiny(data, tmp_path / "runs", runtime=runtime), init="scratch")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "torch._dynamo", "sklearn.metrics", "webdataset"])
    port = free_port()
    ranks = [context.Process(target=_rank, args=(r, port, config, tmp_path, way)) for r in range(WORLD)]
    for process in ranks:
        process.start()
    folder = config.runs / "within-chapman@0.2.s20.ecgmatch"
    try:
        end = time.monotonic() + 120
        while _step(folder) < STEP:
            assert time.monotonic() < end, "the ranks did not come to the step"
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
    assert seconds < (TIMEOUT if way in ("kill", "raise") else 2 * TIMEOUT)  # the rest is the machine's own slowness
    for r, process in enumerate(ranks):
        if r == CULPRIT:
            continue
        text = (tmp_path / f"{r}.txt").read_text()
        assert process.exitcode == (1 if way == "raise" else LOST), text  # an error of its own would only come again
        assert f"ecgmatch: rank {r} lost contact in " in text
        assert f"at step {STEP}: rank {CULPRIT} " in text, text
        # What a rank that died at once did last may be half a second older than what it wrote.
        expected = {
            "kill": "was last seen at step",
            "freeze": "was last seen at step",
            "stall": f"was last seen at step {STEP} in reading",
            "raise": f"ended at step {STEP}: ValueError: a lead is missing",
        }
        assert expected[way] in text, text
    assert "lost contact" in (folder / "log.txt").read_text()


def test_torchrun_starts_a_run_again_that_hangs(data: Path, tmp_path: Path) -> None:  # noqa: F811
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


@pytest.mark.parametrize("what", ["the checkpoint", "the kept model"])
def test_a_full_disk_ends_all_ranks(data: Path, tmp_path: Path, what: str) -> None:  # noqa: F811
    """Files may not grow beyond 60 KiB: the first large one cannot be written, and nobody waits for it."""
    every = ("--runtime.save-every=2", "--evaluate.every=100")
    options = every if what == "the checkpoint" else ("--runtime.save-every=100", "--evaluate.every=2")
    config = tiny(data, tmp_path / "runs")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    start = [sys.executable, *launcher, *command(config)[1:], "--init=scratch", "--runtime.timeout-minutes=1", *options]
    done = subprocess.run(
        ["bash", "-c", 'ulimit -f 60; exec "$@"', "bash", *start],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=50,  # less than a collective would wait
        check=False,
    )
    assert done.returncode == 1, done.stderr
    named = "checkpoints: the checkpoint" if what == "the checkpoint" else "best.safetensors:"
    assert re.search(f"^ecgmatch: .*{named} could not be written.*File too large.*goes on", done.stderr, re.M), (
        done.stderr
    )
    assert "[rank0]: Traceback" not in done.stderr  # torchrun adds one of its own
    folder = config.runs / "within-chapman@0.2.s20.ecgmatch"
    assert list((folder / "checkpoints").iterdir()) == []
    assert not (folder / "best.safetensors").exists()


def _job(rank: int, port: str, config: Config, out: Path, where: str) -> None:
    """A rank of a sweep's job, of which one fails before the first step."""
    place = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2}
    os.environ.update({name: str(value) for name, value in place.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, GLOO_SOCKET_IFNAME="lo")
    sys.stderr = (out / f"{rank}.txt").open("w", buffering=1)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    if where == "shards" and rank == 1:
        Loaded.__init__ = full  # type: ignore[method-assign, assignment]
    elif where != "shards" and rank == 0:
        owner, name = {"generations": (Fence, "take"), "log": (Monitor, "__init__")}[where]
        setattr(owner, name, full)
    launch_job.export_ranks = lambda: rank
    launch_job.TrainJob("a", config.to_json(), ())()


@pytest.mark.parametrize("where", ["generations", "log", "shards"])
def test_a_rank_that_cannot_start_is_not_taken_for_a_lost_one(data: Path, tmp_path: Path, where: str) -> None:  # noqa: F811
    """The batch script queues a job again whose ranks lost another one; this would only come again."""
    runtime = Runtime(device="cpu", threads=1, readers=1, timeout_minutes=TIMEOUT / 60)
    config = replace(tiny(data, tmp_path / "runs", runtime=runtime), init="scratch")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "torch._dynamo", "sklearn.metrics", "webdataset"])
    port = free_port()
    ranks = [context.Process(target=_job, args=(r, port, config, tmp_path, where)) for r in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
    said = [(tmp_path / f"{r}.txt").read_text() for r in range(2)]
    assert [process.exitcode for process in ranks] == [1, 1], said
    assert "No space left on device" in said[where == "shards"]
    assert ("rank 0 could not enter it" if where == "generations" else "No space left") in said[where != "shards"]


def _step(folder: Path) -> int:
    """The step that the ranks have come to."""
    try:
        beats = [json.loads(path.read_text()) for path in folder.glob("copies/*/heartbeats/*.json")]
    except (OSError, ValueError):
        return 0
    return max((beat["step"] for beat in beats), default=0)


def test_only_lost_peers_are_taken_for_lost_peers() -> None:
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
    assert str(watchdog.here) == "computing"


def test_a_run_that_ends_well_leaves_no_heartbeats(tmp_path: Path) -> None:
    with Heartbeat(tmp_path, 0, 2, 1.0), during("reading", 7):
        beat = json.loads((tmp_path / "heartbeats" / "00000.json").read_text())
        assert beat["process"] == os.getpid()
    assert list((tmp_path / "heartbeats").iterdir()) == []  # the run takes the folder away (Fence.leave)
    (tmp_path / "heartbeats").rmdir()
    with Heartbeat(tmp_path, 0, 1, 1.0):
        assert not (tmp_path / "heartbeats").exists()


def test_a_full_disk_can_still_be_told_to_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No new file can be written, not even the note of why this rank ended: without it the others would take it for dead."""

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    def fail() -> None:
        monkeypatch.setattr(Path, "write_text", full)
        raise UserError("no room" + 10_000 * "!")

    with pytest.raises(UserError, match="no room"), Heartbeat(tmp_path, 0, 2, 1.0):
        fail()
    other = Heartbeat(tmp_path, 1, 2, 1.0)
    assert other._others()[0]["ended"].startswith("UserError: no room!!")


def test_a_stall_is_told_at_half_the_timeout(tmp_path: Path) -> None:
    said: list[str] = []
    with Heartbeat(tmp_path, 0, 2, 0.4 / 60, said.append), during("bank/exchange", 3):
        other = Heartbeat(tmp_path, 1, 2, 1.0)
        other._write()
        time.sleep(0.5)
    (line,) = said
    assert "in bank/exchange at step 3; rank 1 was last seen at step 3 in bank/exchange" in line
