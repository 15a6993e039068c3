"""Checkpoints: complete or absent, re-sharded on load, refused if of another run, skipped if damaged."""

import os
import re
import resource
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ecgmatch_dist.bank.memory import MemoryBank
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.network.optim import pack_optimizer, unpack_optimizer
from ecgmatch_dist.recovery.checkpoint import Checkpoint, Checkpointer, link_or_copy
from ecgmatch_dist.recovery.dcp import Rows
from tests.support.ranks import run_processes

MUST_MATCH = {"configuration": "a", "split": "b"}


def save(folder: Path, step: int, value: float = 0.0, best: Path | None = None) -> Checkpointer:
    checkpointer = Checkpointer(folder, MUST_MATCH)
    rows = Rows(torch.arange(12.0).reshape(6, 2) + value, 6, None)
    checkpointer.save(step, {"student": {"w": torch.full((3,), value)}, "bank": {"z": rows}}, {"seconds": 1.5}, best)
    checkpointer.wait()
    return checkpointer


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    found, notes = save(tmp_path, 10, 2.0).latest()
    assert found is not None
    assert notes == []
    assert found.counters == {"step": 10, "seconds": 1.5}
    tensors = found.load({"bank.z": Rows(torch.empty(6, 2), 6, None)})
    assert torch.equal(tensors["student.w"], torch.full((3,), 2.0))
    assert torch.equal(tensors["bank.z"], torch.arange(12.0).reshape(6, 2) + 2)


def test_tensors_of_any_kind_survive(tmp_path: Path) -> None:
    """Scalar, empty, of other types, and not contiguous."""
    state = {
        "count": torch.tensor(7),
        "chosen": torch.tensor([True, False]),
        "none": torch.empty(0, 3),
        "double": torch.tensor([0.1], dtype=torch.float64),
        "half": torch.tensor([0.1], dtype=torch.bfloat16),
        "weights": torch.randn(4, 5, 1, 3).to(memory_format=torch.channels_last),
        "part": torch.arange(10)[2:5],
    }
    checkpointer = Checkpointer(tmp_path, MUST_MATCH)
    checkpointer.save(1, {"student": state, "method": {}}, {})
    checkpointer.wait()
    found, _ = checkpointer.latest()
    assert found is not None
    loaded = found.load({})
    assert loaded.keys() == {f"student.{name}" for name in state}
    for name, tensor in state.items():
        assert loaded[f"student.{name}"].dtype == tensor.dtype
        assert torch.equal(loaded[f"student.{name}"], tensor), name


def test_a_checkpoint_holds_numbers_and_json(tmp_path: Path) -> None:
    """Nothing in it can execute code: DCP's default format would contain a pickle."""
    save(tmp_path, 5)
    files = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file())
    assert files == ["latest", "step-000005.1/state.json", "step-000005.1/state/rank-00000.safetensors"]


def test_the_kept_model_belongs_to_the_checkpoint(tmp_path: Path) -> None:
    best = tmp_path / "best.safetensors"
    best.write_text("of step 4")
    checkpointer = save(tmp_path / "checkpoints", 5, best=best)
    best.unlink()  # writers replace the file, they never change it
    best.write_text("of step 8")
    found, _ = checkpointer.latest()
    assert found is not None
    assert found.best is not None
    assert found.best.read_text() == "of step 4"
    found.best.write_text("damaged!!")
    assert "best.safetensors has the wrong checksum" in checkpointer.latest()[1][0]


def test_the_copy_is_taken_when_save_is_called(tmp_path: Path) -> None:
    checkpointer, tensor, best = Checkpointer(tmp_path, MUST_MATCH), torch.zeros(1_000_000), {"checks_since": 0}
    checkpointer.save(1, {"student": {"w": tensor}}, {"best": best})
    tensor.fill_(1.0)
    best["checks_since"] = 1
    checkpointer.wait()
    found, _ = checkpointer.latest()
    assert found is not None
    assert found.counters["best"] == {"checks_since": 0}
    assert found.load({})["student.w"].sum() == 0


