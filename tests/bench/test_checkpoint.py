"""The benchmark of checkpoints: all ways save the same state, and the loop goes on meanwhile."""

from pathlib import Path

import pytest
import torch

from ecgmatch_dist.bench import checkpoint
from ecgmatch_dist.recovery.checkpoint import Checkpointer


def test_all_ways_save_the_same_state(tmp_path: Path) -> None:
    state = checkpoint.run_state(rows=20, width=8, classes=3)
    times = checkpoint.measure(state, tmp_path, seconds=0.001, repeats=1)
    assert times.keys() == {"ours", "torch.save", "async_save"}
    assert all(way["stall"] > 0 and way["pause"] > 0 for way in times.values())
    theirs = torch.load(tmp_path / "theirs.pt", weights_only=True)
    found, _ = Checkpointer(tmp_path / "ours", {}).latest()
    assert found is not None
    ours = found.load({})
    assert torch.equal(ours["bank.z"], theirs["bank"]["z"])
    assert {f"{part}.{name}" for part, tensors in theirs.items() for name in tensors} == ours.keys()


def test_the_command_prints_ratios_and_the_share_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint.main(rows=20, width=8, classes=3, step=0.001, repeats=1, to=tmp_path)
    told = capsys.readouterr().out
    assert "ratio" in told
    assert "A checkpoint every 200 steps of 0.001 s costs" in told
    assert not [*tmp_path.iterdir()]
