"""The background thread in which a rank searches its block of the bank."""

from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from weakref import finalize

import torch

from ecgmatch_dist.bank.search import Candidates
from ecgmatch_dist.distributed.session import use_device


class Worker:
    """One background thread that runs tasks in order. A daemon, so that the process can exit while a collective hangs."""

    def __init__(self, device: torch.device) -> None:
        self.tasks: SimpleQueue[tuple[Future[Candidates], Callable[[], Candidates]] | None] = SimpleQueue()
        Thread(target=self._run, args=(self.tasks, device), name="bank", daemon=True).start()
        finalize(self, self.tasks.put, None)

    @staticmethod
    def _run(
        tasks: "SimpleQueue[tuple[Future[Candidates], Callable[[], Candidates]] | None]", device: torch.device
    ) -> None:
        while task := tasks.get():
            future, work = task
            try:
                use_device(device)  # here, so that whoever waits hears of its error
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)
            del task, future, work  # or the tensors of a step would live until the next task

    def submit(self, work: Callable[[], Candidates]) -> "Future[Candidates]":
        future: Future[Candidates] = Future()
        self.tasks.put((future, work))
        return future
