"""A run folder that two nodes share, each with stale names and sizes, as over NFS: a killed run goes on at once on the other
node, and a copy that still runs is fenced off."""

import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.moments import Trials
from tests.support.shared_disk import REMEMBERED, SharedDisk
from tests.support.training import make_data, options, tiny

NAME = "within-chapman@0.2.s20.ecgmatch"

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("moments")]


def train(data: Path, **changes: Any) -> list[str]:
    settings = {key: value for key, value in options(tiny(data, Path("runs"))).items() if key != "runs"}
    return ["train", "--init", "scratch", *(f"--{key}={value}" for key, value in (settings | changes).items())]


def weights(place: Path) -> bytes:
    return (place / "runs" / NAME / "best.safetensors").read_bytes()


def test_the_mounts_are_as_stale_as_they_should_be(tmp_path: Path) -> None:
    """Else the other test would show nothing."""
    text = (
        "import os, sys, time; a, b = sys.argv[1:]; seen = [os.path.exists(f'{b}/x')]; open(f'{a}/x', 'w').write('one');"
        f"seen += [os.path.exists(f'{{b}}/x')]; time.sleep({REMEMBERED} + 0.5); seen += [open(f'{{b}}/x').read()];"
        "file = open(f'{a}/x'); os.unlink(f'{a}/x'); seen += [len(os.listdir(a))]; print(*seen)"
    )
    with SharedDisk(tmp_path) as disk:
        command = disk.inside(["python3", "-c", text, str(disk.a), str(disk.b)])
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False", "one", "1"]


def test_a_run_is_killed_on_one_node_and_goes_on_on_the_other(tmp_path: Path) -> None:
    make_data(tmp_path)
    with SharedDisk(tmp_path / "disk") as disk:
        one, two = Trials(disk.inside), Trials(disk.inside)
        try:
            command = train(tmp_path)
            untouched = one.run(command, tmp_path / "untouched")
            assert untouched["said"] == ""
            whole, last = weights(tmp_path / "untouched"), untouched["changes"]
            for i, moment in enumerate((last // 3, 2 * last // 3)):
                # The other node has looked at the folder just before: what it remembers is old.
                two.run(["report", "runs", "--out", "nowhere"], disk.b / str(i))
                assert one.run(command, disk.a / str(i), moment, "kill")["said"] == "signal 9"
                assert two.run(command, disk.b / str(i))["said"] == ""
                assert weights(disk.server / str(i)) == whole

            # Both at once: the older copy ends with a sentence, the newer one with the same weights.
            slow = train(tmp_path, **{"runtime.save-every": 1, "optim.steps": 60})
            assert one.run(slow, tmp_path / "slow")["said"] == ""
            said: list[str] = []
            older = threading.Thread(target=lambda: said.append(one.run(slow, disk.a / "both")["said"]))
            older.start()
            begun = disk.server / "both/runs" / NAME / "checkpoints"
            while not any(begun.glob("step-*")):
                assert older.is_alive(), said
                time.sleep(0.02)
            assert two.run(slow, disk.b / "both")["said"] == ""
            older.join(60)
            assert "a newer copy of this run has taken over (generation 2" in said[0]
            assert weights(disk.server / "both") == weights(tmp_path / "slow")
        finally:
            one.close()
            two.close()
