"""`python tests/cluster/soak.py KILLS`: one run on two ranks, killed at KILLS random moments, saves included; then compared
with the run that nobody touched. Outside CI: 50 kills take about as long as 50 starts.

    PYTHONPATH=.:tests:tests/cluster python tests/cluster/soak.py 50
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harm import ROOT, SETTINGS, assert_same_bits
from shard_factory import make_shards, random_codes
from test_train import learnable

from ecgmatch_dist.data.splits import make_split
from ecgmatch_dist.data.store import ShardStore

NAME = "within-chapman@0.2.s20.ecgmatch"


def make_data(folder: Path) -> None:
    codes = random_codes(200)
    make_shards(folder / "shards", "chapman", 200, 128, codes, signals=learnable(codes, 128), per_shard=64)
    make_split(ShardStore(folder / "shards", ["chapman"]), "within", 0.2, 20, "ecgmatch5").save(folder / "split.json")


def command(folder: Path, runs: str, steps: int) -> list[str]:
    settings = SETTINGS | {"optim.steps": steps, "runtime.save_every": 2, "evaluate.every": 5, "init": "scratch"}
    flags = [f"--{key.replace('_', '-')}={value}" for key, value in settings.items()]
    where = [f"--split={folder / 'split.json'}", f"--shards={folder / 'shards'}", f"--runs={folder / runs}"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    return [*torchrun, "-m", "ecgmatch_dist.train", *where, *flags]


def start(folder: Path, runs: str, steps: int) -> "subprocess.Popen[bytes]":
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    quiet = subprocess.DEVNULL
    return subprocess.Popen(command(folder, runs, steps), env=environment, stderr=quiet)


def newest_step(folder: Path) -> int:
    steps = [int(path.name.split("-")[1].split(".")[0]) for path in (folder / "checkpoints").glob("step-*")]
    return max(steps, default=0)


def main(kills: int, seed: int = 1) -> None:
    steps = 8 * kills  # so that each start gets a few steps further, and the last kill still hits a run at work
    random.seed(seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_data(folder)
        print(f"untouched: {steps} steps", flush=True)
        assert start(folder, "untouched", steps).wait() == 0
        run, done, in_a_save = folder / "killed" / NAME, 0, 0
        while done < kills:
            process = start(folder, "killed", steps)
            before = newest_step(run)
            while newest_step(run) < before + 2 and process.poll() is None:  # it is at work again
                time.sleep(0.005)
            time.sleep(random.uniform(0, 0.6))
            if process.poll() is not None:
                break
            in_a_save += any((run / "checkpoints").glob("unfinished-*"))
            kill(process)
            process.wait()
            done += 1
            print(f"kill {done}/{kills}: at step {newest_step(run)}", flush=True)
        if not (run / "result.json").exists():
            assert start(folder, "killed", steps).wait() == 0
        assert_same_bits(folder / "untouched" / NAME, run)
        generations = len(list((run / "generations").iterdir()))
        print(json.dumps({"kills": done, "in the middle of a save": in_a_save, "starts": generations, "different": 0}))
        shutil.rmtree(folder / "killed")


def kill(agent: "subprocess.Popen[bytes]") -> None:
    """All at once, or one rank, which ends the others."""
    ranks = [int(pid) for pid in Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()]
    for pid in [agent.pid, *ranks] if random.random() < 0.5 else [random.choice(ranks)]:
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]))
