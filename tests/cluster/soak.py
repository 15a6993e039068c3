"""One run on two ranks, killed at random moments, also during saves, and compared with an undisturbed run. Not part of CI.

python -m tests.cluster.soak 50 25      (kills, and the time limit in minutes)

The last line is the summary: kills, how many of them left an unfinished checkpoint or one without its pointer, lost steps,
tensors that differ.
"""

import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from ecgmatch_dist.config import Config, Evaluate, Optim, Runtime
from ecgmatch_dist.recovery.checkpoint import generation_and_step
from ecgmatch_dist.train import train
from tests.cluster.harm import steps_of
from tests.support.training import final_state, make_data, tiny

NAME = "within-chapman@0.2.s20.ecgmatch"
ATTEMPTS = 20
context = multiprocessing.get_context("forkserver")


def run(rank: int, config: Config, store: str) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)  # type: ignore[attr-defined]
    train(config)
    dist.destroy_process_group()


def start(config: Config, folder: Path) -> list[Any]:
    """Both ranks, forked from a server that has imported everything: a start takes a second instead of half a minute."""
    store = str(folder / f"store-{time.time_ns()}")
    ranks = [context.Process(target=run, args=(rank, config, store)) for rank in range(2)]
    for process in ranks:
        process.start()
    return ranks


def finish(ranks: list[Any]) -> bool:
    for process in ranks:
        process.join()
    return all(process.exitcode == 0 for process in ranks)


def newest(place: Path) -> Path | None:
    return max((place / "checkpoints").glob("step-*"), key=generation_and_step, default=None)


def strike(ranks: list[Any], place: Path, before: Path | None) -> None:
    """Kill one rank or both after the next checkpoint: half of the time during a save, else at a random moment."""
    aimed = random.random() < 0.5
    while newest(place) == before and all(process.is_alive() for process in ranks):
        time.sleep(0.002)
    time.sleep(random.uniform(0, 0.3))
    while aimed and not any(place.glob("copies/*/unfinished-*")) and all(process.is_alive() for process in ranks):
        time.sleep(0.0005)
    for process in ranks if random.random() < 0.5 else [random.choice(ranks)]:  # a rank that loses the other ends, too
        if process.is_alive():
            os.kill(process.pid, signal.SIGKILL)


def torture(config: Config, folder: Path, kills: int, until: float) -> dict[str, int]:
    """Kill the run `kills` times, each time after a new checkpoint; then let it finish."""
    done, in_a_save, without_pointer, place = 0, 0, 0, config.runs / NAME
    while done < kills and not (place / "result.json").exists() and time.monotonic() < until:
        ranks = start(config, folder)
        strike(ranks, place, newest(place))
        finish(ranks)
        done += 1
        # Both ranks have ended: what is unfinished was interrupted by the kill.
        unfinished = any(place.glob("copies/*/unfinished-*"))
        latest, last = place / "checkpoints" / "latest", newest(place)
        unpointed = last is not None and not (latest.exists() and latest.read_text().strip() == last.name)
        in_a_save, without_pointer = in_a_save + unfinished, without_pointer + unpointed
        print(
            f"kill {done}/{kills}: {last and last.name}{', in a save' if unfinished or unpointed else ''}", flush=True
        )
    for _ in range(ATTEMPTS):  # on a machine with much else to do, a rank may take another one for lost
        if (place / "result.json").exists():
            break
        finish(start(config, folder))
    starts = len(list((place / "generations").iterdir()))
    return {"kills": done, "in a save": in_a_save, "before its pointer": without_pointer, "starts": starts}


def main(kills: int, minutes: float, seed: int = 1) -> None:
    random.seed(seed)
    context.set_forkserver_preload(["ecgmatch_dist.train", "torch._dynamo"])
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_data(folder)
        optim = Optim(steps=3 * kills, labelled_batch=8, unlabelled_batch=16)
        # A short timeout: the surviving rank waits a fifth of it for the other one's heartbeat.
        runtime = Runtime(device="cpu", log_every=1, save_every=1, readers=1, threads=1, timeout_minutes=0.5)
        evaluate = Evaluate(every=10, batch=64, patience=10**6)
        config = tiny(folder, folder / "untouched", optim=optim, init="scratch", runtime=runtime, evaluate=evaluate)
        assert finish(start(replace(config, runtime=replace(runtime, save_every=0)), folder))
        alone = time.monotonic() - began
        print(f"the untouched run: {alone:.0f} s", flush=True)
        counts = torture(replace(config, runs=folder / "killed"), folder, kills, began + 60 * minutes - 2 * alone)
        one, two = folder / "untouched" / NAME, folder / "killed" / NAME
        a, b = final_state(one), final_state(two)
        results = [json.loads((run / "result.json").read_text())["test"] for run in (one, two)]
        lost = len(set(steps_of(one)) ^ set(steps_of(two))) + len(steps_of(two)) - len(set(steps_of(two)))
        different = sum(name not in b or not torch.equal(a[name], b[name]) for name in a) + (results[0] != results[1])
        seconds = round(time.monotonic() - began)
        print(json.dumps({**counts, "lost": lost, "different": different, "of tensors": len(a), "seconds": seconds}))
    sys.exit(lost + different > 0)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
