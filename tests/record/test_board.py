"""TensorBoard's files cannot be written: it is told once, and whatever is written beside them goes on."""

import resource
from pathlib import Path

import pytest

from ecgmatch_dist.record.board import Board
from tests.support.training import final_state, run, tiny


def test_a_full_disk_is_told_once_and_without_a_traceback(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, usual[1]))
    try:
        board = Board(tmp_path / "tb", 0, said.append)
        for step in range(500):
            board("add_scalar", "loss", 0.5, step)
        board.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    assert len(said) == 1
    assert "tb: TensorBoard's files cannot be written (File too large); training goes on" in said[0]
    assert "Traceback" not in capfd.readouterr().err


def test_a_run_without_a_place_for_them_ends_as_any_other(data: Path, tmp_path: Path) -> None:
    whole = run(tiny(data, tmp_path / "whole", init="scratch"))
    folder = tmp_path / "runs" / whole.name
    folder.mkdir(parents=True)
    (folder / "tb").write_text("a file where the folder should be")
    run(tiny(data, tmp_path / "runs", init="scratch"))
    ours, theirs = final_state(folder), final_state(whole)
    assert all(theirs[name].equal(tensor) for name, tensor in ours.items())
    assert (folder / "log.txt").read_text().count("TensorBoard's files cannot be written") == 1
    assert (folder / "metrics.jsonl").read_text().count("\n") == (whole / "metrics.jsonl").read_text().count("\n")
