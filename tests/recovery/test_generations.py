"""Only the newest copy of a run writes: generations, late writers, restarts of old copies, two processes at once."""

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ecgmatch_dist.config import Optim
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.record.logger import RunLogger
from ecgmatch_dist.recovery import generations
from ecgmatch_dist.recovery.checkpoint import Checkpointer
from ecgmatch_dist.recovery.generations import Fence, Superseded
from ecgmatch_dist.recovery.heartbeat import Heartbeat
from tests.support.training import command, tiny, wait_for_step


def test_the_newer_copy_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waited = list[float]()
    monkeypatch.setattr("time.sleep", waited.append)
    first = Fence.acquire(tmp_path)
    first.check()
    assert sum(waited) == 0  # every step may check
    second = Fence.acquire(tmp_path)
    assert (first.generation, second.generation) == (1, 2)
    second.check()
    with pytest.raises(Superseded, match=r"generation 2, on .*this one, generation 1, ends and writes nothing more"):
        first.check()
    third = Fence.acquire(tmp_path)
    third.check()
    for older in (first, second):
        with pytest.raises(Superseded, match="generation 3"):
            older.check()


def test_copies_that_start_at_once_acquire_different_generations(tmp_path: Path) -> None:
    acquired: list[Fence] = []
    gate = threading.Barrier(8)

    def acquire() -> None:
        gate.wait()
        acquired.append(Fence.acquire(tmp_path))

    threads = [threading.Thread(target=acquire) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(fence.generation for fence in acquired) == list(range(1, 9))
    alive = []
    for fence in acquired:
        try:
            fence.check()
            alive.append(fence.generation)
        except Superseded:
            pass
    assert alive == [8]


@pytest.mark.slow
def test_a_generation_is_never_seen_empty(tmp_path: Path) -> None:
    """A generation file becomes visible together with its record."""
    generations, done, empty = tmp_path / "generations", threading.Event(), []

    def watch() -> None:
        while not done.is_set():
            empty.extend(path for path in generations.glob("*.jsonl") if not path.stat().st_size)

    watcher = threading.Thread(target=watch)
    watcher.start()
    for _ in range(100):
        Fence.acquire(tmp_path)
    done.set()
    watcher.join()
    assert empty == []
    assert sorted(path.name for path in generations.iterdir()) == [f"{number:06d}.jsonl" for number in range(1, 101)]


def test_generations_on_a_file_system_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("no links here")

    monkeypatch.setattr(os, "link", refuse)
    first, second = Fence.acquire(tmp_path), Fence.acquire(tmp_path)
    assert (first.generation, second.generation) == (1, 2)
    with pytest.raises(Superseded):
        first.check()
    assert len(list((tmp_path / "generations").iterdir())) == 2


def test_only_rank_0_checks(tmp_path: Path) -> None:
    Fence(tmp_path / "nowhere", 1, main=False).check()


def test_a_removed_folder_is_reported(tmp_path: Path) -> None:
    fence = Fence.acquire(tmp_path)
    (tmp_path / "generations" / "000001.jsonl").unlink()
    with pytest.raises(UserError, match="removed while the run was running"):
        fence.check()


def test_polls_are_rare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fence = Fence.acquire(tmp_path)
    Fence.acquire(tmp_path)
    assert fence.poll() == ""  # acquired less than a second ago
    monkeypatch.setattr("ecgmatch_dist.recovery.generations.POLL_SECONDS", 0.0)
    assert "a newer copy" in fence.poll()


def test_torchrun_cannot_restart_a_superseded_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a")
    Fence.acquire(tmp_path)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert Fence.acquire(tmp_path).generation == 2  # a restart of the only copy
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "b")
    assert Fence.acquire(tmp_path).generation == 3
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    with pytest.raises(Superseded, match=r"generation 3.*this one, generation 2, ends"):
        Fence.acquire(tmp_path)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")  # requeued by Slurm: another owner
    assert Fence.acquire(tmp_path).generation == 4


def test_nor_one_that_was_superseded_before_its_first_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", name)
        Fence.acquire(tmp_path)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with pytest.raises(Superseded, match=r"generation 2.*this one, generation 1, ends"):
        Fence.acquire(tmp_path)


@pytest.mark.parametrize(("name", "value"), [("TORCHELASTIC_RUN_ID", "none"), ("SLURM_JOB_ID", "5")])
def test_a_first_start_takes_over_even_with_a_known_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    """torchrun's run id is "none" on several nodes; all runs in one salloc shell have the same job id."""
    monkeypatch.setenv(name, value)
    Fence.acquire(tmp_path)
    monkeypatch.delenv(name)
    Fence.acquire(tmp_path)
    monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    assert Fence.acquire(tmp_path).generation == 3


def save(checkpointer: Checkpointer, step: int) -> None:
    checkpointer.save(step, {"student": {"w": torch.full((3,), float(step))}}, {})
    checkpointer.wait()


def test_an_old_copy_saves_nothing(tmp_path: Path) -> None:
    old = Checkpointer(tmp_path / "checkpoints", {}, Fence.acquire(tmp_path))
    save(old, 10)
    new = Checkpointer(tmp_path / "checkpoints", {}, Fence.acquire(tmp_path))
    save(new, 15)
    with pytest.raises(Superseded):
        save(old, 20)
    found, _ = new.latest()
    assert found is not None
    assert found.folder.name == "step-000015.2"


class Suspended(Fence):
    """Suspended right after a successful check, until a newer copy has taken over and written."""

    meanwhile: Callable[[Fence], None]

    def check(self) -> None:
        super().check()
        self.meanwhile(Fence.acquire(self.folder))