def test_a_run_on_cpus_leaves_gpus_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA would make a context on the first GPU for every rank."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: pytest.fail("touched CUDA"))
    assert save(tmp_path, 1).latest()[0] is not None


def test_the_last_two_are_kept(tmp_path: Path) -> None:
    for step in (5, 10, 15):
        save(tmp_path, step)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-000010.1", "step-000015.1"]


def test_the_best_model_is_copied_to_another_file_system(tmp_path: Path) -> None:
    other = Path("/dev/shm")
    if not other.is_dir() or other.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("no second file system here")
    (tmp_path / "best").write_text("1")
    with tempfile.TemporaryDirectory(dir=other) as folder:
        for content in ("1", "2"):  # the second time the target exists
            (tmp_path / "best").write_text(content)
            link_or_copy(tmp_path / "best", Path(folder) / "copy")
            assert (Path(folder) / "copy").read_text() == content


def flip(path: Path, at: int) -> None:
    """Flip one bit."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["state.json", "state/rank-00000.safetensors"])
@pytest.mark.parametrize("damage", ["cut", "gone", "middle", "end", "number", "nested"])
def test_a_damaged_checkpoint_is_skipped_with_a_note(tmp_path: Path, name: str, damage: str) -> None:
    save(tmp_path, 5, 1.0)
    checkpointer = save(tmp_path, 10, 2.0)
    victim = tmp_path / "step-000010.1" / name
    if damage == "gone":
        victim.unlink()
    elif damage == "cut":
        victim.write_bytes(victim.read_bytes()[:-7])
    elif damage in ("number", "nested"):
        victim.write_text("1e99" if damage == "number" else "[" * 100_000)
    else:
        flip(victim, victim.stat().st_size // 2 if damage == "middle" else -3)
    found, notes = checkpointer.latest()
    assert found is not None
    assert found.counters["step"] == 5
    assert "step-000010.1 is damaged" in notes[0]
    assert torch.equal(found.load({})["student.w"], torch.ones(3))


def test_a_damaged_checkpoint_does_not_displace_an_intact_one(tmp_path: Path) -> None:
    """A run resumed from step 5 saves step 10 while a damaged step 20 is there: steps 5 and 10 are kept."""
    save(tmp_path, 5)
    (save(tmp_path, 20).folder / "step-000020.1" / "state.json").write_text("")
    checkpointer = Checkpointer(tmp_path, MUST_MATCH)
    found, _ = checkpointer.latest()
    assert found is not None
    assert found.counters["step"] == 5
    checkpointer.save(10, {"student": {"w": torch.zeros(3)}}, {})
    checkpointer.wait()
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-000005.1", "step-000010.1"]


def test_the_pointer_names_the_latest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 5)
    checkpointer = save(tmp_path, 10)
    assert (tmp_path / "latest").read_text() == "step-000010.1\n"
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter(()))  # a stale listing
    found, notes = checkpointer.latest()
    assert found is not None
    assert (found.folder.name, notes) == ("step-000010.1", [])


@pytest.mark.parametrize(
    ("pointer", "note"),
    [
        (None, "latest names no checkpoint"),
        ("", "latest names no checkpoint"),
        ("step-0000", "latest names no checkpoint"),
        ("step-000099.1\n", "step-000099.1 is damaged"),
    ],
)
def test_without_a_valid_pointer_the_newest_intact_one_is_used(tmp_path: Path, pointer: str | None, note: str) -> None:
    save(tmp_path, 5)
    checkpointer = save(tmp_path, 10)
    (tmp_path / "latest").unlink() if pointer is None else (tmp_path / "latest").write_text(pointer)
    found, notes = checkpointer.latest()
    assert found is not None
    assert found.counters["step"] == 10
    assert len(notes) == 1
    assert note in notes[0]


def test_a_stale_pointer_loses_nothing(tmp_path: Path) -> None:
    """The run was killed between a checkpoint and its pointer."""
    save(tmp_path, 5)
    checkpointer = save(tmp_path, 10)
    (tmp_path / "latest").write_text("step-000005.1\n")
    found, notes = checkpointer.latest()
    assert found is not None
    assert (found.counters["step"], notes) == (10, [])


def test_an_unfinished_checkpoint_is_ignored(tmp_path: Path) -> None:
    checkpointer = save(tmp_path, 5)
    shutil.copytree(tmp_path / "step-000005.1", tmp_path / "unfinished-000010")
    found, _ = checkpointer.latest()
    assert found is not None
    assert found.counters["step"] == 5


def test_folders_with_other_names_are_left_alone(tmp_path: Path) -> None:
    save(tmp_path, 5)
    for name in ("step-000005.1.good", "step-000005.1 (copy)", "step-old"):
        shutil.copytree(tmp_path / "step-000005.1", tmp_path / name)
    for step in (10, 15):
        checkpointer = save(tmp_path, step)
    found, notes = checkpointer.latest()
    assert found is not None
    assert (found.counters["step"], notes) == (15, [])
    assert len(list(tmp_path.glob("step-*"))) == 2 + 3


def test_a_checkpoint_of_another_split_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 5)
    with pytest.raises(UserError, match="another split"):
        Checkpointer(tmp_path, MUST_MATCH | {"split": "c"}).latest()


def test_a_checkpoint_of_another_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ecgmatch_dist.recovery.checkpoint.FORMAT", 1)
    save(tmp_path, 5)
    monkeypatch.undo()
    with pytest.raises(UserError, match="another version of ecgmatch_dist: finish the run with that one"):
        Checkpointer(tmp_path, MUST_MATCH).latest()


def test_no_checkpoint(tmp_path: Path) -> None:
    assert Checkpointer(tmp_path, MUST_MATCH).latest() == (None, [])


def without_a_folder(root: Path) -> Checkpointer:
    checkpointer = Checkpointer(root / "checkpoints", MUST_MATCH)
    shutil.rmtree(root / "checkpoints")
    (root / "checkpoints").write_text("a file where the folder was")
    return checkpointer


def test_an_error_in_the_background_is_raised(tmp_path: Path) -> None:
    checkpointer = without_a_folder(tmp_path)
    checkpointer.save(1, {"student": {"w": torch.zeros(1)}}, {})
    with pytest.raises(UserError, match=r"could not be written: rank 0: \[Errno 20\] Not a directory"):
        checkpointer.wait()


def test_an_error_in_the_background_is_raised_by_the_next_save(tmp_path: Path) -> None:
    checkpointer = without_a_folder(tmp_path)
    checkpointer.save(1, {"student": {"w": torch.zeros(1)}}, {})
    with pytest.raises(UserError, match=r"could not be written: rank 0: \[Errno 20\] Not a directory"):
        checkpointer.save(2, {"student": {"w": torch.zeros(1)}}, {})


def test_a_best_model_that_cannot_be_kept_is_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "best").write_text("weights")
    with pytest.raises(UserError, match=r"could not be written: \[Errno 20\] Not a directory"):
        without_a_folder(tmp_path).save(1, {"student": {"w": torch.zeros(1)}}, {}, tmp_path / "best")


def test_all_of_it_is_on_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a best model that was copied, where links are not possible."""
    synced: list[str] = []
    fsync, folder = os.fsync, tmp_path / "checkpoints"

    def noted(handle: int) -> None:
        synced.append(os.path.relpath(os.readlink(f"/proc/self/fd/{handle}"), folder))
        fsync(handle)

    def no_links(*_: object) -> None:
        raise OSError("no links here")

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(os, "link", no_links)
    (tmp_path / "best").write_text("weights")
    save(folder, 5, best=tmp_path / "best")
    before = {"unfinished-000005.best", "unfinished-000005/state/rank-00000.safetensors"}
    before |= {"unfinished-000005/state", "unfinished-000005"}
    assert before <= set(synced[: synced.index(".")])  # the folder itself is synced after the rename


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    "kind", [lambda p, f: torch.optim.SGD(p, 0.1, 0.9, fused=f), lambda p, f: torch.optim.AdamW(p, 0.1, fused=f)]
)
def test_the_optimiser_survives(kind: object, fused: bool) -> None:
    """Also for weights that are not contiguous."""
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


