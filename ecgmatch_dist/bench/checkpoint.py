"""Saving: the time that a run stands still for its checkpoints, against torch.save of the same state between two steps and
against torch.distributed.checkpoint as it comes."""

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
from ecgmatch_dist.checkpoint import Checkpointer
from ecgmatch_dist.config import Model, Optim
from ecgmatch_dist.dealt import Parts
from ecgmatch_dist.model import build_model
from ecgmatch_dist.schedule import build_optimizer, pack_optimizer


def run_state(rows: int, width: int, classes: int) -> dict[str, dict[str, Tensor]]:
    """What a run of this size saves: student, teacher, optimiser and the two banks."""
    model = build_model(classes, Model(width=width), seed=1)
    optimizer = build_optimizer(Optim(), model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    weights = {name: t.detach() for name, t in model.state_dict().items()}
    bank = {"z": torch.randn(rows, width), "p": torch.rand(rows, classes), "written": torch.zeros(rows).long()}
    return {"student": weights, "teacher": weights, "optimizer": pack_optimizer(optimizer), "bank": bank}


def steps(count: int, seconds: float, save: Callable[[], "Future[Any] | None"]) -> dict[str, float]:
    """A training loop that computes for `seconds` a step and saves in the middle: how long the save held it up, and the longest
    pause between two of its operations afterwards, when the files are being written."""
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
    """Stall and longest pause of each way of saving, in milliseconds, medians; the ways take turns."""
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
            found[way].append(steps(12, seconds, save))
    return {
        way: {kind: 1e3 * statistics.median(run[kind] for run in runs) for kind in ("stall", "pause")}
        for way, runs in found.items()
    }


def main(
    rows: int = 66_000, width: int = 128, classes: int = 5, step: float = 0.25, repeats: int = 5, to: Path | None = None
) -> None:
    """Time lost to a checkpoint of the paper's size, here.

    Args:
        rows: Rows of the memory banks (the four databases have 66,000 unlabelled recordings).
        width: Of the network and of the banks.
        classes: Number of classes.
        step: Seconds of a step.
        repeats: How often each way is measured.
        to: Folder to write into, on the file system that is meant; default: the temporary one.
    """
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) - 1))  # a core for those who write, as beside a GPU
    state = run_state(rows, width, classes)
    size = sum(t.nbytes for part in state.values() for t in part.values()) / 2**20
    with tempfile.TemporaryDirectory(dir=to) as name:
        middle = measure(state, Path(name), step, repeats)

    def row(what: str, instead: str, kind: str, note: str) -> Comparison:
        ours, other = middle["ours"][kind], middle[instead][kind]
        return Comparison(what, instead, ours, other, "ms", other / ours, note)

    copied = "copied, then written and synced to disk behind the next steps"
    comparisons = [
        row("the loop stands still", "torch.save", "stall", f"{copied}; torch.save does not sync"),
        row(
            "the loop stands still",
            "async_save",
            "stall",
            "torch.distributed.checkpoint as it comes: fresh memory each time",
        ),
        row(
            "longest pause behind it",
            "async_save",
            "pause",
            "between two operations of the loop while files are written",
        ),
    ]
    show(f"A checkpoint of {size:.0f} MiB", comparisons, to=None)
    shares = {way: 1e-3 * middle[way]["stall"] / (200 * step) for way in middle}
    print(
        f"A checkpoint every 200 steps of {step:g} s costs {shares['ours']:.3%} of the time, "
        f"torch.save {shares['torch.save']:.3%}, async_save {shares['async_save']:.3%}"
    )
