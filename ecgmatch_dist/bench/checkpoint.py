"""Saving: the time that a run stands still for its checkpoints, against torch.save of the same state between two steps."""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from ecgmatch_dist.bench import Comparison, interleave, show
from ecgmatch_dist.checkpoint import Block, Checkpointer, pack_optimizer
from ecgmatch_dist.config import Model, Optim
from ecgmatch_dist.model import build_model
from ecgmatch_dist.schedule import build_optimizer


def run_state(rows: int, width: int, classes: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What a run of this size saves: student, teacher and optimiser; and the two banks."""
    model = build_model(classes, Model(width=width), seed=1)
    optimizer = build_optimizer(Optim(), model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    tensors = {f"{who}.{n}": t.detach() for who in ("student", "teacher") for n, t in model.state_dict().items()}
    bank = {"z": torch.randn(rows, width), "p": torch.rand(rows, classes), "age": torch.zeros(rows, dtype=torch.int64)}
    return tensors | pack_optimizer(optimizer), bank


def steps(count: int, seconds: float, save: Callable[[int], None]) -> None:
    """A training loop that computes for `seconds` a step, on all threads but in pieces, and saves in the middle."""
    x = torch.randn(256, 256)
    for step in range(1, count + 1):
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            x = torch.tanh(x @ x / 16)
        if step == count // 2:
            save(step)


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
    tensors, bank = run_state(rows, width, classes)
    size = sum(t.nbytes for t in (*tensors.values(), *bank.values())) / 2**20
    count = 12
    with tempfile.TemporaryDirectory(dir=to) as name:
        folder, number = Path(name), iter(range(1, 10**6))
        checkpointer = Checkpointer(folder / "ours", {})
        stalls: dict[str, list[float]] = {"ours": [], "torch.save": []}

        def timed(way: str, save: Callable[[], object]) -> Callable[[int], None]:
            def run(at: int) -> None:
                begin = time.perf_counter()
                save()
                stalls[way].append(time.perf_counter() - begin)

            return run

        def ours() -> None:
            checkpointer.save(next(number), tensors, Block(0, bank), {"step": 1})

        def theirs() -> None:
            torch.save({"state": tensors, "bank": bank}, folder / "theirs.pt")

        ways: dict[str, Callable[[], object]] = {
            "nothing": lambda: steps(count, step, lambda at: None),
            "ours": lambda: steps(count, step, timed("ours", ours)),
            "torch.save": lambda: steps(count, step, timed("torch.save", theirs)),
        }
        interleave(ways, repeats)
        checkpointer.wait()
    lost = {way: sorted(values)[len(values) // 2] for way, values in stalls.items()}
    note = "copied, then written and synced to disk behind the next steps; torch.save does not sync"
    ratio = lost["torch.save"] / lost["ours"]
    row = Comparison(
        "the loop stands still", "torch.save", 1e3 * lost["ours"], 1e3 * lost["torch.save"], "ms", ratio, note
    )
    show(f"A checkpoint of {size:.0f} MiB", [row], to=None)
    shares = {way: seconds / (200 * step) for way, seconds in lost.items()}
    print(
        f"A checkpoint every 200 steps of {step:g} s costs {shares['ours']:.3%} of the time, "
        f"torch.save {shares['torch.save']:.3%}"
    )