def suspended(folder: Path, meanwhile: Callable[[Fence], None]) -> Suspended:
    fence = Suspended(folder, Fence.acquire(folder).generation)
    fence.meanwhile = meanwhile
    return fence


def test_a_late_file_is_not_published(tmp_path: Path) -> None:
    path = tmp_path / "best.safetensors"
    old = suspended(tmp_path, lambda newer: newer.write_text(path, "of the newer one"))
    with pytest.raises(Superseded, match="generation 2"):
        old.write_text(path, "of the older one")
    assert path.read_text() == "of the newer one"
    with pytest.raises(Superseded):  # nor can it start another write
        old.write_text(path, "of the older one")
    assert [path.name for path in (tmp_path / "copies").iterdir()] == ["000002"]


def test_a_node_that_sees_an_old_file_looks_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newer copy has deleted the workspace, but this node still sees the generation without the newer copy's record."""
    old = Fence.acquire(tmp_path)
    stale = generations._read(tmp_path / "generations" / "000001.jsonl")
    Fence.acquire(tmp_path)
    looks, read, waited = iter([stale, stale]), generations._read, list[float]()
    monkeypatch.setattr(generations, "_read", lambda path: next(looks, None) or read(path))
    monkeypatch.setattr("time.sleep", waited.append)
    with pytest.raises(Superseded, match="generation 2"):
        old.write_text(tmp_path / "late.txt", "old")
    assert not (tmp_path / "late.txt").exists()
    assert waited == [1, 2]


def test_a_late_checkpoint_is_not_published(tmp_path: Path) -> None:
    def meanwhile(newer: Fence) -> None:
        new = Checkpointer(tmp_path / "checkpoints", {}, newer)
        save(new, 15)
        save(new, 30)

    old = Checkpointer(tmp_path / "checkpoints", {}, suspended(tmp_path, meanwhile))
    with pytest.raises(Superseded, match="generation 2"):
        save(old, 40)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["latest", "step-000015.2", "step-000030.2"]
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step-000030.2\n"


def test_late_lines_are_in_no_file(tmp_path: Path) -> None:
    """Neither in metrics.jsonl nor in log.txt nor in what TensorBoard reads."""
    old = RunLogger(tmp_path, active=True, steps=9, fence=Fence.acquire(tmp_path))
    old.start(0)
    old.say("one")
    old.scalars(1, "train", {"loss": 1.0})
    old.board("flush")
    new = RunLogger(tmp_path, active=True, steps=9, fence=Fence.acquire(tmp_path))
    new.start(1)
    old.say("late")  # its last check came before the takeover
    old.scalars(2, "train", {"loss": 2.0})
    new.say("two")
    new.scalars(2, "train", {"loss": 3.0})
    for logger in (old, new):
        logger.close()
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(record["step"], record["loss"]) for record in records] == [(1, 1.0), (2, 3.0)]
    assert [line.split()[-1] for line in (tmp_path / "log.txt").read_text().splitlines()] == ["one", "two"]
    board = EventAccumulator(str(tmp_path / "tb"))
    assert [(event.step, event.value) for event in board.Reload().Scalars("train/loss")] == [(1, 1.0), (2, 3.0)]


def test_an_old_copy_writes_no_heartbeats(tmp_path: Path) -> None:
    old = Fence.acquire(tmp_path)
    with Heartbeat(old.workspace, 0, 2, 0.2 / 60) as heartbeat:
        assert heartbeat.period < 0.02
        newer = Fence.acquire(tmp_path)
        time.sleep(0.1)
        assert not old.workspace.exists()
    newer.release()
    assert not (tmp_path / "copies").exists()


def test_a_workspace_that_cannot_be_deleted_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (Fence.acquire(tmp_path).workspace / "half").touch()
    monkeypatch.setattr("shutil.rmtree", lambda *args, **options: None)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    with pytest.raises(UserError, match="cannot be removed"):
        Fence.acquire(tmp_path)


def test_what_nfs_keeps_of_an_open_file_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (Fence.acquire(tmp_path).workspace / ".nfs0001").touch()
    monkeypatch.setattr("shutil.rmtree", lambda *args, **options: None)
    assert Fence.acquire(tmp_path).generation == 2


def test_the_last_rank_leaves_no_workspace(tmp_path: Path) -> None:
    fence = Fence.acquire(tmp_path)
    (fence.workspace / "heartbeats").mkdir()
    fence.release()
    assert [path.name for path in tmp_path.iterdir()] == ["generations"]


@pytest.mark.slow
def test_two_processes_on_one_folder(data: Path, tmp_path: Path) -> None:
    config = tiny(data, tmp_path / "runs", optim=Optim(steps=150, labelled_batch=8, unlabelled_batch=16))
    folder = config.runs / "within-chapman@0.2.s20.ecgmatch"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    start = [*command(config), "--init=scratch"]
    with (tmp_path / "old").open("wb") as errors:
        old = subprocess.Popen(start, env=environment, stderr=errors)
    try:
        wait_for_step(folder, 10, old)
        old.send_signal(signal.SIGSTOP)
        new = subprocess.run(start, env=environment, capture_output=True, text=True, check=False)
        assert new.returncode == 0, new.stderr
        old.send_signal(signal.SIGCONT)
        assert old.wait(60) == 1
    finally:
        old.kill()
        old.wait()
    assert "a newer copy of this run has taken over (generation 2" in (tmp_path / "old").read_text()
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in steps if record["kind"] == "train"] == list(range(1, 151))
    assert {path.suffix for path in (folder / "checkpoints").glob("step-*")} == {".2"}
    assert not (folder / "copies").exists()
