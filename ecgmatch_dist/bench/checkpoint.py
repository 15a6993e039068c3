"""Saving: how long a checkpoint stops the training loop, against torch.save and against async_save of
torch.distributed.checkpoint with its defaults."""

import itertools
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import async_save

from ecgmatch_dist.bench import Comparison, show
from ecgmatch_dist.config import Model, Optim
from ecgmatch_dist.network.model import build_model
from ecgmatch_dist.network.optim import build_optimizer, pack_optimizer
from ecgmatch_dist.recovery.checkpoint import Checkpointer
from ecgmatch_dist.recovery.dcp import Parts


def run_state(rows: int, width: int, classes: int) -> dict[str, dict[str, Tensor]]:
    """The checkpoint of a run of this size: student, teacher, optimiser and the two banks."""
    model = build_model(classes, Model(width=width), seed=1)
    optimizer = build_optimizer(Optim(), model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    weights = {name: t.detach() for name, t in model.state_dict().items()}
    bank = {"z": torch.randn(rows, width), "p": torch.rand(rows, classes), "written": torch.zeros(rows).long()}
    return {"student": weights, "teacher": weights, "optimizer": pack_optimizer(optimizer), "bank": bank}


def run_steps(count: int, seconds: float, save: Callable[[], "Future[Any] | None"]) -> dict[str, float]:
    """A loop that computes for `seconds` per step and saves once in the middle. Returns how long the save stopped it ("stall"),
    and the longest time between two of its operations while the files are written ("pause")."""
    x, pause, stall, saving = torch.randn(64, 64), 0.0, 0.0, None
    for step in range(count):
        if step == count // 2:
            begin = time.perf_counter()
            saving = save()
            stall = time.perf_counter() - begin
        now = time.perf_counter()
        end = now + seconds
        while now < end:
            x = torch.tanh(x @ x / 8)
            before, now = now, time.perf_counter()
            if step >= count // 2:
                pause = max(pause, now - before)
    if saving:
        saving.result()
    return {"stall": stall, "pause": pause}


def measure(state: Parts, folder: Path, seconds: float, repeats: int) -> dict[str, dict[str, float]]:
    """Stall and longest pause of each way of saving, medians in milliseconds; the ways alternate."""
    checkpointer, number = Checkpointer(folder / "ours", {}), itertools.count(1)

    def ours() -> "Future[Any] | None":
        checkpointer.save(next(number), state, {})
        return checkpointer.saving

    def plain() -> "Future[Any] | None":
        torch.save(state, folder / "theirs.pt")
        return None

    def theirs() -> "Future[Any] | None":
        saving = async_save(dict(state), storage_writer=FileSystemWriter(folder / f"theirs-{next(number)}"))
        assert isinstance(saving, Future)
        return saving

    found: dict[str, list[dict[str, float]]] = defaultdict(list)
    for _ in range(repeats):
        for way, save in {"ours": ours, "torch.save": plain, "async_save": theirs}.items():
            found[way].append(run_steps(12, seconds, save))
    return {
        way: {kind: 1e3 * statistics.median(run[kind] for run in runs) for kind in ("stall", "pause")}
        for way, runs in found.items()
    }


def main(
    rows: int = 66_000, width: int = 128, classes: int = 5, step: float = 0.25, repeats: int = 5, to: Path | None = None
) -> None:
    """Time that a checkpoint of the paper's size costs on this machine.

    Args:
        rows: Rows of the memory banks (the four databases have 66,000 unlabelled recordings).
        width: Channels of the network and features of the banks.
        classes: Number of classes.
        step: Seconds per step.
        repeats: How often each way is measured.
        to: Folder on the file system to measure; default: the folder for temporary files.
    """
    torch.set_num_threads(
        max(1, len(os.sched_getaffinity(0)) - 1)
    )  # leave a core to the writing threads, as a GPU would
    state = run_state(rows, width, classes)
    size = sum(t.nbytes for part in state.values() for t in part.values()) / 2**20
    with tempfile.TemporaryDirectory(dir=to) as name:
        middle = measure(state, Path(name), step, repeats)

    def row(what: str, instead: str, kind: str, note: str) -> Comparison:
        ours, other = middle["ours"][kind], middle[instead][kind]
        return Comparison(what, instead, ours, other, "ms", other / ours, note)

    copied = "copied, then written and synced to disk in the background"
    comparisons = [
        row("stop of the loop", "torch.save", "stall", f"{copied}; torch.save does not sync"),
        row(
            "stop of the loop",
            "async_save",
            "stall",
            "torch.distributed.checkpoint with its defaults: new memory each time",
        ),
        row(
            "longest pause afterwards",
            "async_save",
            "pause",
            "between two operations of the loop, while files are written",
        ),
    ]
    show(f"A checkpoint of {size:.0f} MiB", comparisons, to=None)
    shares = {way: 1e-3 * middle[way]["stall"] / (200 * step) for way in middle}
    print(
        f"A checkpoint every 200 steps of {step:g} s costs {shares['ours']:.3%} of the time, "
        f"torch.save {shares['torch.save']:.3%}, async_save {shares['async_save']:.3%}"
    )
