"""Runs on two ranks, killed at random moments, also during saves, and compared with an undisturbed run. Not part of CI.

python -m tests.cluster.soak 1000 soak      (kills, and a folder; the same command goes on where it was stopped)

Three runs at a time are killed fifty times each. One line of soak/runs.jsonl per run that has ended, and the last line that is
printed is their sum: kills, how many of them left an unfinished checkpoint or one without its pointer, starts, steps that were
lost or done twice, tensors that differ.
"""

import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
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
KILLS, AT_ONCE = 50, 3
"""Kills per run; runs at the same time: most of a kill is waiting for the other rank to notice."""
context = multiprocessing.get_context("forkserver")
starting = threading.Lock()


def run(rank: int, config: Config, store: str) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)  # type: ignore[attr-defined]
    train(config)
    dist.destroy_process_group()


def start(config: Config) -> list[Any]:
    """Both ranks, forked from a server that has imported everything: a start takes a second instead of half a minute."""
    config.runs.mkdir(exist_ok=True)
    store = str(config.runs / f"store-{time.time_ns()}")
    ranks = [context.Process(target=run, args=(rank, config, store)) for rank in range(2)]
    with starting:
        for process in ranks:
            process.start()
    return ranks


def finish(ranks: list[Any]) -> bool:
    for process in ranks:
        process.join()
    return all(process.exitcode == 0 for process in ranks)


def newest(place: Path) -> Path | None:
    return max((place / "checkpoints").glob("step-*"), key=generation_and_step, default=None)


def strike(ranks: list[Any], place: Path, before: Path | None, rng: random.Random) -> None:
    """Kill one rank or both after the next checkpoint: half of the time during a save, else at a random moment."""
    aimed = rng.random() < 0.5
    while newest(place) == before and all(process.is_alive() for process in ranks):
        time.sleep(0.002)
    time.sleep(rng.uniform(0, 0.3))
    while aimed and not any(place.glob("copies/*/unfinished-*")) and all(process.is_alive() for process in ranks):
        time.sleep(0.0005)
    for process in ranks if rng.random() < 0.5 else [rng.choice(ranks)]:  # a rank that loses the other ends, too
        if process.is_alive():
            os.kill(process.pid, signal.SIGKILL)


def torture(config: Config, kills: int, rng: random.Random) -> dict[str, int]:
    """Kill the run `kills` times, each time after a new checkpoint; then let it finish."""
    counts, place = Counter(kills=0), config.runs / NAME
    while counts["kills"] < kills and not (place / "result.json").exists():
        ranks = start(config)
        strike(ranks, place, newest(place), rng)
        finish(ranks)
        # On a machine with much else to do, a rank may take the other for lost, and end before it is killed.
        struck = any(process.exitcode == -signal.SIGKILL for process in ranks)
        counts["kills" if struck else "not killed"] += 1
        assert counts["not killed"] < ATTEMPTS + kills, f"{config.runs}: it does not get on"
        # Both ranks have ended: what is unfinished was interrupted by the kill.
        unfinished = any(place.glob("copies/*/unfinished-*"))
        latest, last = place / "checkpoints" / "latest", newest(place)
        unpointed = last is not None and not (latest.exists() and latest.read_text().strip() == last.name)
        counts["in a save"] += unfinished
        counts["before its pointer"] += unpointed
        where = ", in a save" if unfinished or unpointed else ""
        print(f"{config.runs.name}: kill {counts['kills']}/{kills}: {last and last.name}{where}", flush=True)
    for _ in range(ATTEMPTS):  # the same, at the end
        if (place / "result.json").exists():
            break
        finish(start(config))
    counts["starts"] = len(list((place / "generations").iterdir()))
    return dict(counts)


def compare(one: Path, two: Path) -> dict[str, int]:
    a, b = final_state(one), final_state(two)
    results = [json.loads((run / "result.json").read_text())["test"] for run in (one, two)]
    lost = len(set(steps_of(one)) ^ set(steps_of(two))) + len(steps_of(two)) - len(set(steps_of(two)))
    different = sum(name not in b or not torch.equal(a[name], b[name]) for name in a) + (results[0] != results[1])
    return {"runs": 1, "lost": lost, "different": different, "tensors": len(a)}


def one_run(config: Config, folder: Path, number: int, kills: int) -> None:
    """A run that is killed, compared, and told in runs.jsonl. What a harness that was killed itself has left is removed."""
    own = folder / f"killed-{number}"
    shutil.rmtree(own, ignore_errors=True)
    counts = torture(replace(config, runs=own), kills, random.Random(number))
    told = {"number": number, **counts, **compare(folder / "untouched" / NAME, own / NAME)}
    with starting, (folder / "runs.jsonl").open("a") as file:
        file.write(json.dumps(told) + "\n")
    if not told["lost"] + told["different"]:  # else it stays, to be looked at
        shutil.rmtree(own)


def runs_of(folder: Path) -> list[dict[str, int]]:
    file = folder / "runs.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def sum_of(folder: Path) -> Counter[str]:
    total = Counter[str]()
    for told in runs_of(folder):
        total.update({name: count for name, count in told.items() if name != "number"})
    return total


def main(kills: int, folder: Path) -> None:
    context.set_forkserver_preload(["ecgmatch_dist.train", "torch._dynamo"])
    folder.mkdir(exist_ok=True)
    if not (folder / "split.json").exists():
        make_data(folder)
    optim = Optim(steps=4 * KILLS, labelled_batch=8, unlabelled_batch=16)
    # A short timeout: the surviving rank waits a fifth of it for the other one's heartbeat.
    runtime = Runtime(device="cpu", log_every=1, save_every=1, readers=1, threads=1, timeout_minutes=0.5)
    evaluate = Evaluate(every=10, batch=64, patience=10**6)
    config = tiny(folder, folder / "untouched", optim=optim, init="scratch", runtime=runtime, evaluate=evaluate)
    untouched = replace(config, runtime=replace(runtime, save_every=0, timeout_minutes=10.0))
    while not (folder / "untouched" / NAME / "result.json").exists():
        finish(start(untouched))
    while (total := sum_of(folder))["kills"] < kills:
        missing, done = -(-(kills - total["kills"]) // KILLS), {run["number"] for run in runs_of(folder)}
        numbers = [number for number in range(len(done) + missing) if number not in done]
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(lambda number: one_run(config, folder, number, min(KILLS, kills)), numbers))
    print(json.dumps(total))
    sys.exit(total["lost"] + total["different"] > 0)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
