"""Watching a run: TensorBoard, the same numbers as JSON lines, a progress bar on a terminal and plain lines in the log."""

import json
import logging
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter

from ecgmatch_dist.errors import UserError
from ecgmatch_dist.fence import Fence


def main(runs: Path = Path("runs"), port: int = 6006, host: str = "127.0.0.1") -> None:
    """Open TensorBoard on a folder of runs.

    Args:
        runs: The folder of run folders, or one run folder.
        port: Where to serve.
        host: Address to listen on; the default is this machine alone.
    """
    if not any(runs.glob("**/tb")):
        raise UserError(f"{runs}: no run with TensorBoard files here; --runs names the folder of runs")
    print(f"TensorBoard on http://{host}:{port} for {runs} (Ctrl-C ends it)", flush=True)
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(runs), "--port", str(port), "--host", host]
    sys.exit(subprocess.call(command))


class Monitor:
    """Rank 0's eyes. On other ranks, and after `close`, every call does nothing."""

    def __init__(self, folder: Path, active: bool, steps: int, fence: Fence) -> None:
        self.folder, self.active, self.steps, self.title, self.fence = folder, active, steps, folder.name, fence
        self.console = Console(stderr=True)
        self.progress: Progress | None = None
        self.started = False
        if active:
            path = folder / "log.txt"
            # A new file: what an older copy of the run adds to the one that it has open is seen by nobody.
            if path.exists():
                fence.write(path, lambda temporary: shutil.copyfile(path, temporary))
            self.log = path.open("a", encoding="utf-8")
            # Warnings of the parts (a search backend left out, a recall too low) belong to the record.
            self.handler = logging.StreamHandler(self.log)
            self.handler.setFormatter(logging.Formatter("%(asctime)s  %(levelname)s %(message)s", "%Y-%m-%d %H:%M:%S"))
            logging.getLogger("ecgmatch_dist").addHandler(self.handler)

    def start(self, step: int) -> None:
        """Begin to record behind `step`, the last one that counts: 0, or the checkpoint's."""
        if not self.active:
            return
        self.started = True
        forget_after(self.folder / "metrics.jsonl", step, self.fence)
        self.file = (self.folder / "metrics.jsonl").open("a", encoding="utf-8")
        # purge_step hides what lies in older files beyond the last checkpoint, also if it comes late: one curve.
        self.board = SummaryWriter(str(self.folder / "tb"), purge_step=step + 1)
        if self.console.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[note]}"),
            )
            self.progress = Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=self.console)
            self.task = self.progress.add_task(self.title, total=self.steps, completed=step, note="")
            self.progress.start()

    def say(self, text: str) -> None:
        """One line in the log and on the screen."""
        if not self.active:
            return
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        print(f"{stamp}  {text}", file=self.log, flush=True)
        screen = self.progress.console if self.progress else self.console
        screen.print(f"{self.title}: {text}", highlight=False, markup=False, soft_wrap=True)

    def scalars(self, step: int, kind: str, values: dict[str, float]) -> None:
        """The numbers of a step, by name, to TensorBoard and the JSON lines."""
        if not self.active:
            return
        record = {"step": step, "time": round(time.time(), 3), "kind": kind, **values}
        print(json.dumps(record), file=self.file, flush=True)
        for name, value in values.items():
            group = name if "/" in name else f"{kind}/{name}"
            self.board.add_scalar(group, value, step)

    def tick(self, step: int, values: dict[str, float]) -> None:
        """Progress: the bar on a terminal, a line in the log."""
        if not self.active:
            return
        note = "  ".join(f"{name} {values[name]:.4g}" for name in ("loss", "lr", "time/step") if name in values)
        print(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  step {step}/{self.steps}  {note}", file=self.log, flush=True)
        if self.progress:
            self.progress.update(self.task, completed=step, note=note)
        elif step % 100 == 0:
            self.console.print(
                f"{self.title}: step {step}/{self.steps}  {note}", highlight=False, markup=False, soft_wrap=True
            )

    def curves(
        self, step: int, classes: list[str], labels: NDArray[np.uint8], probabilities: NDArray[np.float32]
    ) -> None:
        """Precision-recall curve of each class."""
        if self.active:
            for c, name in enumerate(classes):
                self.board.add_pr_curve(f"precision_recall/{name}", labels[:, c], probabilities[:, c], step)

    def views(self, step: int, views: dict[str, Tensor]) -> None:
        """Leads II and V2 of the first recording of the batch, in each view."""
        if not self.active:
            return
        figure = Figure(figsize=(10, 1.6 * len(views)), layout="constrained")
        for axis, (name, x) in zip(figure.subplots(len(views), 1, squeeze=False)[:, 0], views.items(), strict=True):
            signal = x[0].float().cpu().numpy()
            axis.plot(signal[1], lw=0.7, label="II")
            axis.plot(signal[7] - 8, lw=0.7, label="V2")
            axis.set_ylabel(name)
            axis.set_yticks([])
        self.board.add_figure("views", figure, step)

    def matrices(self, step: int, classes: list[str], R_b: Tensor, R_u: Tensor) -> None:
        """The two label-correlation matrices side by side."""
        if not self.active:
            return
        figure = Figure(figsize=(8, 3.6), layout="constrained")
        for axis, name, matrix in zip(figure.subplots(1, 2), ("R_b", "R_u"), (R_b, R_u), strict=True):
            values = matrix.float().cpu().numpy()
            axis.imshow(values, vmin=0, vmax=1, cmap="viridis")
            axis.set_title(name)
            axis.set_xticks(range(len(classes)), classes, rotation=45)
            axis.set_yticks(range(len(classes)), classes)
            for i, j in np.ndindex(*values.shape):
                axis.text(
                    j,
                    i,
                    f"{values[i, j]:.2f}",
                    ha="center",
                    va="center",
                    color="w" if values[i, j] < 0.6 else "k",
                    fontsize=7,
                )
        self.board.add_figure("correlation", figure, step)

    def close(self) -> None:
        if not self.active:
            return
        self.active = False
        logging.getLogger("ecgmatch_dist").removeHandler(self.handler)
        if self.progress:
            self.progress.stop()
        for file in (self.log, *((self.board, self.file) if self.started else ())):
            with suppress(OSError):  # a full disk: the error that ended the run is already under way
                file.close()


def forget_after(path: Path, step: int, fence: Fence) -> None:
    """Drop the records beyond `step`: the resumed run writes them again. A line cut by a kill is dropped too. It is a new file
    in any case, as log.txt is."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record: dict[str, Any] = json.loads(line)
        except ValueError:
            continue
        if record["step"] <= step:
            kept.append(line)
    fence.write_text(path, "".join(f"{line}\n" for line in kept))


def memory_gib(device: torch.device) -> float:
    """Peak memory of this rank so far: of its device, or resident in main memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
