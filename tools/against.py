"""Did a change make training steps slower? This tree against another checkout of the project, step by step in turns.

    git worktree add ../before COMMIT
    python tools/against.py ../before                       # every method on one rank, ECGMatch on two
    python tools/against.py ../before --only ecgmatch dst --processes 5 --unlabelled-batch 32

Both trees run in the same environment, with the batches of `ecgmatch bench methods`. Only one of them computes at a time. Each
line is a method: the median of the ratios new / old over all turns, by the clock and by computing time. Where a process finds
its memory changes a step by 10 %, so each method gets several pairs of processes, and the line ends with their range."""

import argparse
import os
import subprocess
import sys
import tempfile
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
Times = tuple[float, float]
"""Seconds of a step by the clock, and of computing."""
WORKER = f"import runpy; runpy.run_path({__file__!r})['work']()"


def work() -> None:
    """A rank of one tree, which takes a step at each order. The folder in which it runs is its tree."""
    import time
    from dataclasses import replace

    import torch
    import torch.distributed as dist

    from ecgmatch_dist.bench import methods as bench
    from ecgmatch_dist.presets import cpu

    with Client(os.environ["ORDERS"]) as orders:
        rank, world, threads, store, labelled, unlabelled, rows = orders.recv()
        torch.set_num_threads(threads)
        if world > 1:
            dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=world)
        base = cpu()
        base = replace(base, optim=replace(base.optim, labelled_batch=labelled, unlabelled_batch=unlabelled))
        fixmatch = next(value for name, value in vars(bench).items() if name in ("FixMatchSettings", "FixMatch"))
        known: dict[str, Any] = {"fixmatch": (fixmatch(), 1)}
        known |= {name: (method, first) for name, method, first in bench.lines(base.optim.steps)}
        orders.send(list(known))
        steps: Any = None
        while (order := orders.recv()) is not None:
            if order != "step":
                method, first = known[order]
                steps = bench.Steps(replace(base, method=method), 1024, rows, first)
                continue
            clock, computed = time.perf_counter(), time.process_time()
            steps.step()
            orders.send((time.perf_counter() - clock, time.process_time() - computed))


class Tree:
    """The ranks of one tree."""

    def __init__(self, tree: Path, world: int, options: argparse.Namespace, folder: Path) -> None:
        self.ranks: list[Connection] = []
        self.processes = []
        for rank in range(world):
            address = str(folder / f"{len(list(folder.iterdir()))}.socket")
            with Listener(address) as listener:
                own = {**os.environ, "ORDERS": address, "PYTHONPATH": str(tree), "GLOO_SOCKET_IFNAME": "lo"}
                self.processes.append(subprocess.Popen([sys.executable, "-c", WORKER], cwd=tree, env=own))
                pipe = listener.accept()
            sizes = options.labelled_batch, options.unlabelled_batch, options.rows
            pipe.send((rank, world, options.threads // world, folder / f"store-{tree.name}-{world}", *sizes))
            self.ranks.append(pipe)
        self.known: list[str] = [pipe.recv() for pipe in self.ranks].pop()

    def take(self, method: str) -> None:
        for pipe in self.ranks:
            pipe.send(method)

    def step(self) -> Times:
        """Seconds by the clock of the slower rank, and computing time of all."""
        for pipe in self.ranks:
            pipe.send("step")
        clocks, computed = zip(*(pipe.recv() for pipe in self.ranks), strict=True)
        return max(clocks), sum(computed)

    def end(self) -> None:
        for pipe, process in zip(self.ranks, self.processes, strict=True):
            pipe.send(None)
            process.wait()


def compare(new: Tree, old: Tree, method: str, repeats: int) -> list[tuple[Times, Times]]:
    """Times of the new and of the old step in each turn."""
    for tree in (new, old):
        tree.take(method)
    # Who begins changes with each turn: the second finds a warmer processor.
    turns = [[tree.step() for tree in ((new, old) if turn % 2 else (old, new))] for turn in range(repeats + 1)]
    ordered = [pair if turn % 2 else pair[::-1] for turn, pair in enumerate(turns)]
    return [(ours, theirs) for ours, theirs in ordered[1:]]  # the first is a warm-up


def show(world: int, method: str, pairs: list[list[tuple[Times, Times]]]) -> None:
    """A line: the medians over all turns, and the range of the medians over the pairs of processes."""
    turns = [turn for pair in pairs for turn in pair]
    clock, computed = (median(ours[i] / theirs[i] for ours, theirs in turns) for i in (0, 1))
    each = [median(ours[1] / theirs[1] for ours, theirs in pair) for pair in pairs]
    print(
        f"{world} rank{'s' if world > 1 else ' '}  {method:30} {1e3 * median(ours[0] for ours, _ in turns):6.0f} ms   "
        f"new / old {clock:.2f}, of computing time {computed:.2f} ({min(each):.2f} to {max(each):.2f})",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="the other tree")
    parser.add_argument("--only", nargs="+", default=[], help="methods; all without it")
    parser.add_argument("--processes", type=int, default=3, help="pairs of processes")
    parser.add_argument("--repeats", type=int, default=3, help="turns of each pair")
    parser.add_argument("--labelled-batch", type=int, default=64)
    parser.add_argument("--unlabelled-batch", type=int, default=128)
    parser.add_argument("--rows", type=int, default=66_000, help="unlabelled recordings, which is rows of the bank")
    parser.add_argument("--threads", type=int, default=2, help="of all ranks together")
    options = parser.parse_args()
    if not (options.before / "ecgmatch_dist" / "bench" / "methods.py").is_file():
        sys.exit(f"{options.before}: no tree of this project that has `ecgmatch bench methods`")
    print(
        f"load {os.getloadavg()[0]:.1f}; {options.processes} pairs of processes, {options.repeats} turns each",
        flush=True,
    )
    for world in (1, 2):
        found: dict[str, list[list[tuple[Times, Times]]]] = {}
        for _ in range(options.processes):
            with tempfile.TemporaryDirectory() as folder:
                new, old = (Tree(tree.resolve(), world, options, Path(folder)) for tree in (ROOT, options.before))
                both = [name for name in new.known if name in old.known and (not options.only or name in options.only)]
                for method in both if world == 1 else [name for name in both if name == "ecgmatch"]:
                    found.setdefault(method, []).append(compare(new, old, method, options.repeats))
                for tree in (new, old):
                    tree.end()
        for method, pairs in found.items():
            show(world, method, pairs)


if __name__ == "__main__":
    main()