def bank_of(shard_group: int) -> MemoryBank:
    return MemoryBank(7, dim=2, classes=1, k=1, batch=4, shard_group=shard_group, backend="torch", overlap=False)


def rows_of(bank: MemoryBank) -> dict[str, Rows]:
    return {name: Rows(t, bank.rows, bank.within) for name, t in bank.state().items()}


WHOLE = {"z": torch.arange(14.0).reshape(7, 2), "p": torch.arange(7.0)[:, None] / 7, "written": torch.arange(7) * 3}


def _save_on_rank(rank: int, world: int, folder: str, shard_group: int) -> None:
    bank, checkpointer = bank_of(shard_group), Checkpointer(Path(folder), MUST_MATCH)
    bank.load({name: whole[bank.start : bank.stop] for name, whole in WHOLE.items()})
    rows = rows_of(bank) if bank.is_first_replica else {}
    for step in (1, 2):
        checkpointer.save(step, {"student": {"w": torch.full((2,), 1.0 + rank)}, "bank": rows}, {})
    checkpointer.wait()


def _load_on_rank(rank: int, world: int, folder: str, shard_group: int) -> None:
    found, _ = Checkpointer(Path(folder), MUST_MATCH).latest()
    assert found is not None
    bank = bank_of(shard_group)
    tensors = found.load({f"bank.{name}": rows for name, rows in rows_of(bank).items()})
    bank.load({name: tensors[f"bank.{name}"] for name in WHOLE})
    for name, own in bank.state().items():
        assert torch.equal(own, WHOLE[name][bank.start : bank.stop]), (name, rank)
    assert torch.equal(tensors["student.w"], torch.ones(2))  # replicated state is saved from rank 0


