"""More ranks: bytes per step in each placement of the bank, throughput of two ranks against one, share of the bank's work."""

import importlib
import json as json_
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from ecgmatch_dist.bank.memory import MemoryBank, step_bytes
from ecgmatch_dist.bank.search import Candidates
from ecgmatch_dist.bench.methods import CLASSES, Steps
from ecgmatch_dist.bench.search import random_rows
from ecgmatch_dist.distributed.collectives import all_gather, rank, traffic, world
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.presets import cpu

DIM, K, QUERIES = 128, 5, 448
LENGTH = 1024  # of the cpu preset's shards
CHUNK = 1 << 15  # rows gathered at a time, to save memory


@dataclass(frozen=True)
class Moved:
    """Bytes received per rank and step."""

    ranks: int
    kind: str
    rows: int
    way: str
    counted: int
    """By the code, from the sizes that it passes to the collectives."""
    sent: int | None
    """By the kernel, with two processes: one sends what the other receives, plus a few hundred bytes of headers."""
    formula: int
    least: int
    """What would still have to move if each row went only to its owner and scores were fp32."""


def ways(world: int) -> dict[str, int | None]:
    """Placement -> its shard group L; None: no exchange, the whole bank is gathered."""
    node = max(1, world // 2)
    return {
        "(a) whole bank gathered": None,
        "(b) replicated": 1,
        "(c) sharded over all": world,
        f"(d) sharded in 2 nodes of {node}": node,
    }


def formula(world: int, rows: int, group: int | None) -> tuple[int, int]:
    """The bytes that the code should move, and the least possible."""
    if group is None:
        count = (world - 1) * -(-rows // world) * 4 * (DIM + CLASSES)
        return count, count
    b, copies = QUERIES // world, world // group
    row = 8 + 4 * DIM + 4 * CLASSES
    to_owners = (copies - 1) * b * row + (group - 1) * copies * b * row // group
    least = to_owners + (group - 1) * b * (4 * DIM + K * (12 + 4 * CLASSES))
    return sum(step_bytes(QUERIES, DIM, CLASSES, K, world, group).values()), least


class NoSearch:
    """Returns zeros: only bytes are counted, and they do not depend on the neighbours found."""

    name = "none"

    def search(self, q: Tensor, z: Tensor, k: int) -> Candidates:
        return Candidates(torch.zeros(len(q), k, dtype=torch.float64), torch.zeros(len(q), k, dtype=torch.int64))

    def changed(self, z: Tensor, rows: Tensor) -> None:
        pass


def written() -> int:
    """Bytes that this process has written to sockets and files, counted by the kernel."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("wchar"))


def count_bytes(rank: int, world: int, rows: int, group: int | None) -> tuple[int, int]:
    """Bytes that this rank receives in a step, and bytes that its process sends."""
    bank = MemoryBank(rows, DIM, CLASSES, K, QUERIES, group or world, backend="torch", overlap=False)
    bank.searcher = NoSearch()  # type: ignore[assignment]
    b = QUERIES // world
    z = random_rows(b, DIM, rank)
    if world > 1:
        dist.barrier()
    traffic.reset()
    before = written()
    if group is None:
        block = torch.cat([bank.z[:-1], bank.p[:-1]], 1)
        block = F.pad(block, (0, 0, 0, -(-rows // world) - len(block)))  # the last block may be shorter
        for part in torch.split(block, CHUNK):
            all_gather(part, name="whole bank")
    else:
        bank.exchange(torch.arange(b) + rank * b, z, z[:, :CLASSES], z, 0).result()
    sent = written() - before
    return sum(traffic.received().values()), sent


def on_threads(world: int, work: Callable[[int], tuple[int, int]]) -> list[tuple[int, int]]:
    """Run work(rank) on `world` ranks, which are threads that exchange real data."""
    threaded: Any = importlib.import_module("torch.testing._internal.distributed.multi_threaded_pg")
    c10d: Any = torch._C._distributed_c10d
    store, results = c10d.HashStore(), [(-1, -1)] * world

    def body(rank: int) -> None:
        dist.init_process_group("threaded", rank=rank, world_size=world, store=store)
        results[rank] = work(rank)
        dist.barrier()
        dist.destroy_process_group()

    c10d._set_thread_isolation_mode(True)
    threaded._install_threaded_pg()
    threads = [Thread(target=body, args=(rank,), daemon=True) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    threaded._uninstall_threaded_pg()
    c10d._set_thread_isolation_mode(False)
    return results


def count_process(rank: int, world: int, folder: str, rows: tuple[int, ...]) -> None:
    torch.set_num_threads(1)
    join(rank, world, folder)
    counts = [count_bytes(rank, world, n, group) for n in rows for group in ways(world).values()]
    if rank == 0:
        Path(f"{folder}/counts").write_text(json_.dumps(counts))
    dist.barrier()
    dist.destroy_process_group()


def join(rank: int, world: int, folder: str) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    limit = timedelta(minutes=10)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=world, timeout=limit)


def bench_bytes(rows: tuple[int, ...], world: int, kind: str) -> list[Moved]:
    """Every placement at every size. All ranks move the same bytes, so those of rank 0 are returned."""
    places = [(n, way, group) for n in rows for way, group in ways(world).items()]
    if kind == "processes" and world > 1:
        with tempfile.TemporaryDirectory(prefix="ecgmatch-bench-") as folder:
            spawn(count_process, (world, folder, rows), nprocs=world)  # type: ignore[no-untyped-call]
            counts = json_.loads(Path(f"{folder}/counts").read_text())
    elif world == 1:
        counts = [count_bytes(0, 1, n, group) for n, _, group in places]
    else:
        counts = [on_threads(world, lambda r, n=n, g=g: count_bytes(r, world, n, g))[0] for n, _, g in places]  # type: ignore[misc]
    return [
        Moved(world, kind, n, way, counted, sent if kind == "processes" else None, *formula(world, n, group))
        for (n, way, group), (counted, sent) in zip(places, counts, strict=True)
    ]


class ECGMatchSteps(Steps):
    """Steps of ECGMatch in the cpu preset. The bank is searched in the background, or within the step."""

    def __init__(self, rows: int) -> None:
        config = cpu()
        super().__init__(config, LENGTH, rows)
        width, batch, overlapped = config.model.width, config.optim.unlabelled_batch, self.learner.bank
        assert overlapped is not None
        self.banks = {True: overlapped, False: MemoryBank(rows, width, CLASSES, K, batch, world(), overlap=False)}
        for bank in self.banks.values():
            bank.z[:-1] = random_rows(bank.length, width, rank())

    def timed(self, overlap: bool) -> tuple[float, float, float]:
        """Seconds of a step, and of its search and its exchange."""
        start = time.perf_counter()
        bank = self.learner.bank = self.banks[overlap]
        self.step()
        seconds = time.perf_counter() - start
        return seconds, bank.times()["time/search"], bank.times()["time/exchange"]


def work_process(rank: int, world: int, threads: int, folder: str, rows: int, orders: Connection) -> None:
    """A rank that takes a step on each order, so that two groups of ranks can share the machine in turns."""
    torch.set_num_threads(threads)
    if world > 1:
        join(rank, world, folder)
    steps = ECGMatchSteps(rows)
    while (overlap := orders.recv()) is not None:
        orders.send(steps.timed(overlap))


def bench_throughput(rows: int, repeats: int) -> dict[str, float]:
    """One rank with two threads alternates with two ranks with one thread each, step by step."""
    context = torch.multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="ecgmatch-bench-") as folder:
        places = {"one": [(0, 1, 2)], "two": [(0, 2, 1), (1, 2, 1)]}
        orders: dict[str, list[Connection]] = {name: [] for name in places}
        processes = []
        for name, ranks in places.items():
            for place in ranks:
                ours, theirs = context.Pipe()
                orders[name].append(ours)
                processes.append(context.Process(target=work_process, args=(*place, folder, rows, theirs), daemon=True))
                processes[-1].start()
        times: dict[tuple[str, bool], list[tuple[float, float, float]]] = {}
        for turn in range(repeats + 1):
            for overlap in (True, False):
                for name, pipes in orders.items():
                    for pipe in pipes:
                        pipe.send(overlap)
                    seconds = max(pipe.recv() for pipe in pipes)  # the slower rank decides
                    if turn:  # the first is a warm-up
                        times.setdefault((name, overlap), []).append(seconds)
        for pipes in orders.values():
            for pipe in pipes:
                pipe.send(None)
        for process in processes:
            process.join()
    steps = {key: median(step for step, _, _ in values) for key, values in times.items()}
    ratios = [one[0] / two[0] for one, two in zip(times["one", True], times["two", True], strict=True)]
    apart = times["two", False]
    return {
        "seconds per step, one rank with two threads": steps["one", True],
        "seconds per step, two ranks with one thread": steps["two", True],
        "throughput of two ranks over one": median(ratios),
        "share of the search, two ranks, not overlapped": median(search / step for step, search, _ in apart),
        "share of the exchange, two ranks, not overlapped, waiting included": median(
            move / step for step, _, move in apart
        ),
        "share of both": median((search + move) / step for step, search, move in apart),
        "step with overlap over step without, two ranks": steps["two", True] / steps["two", False],
    }


def main(
    rows: tuple[int, ...] = (66_000, 1_000_000),
    bank: int = 66_000,
    repeats: int = 7,
    parts: tuple[str, ...] = ("bytes", "throughput"),
    json: Path | None = None,
) -> None:
    """Bytes per rank in each placement of the bank, counted; two ranks against one rank with two threads, timed.

    Args:
        rows: Rows of the bank where bytes are counted.
        bank: Rows of the bank where steps are timed.
        repeats: Turns per timing; the median counts.
        parts: bytes, throughput, or both.
        json: Write the numbers to this file.
    """
    if repeats < 1 or min(*rows, bank) < QUERIES or not set(parts) <= {"bytes", "throughput"}:
        raise UserError(
            f"--repeats {repeats} --rows {rows} --bank {bank} --parts {parts}: "
            f"at least 1; at least {QUERIES}; at least {QUERIES}; bytes, throughput or both"
        )
    console, moved, timed = Console(), list[Moved](), dict[str, float]()
    if "bytes" in parts:
        for world, kind in ((1, "processes"), (2, "processes"), (4, "threads"), (8, "threads")):
            moved += bench_bytes(rows, world, kind)
        table = Table("ranks", "rows", "way", title=f"bytes received per rank and step, {QUERIES} queries, D = {DIM}")
        for name in ("counted", "sent (kernel)", "formula", "least possible"):
            table.add_column(name, justify="right")
        for x in moved:
            values = x.counted, x.sent, x.formula, x.least
            numbers = ("" if value is None else f"{value:,}" for value in values)
            table.add_row(f"{x.ranks} {x.kind}", f"{x.rows:,}", x.way, *numbers)
        console.print(table)
        wrong = [x for x in moved if x.counted != x.formula]
        console.print(f"{len(moved) - len(wrong)} of {len(moved)} counts equal their formula", highlight=False)
    if "throughput" in parts:
        timed = bench_throughput(bank, repeats)
        load = os.getloadavg()[0]
        console.print(
            f"steps of ECGMatch in the cpu preset, bank of {bank:,} rows, medians of {repeats} turns on "
            f"{os.cpu_count()} cores with a load of {load:.1f}:",
            highlight=False,
        )
        for name, value in timed.items():
            console.print(f"  {value:8.3f}  {name}", highlight=False)
    if json is not None:
        json.write_text(json_.dumps({"bytes": [asdict(x) for x in moved], "times": timed}, indent=1) + "\n")
