"""TensorBoard's files: a copy of metrics.jsonl for the eye. Where they cannot be written, training goes on."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter


class Board:
    """Calls of a SummaryWriter, until one fails because of the disk: that is told once, and later calls do nothing."""

    def __init__(self, folder: Path, step: int, say: Callable[[str], None]) -> None:
        """Begins after `step`."""
        self.folder, self.say, self.lost = folder, say, False
        self.writer: SummaryWriter | None = None
        self.usual_hook = threading.excepthook
        threading.excepthook = self._hook
        # purge_step hides later steps in older files, even if they are written after this: curves have no branches.
        self._try(lambda: setattr(self, "writer", SummaryWriter(str(folder), purge_step=step + 1)))

    def __call__(self, method: str, *arguments: Any) -> None:
        """Call a method of the SummaryWriter."""
        if self.writer is not None and not self.lost:
            self._try(lambda: getattr(self.writer, method)(*arguments))

    def close(self) -> None:
        self("close")
        threading.excepthook = self.usual_hook

    def _try(self, act: Callable[[], object]) -> None:
        try:
            act()
        except OSError as error:
            self.lost = True
            self.say(
                f"{self.folder}: TensorBoard's files cannot be written ({error.strerror or error}); training goes on, and "
                "metrics.jsonl has all numbers"
            )

    def _hook(self, failure: threading.ExceptHookArgs) -> None:
        """TensorBoard writes in a thread, whose error is raised by the next call, too: no traceback for it."""
        in_board = type(failure.thread).__module__.startswith("tensorboard.")
        if not (in_board and isinstance(failure.exc_value, OSError)):
            self.usual_hook(failure)
