"""A disk that is really full, and one that is read-only: a sentence; with room, the same command goes on to the same end."""

import os
from pathlib import Path

import pytest

from tests.support.disk import SmallDisk
from tests.support.moments import Trials
from tests.support.prediction import write_model
from tests.support.training import make_data, options, tiny

NAME = "within-chapman@0.2.s20.ecgmatch"


def fill(disk: SmallDisk, leave: int) -> Path:
    """Fill the disk but for `leave` bytes."""
    filler = disk.seen(disk.folder / "filler")
    free = os.statvfs(filler.parent)
    filler.write_bytes(b"x" * (free.f_bavail * free.f_frsize - leave))
    return filler


@pytest.mark.slow
@pytest.mark.xdist_group("moments")
def test_a_full_disk_a_read_only_one_and_one_that_only_tensorboard_needs(tmp_path: Path) -> None:
    make_data(tmp_path)
    write_model(tmp_path / "model")
    settings = {key: value for key, value in options(tiny(tmp_path, Path("runs"))).items() if key != "runs"}
    train = ["train", "--init", "scratch", *(f"--{key}={value}" for key, value in settings.items())]
    with SmallDisk(tmp_path / "disk", kib=20_000) as disk:
        place = disk.folder / "here"
        trials = Trials(disk.inside)
        try:
            assert trials.run(train, tmp_path / "untouched")["said"] == ""
            whole = (tmp_path / "untouched/runs" / NAME / "best.safetensors").read_bytes()

            # In the middle of a run, while a checkpoint is written
            filler = fill(disk, leave=700_000)
            said = trials.run(train, place)["said"]
            assert said.startswith("ecgmatch: ")
            assert "No space left on device" in said
            assert "the same command goes on" in said
            filler.unlink()
            assert trials.run(train, place)["said"] == ""
            assert disk.seen(place / "runs" / NAME / "best.safetensors").read_bytes() == whole

            # Written at once: nothing of it stays
            filler = fill(disk, leave=8_000)
            export = ["export", str(tmp_path / "model"), "--to", "exported", "--no-onnx"]
            said = trials.run(export, place)["said"]
            assert "exported" in said
            assert "No space left on device; make room" in said
            assert [path.name for path in disk.seen(place).iterdir()] == ["runs"]
            filler.unlink()
            assert trials.run(export, place)["said"] == ""

            # Read-only
            disk.mount("ro")
            for command in ([*export[:3], "again", "--no-onnx"], [*train, "--tag", "again"]):
                assert "Read-only file system" in trials.run(command, place)["said"]
            disk.mount("rw")

            # TensorBoard's files alone are on the full disk: training goes on
            fill(disk, leave=4096)
            folder = tmp_path / "elsewhere/runs" / NAME
            folder.mkdir(parents=True)
            (folder / "tb").symlink_to(disk.folder)
            assert trials.run(train, tmp_path / "elsewhere")["said"] == ""
            assert (folder / "best.safetensors").read_bytes() == whole
            assert "TensorBoard's files cannot be written (No space left on device)" in (folder / "log.txt").read_text()
        finally:
            trials.close()
