"""One run on two ranks, killed at random moments, saves included; then compared with the run that nobody touched. Outside CI.

PYTHONPATH=.:tests:tests/cluster python tests/cluster/soak.py 50
"""

import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from harm import assert_same_bits
from shard_factory import make_shards, random_codes
from test_train import learnable, tiny
from torch import distributed as dist

from ecgmatch_dist.config import Config, Evaluate, Optim, Runtime
from ecgmatch_dist.data.splits import make_split
from ecgmatch_dist.data.store import ShardStore
from ecgmatch_dist.distributed import session
from ecgmatch_dist.train import train

NAME = "within-chapman@0.2.s20.ecgmatch"
context = multiprocessing.get_context("forkserver")


def make_data(folder: Path) -> None:
    codes = random_codes(200)
    make_shards(folder / "shards", "chapman", 200, 128, codes, signals=learnable(codes, 128), per_shard=64)
    make_split(ShardStore(folder / "shards", ["chapman"]), "within", 0.2, 20, "ecgmatch5").save(folder / "split.json")


def run(rank: int, config: Config, store: str) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)  # type: ignore[attr-defined]
    with session("cpu") as ranks:
        train(config, ranks)
    dist.destroy_process_group()


def start(config: Config, folder: Path) -> list[Any]:
    """Both ranks, from a server that has imported everything: a start takes a second instead of half a minute."""
    store = str(folder / f"store-{time.time_ns()}")
    ranks = [context.Process(target=run, args=(rank, config, store)) for rank in range(2)]
    for process in ranks:
        process.start()
    return ranks


def finish(ranks: list[Any]) -> bool:
    for process in ranks:
        process.join()
    return all(process.exitcode == 0 for process in ranks)


def newest_step(folder: Path) -> int:
    names = [path.name for path in (folder / "checkpoints").glob("step-*")]
    return max((int(name.split("-")[1].split(".")[0]) for name in names), default=0)


def torture(config: Config, folder: Path, kills: int) -> dict[str, int]:
    """Kill the run so many times, each time after it has got a little further; then let it end."""
    done, in_a_save, place = 0, 0, config.runs / NAME
    while done < kills and not (place / "result.json").exists():
        before = newest_step(place)
        ranks = start(config, folder)
        while newest_step(place) <= before and all(process.is_alive() for process in ranks):
            time.sleep(0.002)
        time.sleep(random.uniform(0, 0.15))
        in_a_save += any((place / "checkpoints").glob("unfinished-*"))
        for process in ranks if random.random() < 0.5 else [random.choice(ranks)]:  # one rank's death ends the other
            if process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
        finish(ranks)
        done += 1
        print(f"kill {done}/{kills}: at step {newest_step(place)}", flush=True)
    if not (place / "result.json").exists():
        assert finish(start(config, folder))
    return {"kills": done, "in the middle of a save": in_a_save, "starts": len(list((place / "generations").iterdir()))}


def main(kills: int, seed: int = 1) -> None:
    random.seed(seed)
    context.set_forkserver_preload(["ecgmatch_dist.train", "torch._dynamo"])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_data(folder)
        optim = Optim(steps=8 * kills, labelled_batch=8, unlabelled_batch=16)
        runtime = Runtime(device="cpu", log_every=1, save_every=1, readers=1, threads=1)
        evaluate = Evaluate(every=5, batch=32, patience=10**6)
        config = tiny(folder, folder / "killed", optim=optim, init="scratch", runtime=runtime, evaluate=evaluate)
        counts = torture(config, folder, kills)
        print("now the same run, untouched", flush=True)
        untouched = tiny(folder, folder / "untouched", optim=optim, init="scratch", runtime=runtime, evaluate=evaluate)
        assert finish(start(untouched, folder))
        assert_same_bits(folder / "untouched" / NAME, folder / "killed" / NAME)
        print(json.dumps({**counts, "different": 0}))


if __name__ == "__main__":
    main(int(sys.argv[1]))
