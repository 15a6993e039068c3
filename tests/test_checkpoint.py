"""Checkpoints: whole or not there, re-sharded on load, refused when foreign, skipped when damaged."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from ranks import run_processes
from torch import Tensor

from ecgmatch_dist.checkpoint import Block, Checkpointer, pack_optimizer, unpack_optimizer
from ecgmatch_dist.errors import UserError

FITS = {"configuration": "a", "split": "b"}


def save(folder: Path, step: int, value: float = 0.0) -> Checkpointer:
    checkpointer = Checkpointer(folder, FITS)
    block = Block(0, {"z": torch.arange(12.0).reshape(6, 2) + value})
    checkpointer.save(step, {"student.w": torch.full((3,), value)}, block, {"seconds": 1.5})
    checkpointer.wait()
    return checkpointer


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    found, notes = save(tmp_path, 10, 2.0).latest()
    assert found is not None
    assert notes == []
    assert found.counters == {"step": 10, "seconds": 1.5}
    assert torch.equal(found.tensors()["student.w"], torch.full((3,), 2.0))
    (block,) = found.rows(2, 5)
    assert block.start == 2
    assert torch.equal(block.tensors["z"], (torch.arange(12.0).reshape(6, 2) + 2)[2:5])


def test_the_copy_is_taken_when_save_is_called(tmp_path: Path) -> None:
    checkpointer, tensor = Checkpointer(tmp_path, FITS), torch.zeros(1000)
    checkpointer.save(1, {"student.w": tensor}, None, {})
    tensor.fill_(1.0)
    checkpointer.wait()
    found, _ = checkpointer.latest()
    assert found is not None
    assert found.tensors()["student.w"].sum() == 0


def test_the_last_two_are_kept(tmp_path: Path) -> None:
    for step in (5, 10, 15):
        save(tmp_path, step)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-000010.1", "step-000015.1"]


def flip(path: Path, at: int) -> None:
    """Another value of one bit."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["state.json", "state.safetensors", "bank-000000000000.safetensors"])
@pytest.mark.parametrize("damage", ["cut", "gone", "middle", "end"])
def test_a_damaged_one_falls_back_and_says_so(tmp_path: Path, name: str, damage: str) -> None:
    save(tmp_path, 5, 1.0)
    checkpointer = save(tmp_path, 10, 2.0)
    victim = tmp_path / "step-000010.1" / name
    if damage == "gone":
        victim.unlink()
    elif damage == "cut":
        victim.write_bytes(victim.read_bytes()[:-7])
    else:
        flip(victim, victim.stat().st_size // 2 if damage == "middle" else -3)
    found, notes = checkpointer.latest()
    assert found is not None
    assert found.counters["step"] == 5
    assert "step-000010.1 is damaged" in notes[0]
    assert torch.equal(found.tensors()["student.w"], torch.ones(3))


def test_the_pointer_names_the_latest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 5)
    checkpointer = save(tmp_path, 10)
    assert (tmp_path / "latest").read_text() == "step-000010.1\n"
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter(()))  # a listing that is older than the pointer
    found, notes = checkpointer.latest()
    assert found is not None
    assert (found.folder.name, notes) == ("step-000010.1", [])


@pytest.mark.parametrize(
    ("pointer", "said"),
    [
        (None, "latest names no checkpoint"),
        ("", "latest names no checkpoint"),
        ("step-0000", "latest names no checkpoint"),
        ("step-000099.1\n", "step-000099.1 is damaged"),
    ],
)
def test_without_a_good_pointer_the_newest_whole_one_is_taken(tmp_path: Path, pointer: str | None, said: str) -> None:
    save(tmp_path, 5)
    checkpointer = save(tmp_path, 10)
    (tmp_path / "latest").unlink() if pointer is None else (tmp_path / "latest").write_text(pointer)
    found, notes = checkpointer.latest()
    assert found is not None
    assert found.counters["step"] == 10
    assert len(notes) == 1
    assert said in notes[0]


def test_a_pointer_that_came_too_late_loses_nothing(tmp_path: Path) -> None:
    """The run was killed between a checkpoint and its pointer."""
    save(tmp_path, 5)
    checkpointer = save(tmp_path, 10)
    (tmp_path / "latest").write_text("step-000005.1\n")
    found, notes = checkpointer.latest()
    assert found is not None
    assert (found.counters["step"], notes) == (10, [])


def test_an_unfinished_one_is_not_seen(tmp_path: Path) -> None:
    checkpointer = save(tmp_path, 5)
    shutil.copytree(tmp_path / "step-000005.1", tmp_path / "unfinished-000010")
    found, _ = checkpointer.latest()
    assert found is not None
    assert found.counters["step"] == 5


def test_a_foreign_one_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 5)
    with pytest.raises(UserError, match="another split"):
        Checkpointer(tmp_path, FITS | {"split": "c"}).latest()


def test_nothing_there(tmp_path: Path) -> None:
    assert Checkpointer(tmp_path, FITS).latest() == (None, [])


def test_an_error_in_the_background_is_raised(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path / "checkpoints", FITS)
    shutil.rmtree(tmp_path / "checkpoints")
    (tmp_path / "checkpoints").write_text("a file where the folder was")
    checkpointer.save(1, {"w": torch.zeros(1)}, None, {})
    with pytest.raises(UserError, match="could not be written"):
        checkpointer.wait()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    "kind", [lambda p, f: torch.optim.SGD(p, 0.1, 0.9, fused=f), lambda p, f: torch.optim.AdamW(p, 0.1, fused=f)]
)
def test_the_optimiser_survives(kind: object, fused: bool) -> None:
    """Also that of weights that lie in memory in another order than in files."""
    assert callable(kind)
    goal = torch.arange(24.0).view(2, 3, 4)

    def step(parameter: Tensor, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        ((parameter - goal) ** 2).sum().backward()
        optimizer.step()

    def weights(values: Tensor) -> Tensor:
        return torch.empty_strided((2, 3, 4), (12, 1, 3)).copy_(values).requires_grad_()

    first = weights(torch.ones(2, 3, 4))
    optimizer = kind([first], fused)
    step(first, optimizer)
    second = weights(first.detach())
    restored = kind([second], fused)
    unpack_optimizer(restored, {k: v.clone().contiguous() for k, v in pack_optimizer(optimizer).items()})
    for _ in range(3):
        step(first, optimizer)
        step(second, restored)
    assert torch.equal(first, second)


def _save_on_rank(rank: int, world: int, folder: str) -> None:
    checkpointer = Checkpointer(Path(folder), FITS)
    rows = torch.arange(rank * 4.0, rank * 4.0 + 4).reshape(4, 1)
    for step in (1, 2):
        checkpointer.save(step, {"student.w": torch.full((2,), 1.0 + rank)}, Block(rank * 4, {"z": rows + step}), {})
    checkpointer.wait()
    found, _ = checkpointer.latest()
    assert found is not None
    assert found.counters["step"] == 2


def test_saved_on_two_ranks_loaded_on_any(tmp_path: Path) -> None:
    run_processes(2, _save_on_rank, str(tmp_path))
    found, _ = Checkpointer(tmp_path, FITS).latest()
    assert found is not None
    rows = torch.cat([block.tensors["z"] for block in found.rows(0, 8)])
    assert torch.equal(rows[:, 0], torch.arange(8.0) + 2)
    assert [block.start for block in found.rows(3, 5)] == [3, 4]
    assert json.loads((tmp_path / "step-000002.1" / "state.json").read_text())["fits"] == FITS
    assert torch.equal(found.tensors()["student.w"], torch.ones(2))  # rank 0's copy of what all hold alike
