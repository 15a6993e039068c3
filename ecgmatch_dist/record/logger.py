"""Output of a run: TensorBoard, the same numbers as JSON lines, log.txt, and a progress bar on a terminal."""

import logging
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from ecgmatch_dist.metrics import looked_at
from ecgmatch_dist.record.board import Board
from ecgmatch_dist.record.metrics_file import NAME, format_line, lines_until
from ecgmatch_dist.recovery.generations import Fence
from ecgmatch_dist.terminal.waiting import make_bar, time_left

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LINE_EVERY = 20.0  # seconds between two lines of steps where there is no terminal
T = TypeVar("T")


class RunLogger:
    """Logs on rank 0. On other ranks, and after `close`, every call does nothing."""

    def __init__(self, folder: Path, active: bool, steps: int, fence: Fence) -> None:
        self.folder, self.active, self.steps, self.title, self.fence = folder, active, steps, folder.name, fence
        self.console = Console(stderr=True)
        self.bar: Progress | None = None
        self.started = False
        self.told = 0.0  # when the last line of a step was printed
        self.begin: tuple[int, float] | None = None  # the first step that ended, and when
        if active:
            path = folder / "log.txt"
            # Replaced by a copy: an older copy of the run that still has the old file open writes to a deleted file.
            if path.exists():
                fence.write(path, lambda temporary: shutil.copyfile(path, temporary))
            self.log = path.open("a", encoding="utf-8")
            # Warnings of other modules (a wrong search backend, a low recall) go to log.txt too.
            self.handler = logging.StreamHandler(self.log)
            self.handler.setFormatter(logging.Formatter("%(asctime)s  %(levelname)s %(message)s", "%Y-%m-%d %H:%M:%S"))
            logging.getLogger("ecgmatch_dist").addHandler(self.handler)

    def start(self, step: int, place: str = "") -> None:
        """Start recording after `step`, the step of the checkpoint, or 0. `place`: which run of how many."""
        if not self.active:
            return
        self.started = True
        path = self.folder / NAME
        if path.exists():  # replaced, as log.txt is: nobody sees what an older copy of the run still appends to its own
            self.fence.write_text(path, lines_until(self.folder, step))
        self.file = path.open("a", encoding="utf-8")
        self.board = Board(self.folder / "tb", step, self.say)
        if self.console.is_terminal:
            self.bar = make_bar(self.console, note="note", transient=False)
            title = f"{self.title} ({place})" if place else self.title
            self.task = self.bar.add_task(title, total=self.steps, completed=step, note="")
            self.bar.start()

    def say(self, text: str) -> None:
        """Print one line to log.txt and to the terminal."""
        if not self.active:
            return
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        print(f"{stamp}  {text}", file=self.log, flush=True)
        screen = self.bar.console if self.bar else self.console
        screen.print(f"{self.title}: {text}", highlight=False, markup=False, soft_wrap=True)

    def scalars(self, step: int, kind: str, values: dict[str, float]) -> None:
        """Write the numbers of a step to TensorBoard and metrics.jsonl."""
        if not self.active:
            return
        print(format_line(step, kind, values), file=self.file, end="", flush=True)
        for name, value in values.items():
            group = name if "/" in name else f"{kind}/{name}"
            self.board("add_scalar", group, value, step)

    def moved(self, step: int) -> None:
        """Move the bar. `progress` comes every few steps: on a slow machine that would look like standing still."""
        # The time left is counted from the end of the first step: that one may have filled the bank.
        self.begin = self.begin or (step, time.monotonic())
        if self.bar:
            self.bar.update(self.task, completed=step)

    def progress(self, step: int, values: dict[str, float]) -> None:
        """Update the progress bar and write a line to log.txt. Without a terminal, print some of the lines."""
        if not self.active:
            return
        note = "  ".join(f"{name} {values[name]:.4g}" for name in ("loss", "lr", "time/step") if name in values)
        print(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  step {step}/{self.steps}  {note}", file=self.log, flush=True)
        if self.bar:
            self.bar.update(self.task, completed=step, note=note)
        elif time.monotonic() - self.told > LINE_EVERY or step == self.steps:
            self.told = time.monotonic()
            first, at = self.begin or (step, self.told)
            left = time_left(step - first, self.steps - step, self.told - at)
            line = f"{self.title}: step {step}/{self.steps}  {note}{f', {left} left' if left else ''}"
            self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def track(self, items: Iterable[T], what: str, total: int) -> Iterator[T]:
        """The items, with a second bar below that of the steps."""
        task = self.bar.add_task(what, total=total, note="") if self.bar else None
        try:
            for item in items:
                yield item
                if self.bar and task is not None:
                    self.bar.advance(task)
        finally:
            if self.bar and task is not None:
                self.bar.remove_task(task)

    def curves(
        self, step: int, classes: list[str], labels: NDArray[np.uint8], probabilities: NDArray[np.float32]
    ) -> None:
        """Precision-recall curve of each class, to TensorBoard."""
        if self.active:
            for c, name in enumerate(classes):
                y, p = looked_at(labels, probabilities, c)
                self.board("add_pr_curve", f"precision_recall/{name}", y, p, step)

    def images(self, step: int, classes: list[str], signals: dict[str, Tensor], matrices: dict[str, Tensor]) -> None:
        """Images of a method, to TensorBoard; see `methods.base.Images`."""
        if self.active and signals:
            self.board("add_figure", "views", draw_signals(signals), step)
        if self.active and matrices:
            self.board("add_figure", "correlation", draw_matrices(classes, matrices), step)

    def close(self) -> None:
        if not self.active:
            return
        self.active = False
        logging.getLogger("ecgmatch_dist").removeHandler(self.handler)
        if self.bar:
            self.bar.stop()
        for file in (self.log, *((self.board, self.file) if self.started else ())):
            with suppress(OSError):  # a full disk: the error that ended the run is already being raised
                file.close()


def memory_gib(device: torch.device) -> float:
    """Peak memory of this rank: of its GPU, or resident in main memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def draw_signals(signals: dict[str, Tensor]) -> "Figure":
    """Leads II and V2 of the first recording in each view [b, 12, T]."""
    from matplotlib.figure import Figure  # slow to import, and only rank 0 draws

    figure = Figure(figsize=(10, 1.6 * len(signals)), layout="constrained")
    for axis, (name, x) in zip(figure.subplots(len(signals), 1, squeeze=False)[:, 0], signals.items(), strict=True):
        signal = x[0].float().cpu().numpy()
        axis.plot(signal[1], lw=0.7, label="II")
        axis.plot(signal[7] - 8, lw=0.7, label="V2")
        axis.set_ylabel(name)
        axis.set_yticks([])
    return figure


def draw_matrices(classes: list[str], matrices: dict[str, Tensor]) -> "Figure":
    """Matrices [C, C] side by side."""
    from matplotlib.figure import Figure  # as above

    figure = Figure(figsize=(4 * len(matrices), 3.6), layout="constrained")
    for axis, (name, matrix) in zip(figure.subplots(1, len(matrices), squeeze=False)[0], matrices.items(), strict=True):
        values = matrix.float().cpu().numpy()
        axis.imshow(values, vmin=0, vmax=1, cmap="viridis")
        axis.set_title(name)
        axis.set_xticks(range(len(classes)), classes, rotation=45)
        axis.set_yticks(range(len(classes)), classes)
        for i, j in np.ndindex(*values.shape):
            color = "w" if values[i, j] < 0.6 else "k"
            axis.text(j, i, f"{values[i, j]:.2f}", ha="center", va="center", color=color, fontsize=7)
    return figure