@pytest.mark.parametrize(("world", "shard_group", "files"), [(1, 1, 1), (5, 5, 5), (4, 2, 2), (3, 1, 1)])
def test_saved_on_some_ranks_loaded_on_any(tmp_path: Path, world: int, shard_group: int, files: int) -> None:
    """Also with an empty last block. Each row is written once, whatever the number of replicas."""
    run_processes(world, _save_on_rank, str(tmp_path), shard_group)
    assert len(list((tmp_path / "step-000002.1" / "state").iterdir())) == files
    loaded = Checkpoint(tmp_path / "step-000002.1", {}).load({})  # without a group: unsharded
    for name, whole in WHOLE.items():
        assert torch.equal(loaded[f"bank.{name}"], whole)
    for other, other_group in ((1, 1), (2, 2), (4, 2), (5, 5)):
        run_processes(other, _load_on_rank, str(tmp_path), other_group)


def _save_with_a_limit(rank: int, world: int, folder: str) -> str:
    """The second rank may not write files of more than 100 bytes."""
    checkpointer, bank = Checkpointer(Path(folder), MUST_MATCH), bank_of(2)
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, usual[1]))
    checkpointer.save(1, {"bank": rows_of(bank)}, {})
    try:
        with pytest.raises(UserError) as caught:
            checkpointer.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    return str(caught.value)


def test_an_error_of_one_rank_is_reported_by_all(tmp_path: Path) -> None:
    messages = run_processes(2, _save_with_a_limit, str(tmp_path))
    assert re.search("could not be written: rank 1: .*File too large", messages[0])
    assert messages[0] == messages[1]
    assert list(tmp_path.glob("step-*")) == []
