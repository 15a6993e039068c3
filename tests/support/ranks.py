"""Run a function on W ranks: as threads of this process (fast) or as processes with gloo (realistic)."""

import multiprocessing
import os
import pickle
import socket
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.multi_threaded_pg

c10d: Any = torch._C._distributed_c10d
threaded: Any = torch.testing._internal.distributed.multi_threaded_pg
PRELOADED = [
    # All that a training imports, sooner or later, and what modules of tests import.
    "tests.support.training",
    "torch._dynamo",
    "torch.testing._internal.distributed.multi_threaded_pg",
    "matplotlib.backends.backend_agg",
    "pytest",
    "hypothesis",
]


def run_threads(world: int, fn: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
    """Results of fn(rank, world, *args) in rank order; each rank is a thread with its own default process group.

    Collectives, `dist.new_group`, DDP and backward work as usual. The first exception is raised here. The threads share torch's
    random generator: draw data before, or with a torch.Generator of your own.
    """
    results: list[Any] = [None] * world
    errors: list[tuple[int, BaseException]] = []
    store = c10d.HashStore()

    def body(rank: int) -> None:
        dist.init_process_group("threaded", rank=rank, world_size=world, store=store)
        try:
            results[rank] = fn(rank, world, *args)
            dist.barrier()
        except BaseException as error:
            errors.append((rank, error))
            threaded.ProcessLocalGroup.exception_handle(error)  # wakes the ranks that wait for this one
        finally:
            dist.destroy_process_group()

    def join(seconds: float) -> list[int]:
        end = time.monotonic() + seconds
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
        return [rank for rank, thread in enumerate(threads) if thread.is_alive()]

    c10d._set_thread_isolation_mode(True)
    threaded._install_threaded_pg()
    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(world)]
    try:
        for thread in threads:
            thread.start()
        if stuck := join(timeout):
            errors.append((stuck[0], TimeoutError(f"ranks {stuck} of {world} did not finish within {timeout} s")))
            threaded.ProcessLocalGroup.exception_handle(errors[0][1])
            join(5.0)
    finally:
        threaded._uninstall_threaded_pg()
        threaded.ProcessLocalGroup.reset()
        c10d._set_thread_isolation_mode(False)
    for rank, error in errors:
        if not isinstance(error, SystemExit):  # the threaded group stops the other ranks with it
            error.add_note(f"on rank {rank} of {world} (threads)")
            raise error
    return results


def _process(rank: int, world: int, folder: Path, fn: Callable[..., Any], args: tuple[Any, ...], limit: float) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    try:
        store = c10d.FileStore(str(folder / "store"), world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=limit))
        result = fn(rank, world, *args)
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        (folder / f"{rank}.error").write_text(traceback.format_exc())
        raise SystemExit(1) from None
    (folder / f"{rank}.result").write_bytes(pickle.dumps(result))


def fork_server() -> Any:
    """The context of processes that start in a fraction of a second: a server has imported what is slow, and forks.

    The first process of a test worker starts the server; what it imports can no longer be changed then.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def run_processes(world: int, fn: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
    """Results of fn(rank, world, *args) in rank order; each rank is a process with gloo over a file store.

    fn must be at the top level of a module; its arguments and result are pickled. The first rank that fails ends the others.
    """
    context = fork_server()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        processes = [
            context.Process(target=_process, args=(rank, world, folder, fn, args, timeout / 2)) for rank in range(world)
        ]
        for process in processes:
            process.start()
        end = time.monotonic() + timeout
        try:
            while running := [process for process in processes if process.is_alive()]:
                if not wait([process.sentinel for process in running], timeout=max(0.0, end - time.monotonic())):
                    raise TimeoutError(f"{len(running)} of {world} ranks did not finish within {timeout} s")
                if any(process.exitcode for process in processes):
                    break
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()
        if codes := [process.exitcode for process in processes if process.exitcode]:
            text = "\n".join(f"rank {path.stem}: {path.read_text()}" for path in sorted(folder.glob("*.error")))
            raise RuntimeError(f"{world} ranks, exit codes {codes}\n{text}")
        return [pickle.loads((folder / f"{rank}.result").read_bytes()) for rank in range(world)]


def free_port() -> str:
    """A free port of this machine."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return str(s.getsockname()[1])
