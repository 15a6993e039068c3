"""The ranks of a run: number and device of this process, and the process group."""

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from ecgmatch_dist.distributed.collectives import Group, world
from ecgmatch_dist.distributed.devices import pick_device
from ecgmatch_dist.errors import UserError

_timeout: timedelta | None = None  # of this session's groups; torch's default is half an hour


@dataclass(frozen=True)
class Ranks:
    """This process among the ranks."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    device: torch.device
    threads: int = 1
    """This rank's share of the cores."""

    @property
    def main(self) -> bool:
        """True on rank 0, which writes logs and files."""
        return self.rank == 0


def _environment() -> tuple[int, int, int, int]:
    """RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE as torchrun sets them; (0, 1, 0, 1) without torchrun."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    texts = [os.environ.get(name) for name in names]
    if not any(texts[:2]):
        return 0, 1, 0, 1
    for name, text in zip(names, texts, strict=True):
        if text is None or not text.isdecimal():
            raise UserError(f"environment variable {name} = {text!r}: start the ranks with torchrun, which sets it")
    r, w, local, local_world = (int(text or 0) for text in texts)
    if not (r < w and local < local_world <= w):
        raise UserError(f"environment {dict(zip(names, texts, strict=True))}: a rank must be less than its world size")
    return r, w, local, local_world


def gpu_of(device: torch.device) -> str:
    """The identity of the GPU; empty on a CPU."""
    if device.type != "cuda":
        return ""
    return str(getattr(torch.cuda.get_device_properties(device), "uuid", f"{socket.gethostname()} {device.index}"))


def agree_on_device(store: Store, ranks: Ranks) -> None:
    """Refuse ranks of which some have a GPU and some do not: each group of them would wait for the other. And two ranks on one
    GPU: NCCL refuses them later, in words that do not say what to do."""
    gpu = gpu_of(ranks.device)
    store.add("ranks that share a GPU", int(bool(gpu) and store.add(f"ranks on {gpu}", 1) > 1))
    count = int(store.add("ranks with a GPU", int(bool(gpu))))
    if store.add("ranks with a device", 1) == ranks.world:
        store.set("devices", str(count))
    assert _timeout is not None
    store.wait(["devices"], _timeout)
    count = int(store.add("ranks with a GPU", 0))
    shared = int(store.add("ranks that share a GPU", 0))
    if shared or count not in (0, ranks.world):
        if store.add("ranks that know", 1) == ranks.world:
            store.set("all know", "1")
        if ranks.main:  # it may own the store, which the others still read
            store.wait(["all know"], _timeout)
        if count == ranks.world:
            raise UserError(
                f"rank {ranks.rank} on {socket.gethostname()} computes on {ranks.device}, but {ranks.world} ranks have only "
                f"{ranks.world - shared} GPUs: start one rank per GPU (--nproc-per-node, gpus_per_node)"
            )
        raise UserError(
            f"rank {ranks.rank} on {socket.gethostname()} computes on {ranks.device.type}, but {count} of the {ranks.world} "
            "ranks have a GPU: give every rank one, or choose runtime.device = cpu; `ecgmatch doctor` shows each rank"
        )


def share_of_cores(store: Store, ranks: Ranks) -> int:
    """The cores of the ranks of this node, divided by their number. A launcher may have bound each rank to cores of its own,
    or all of them to the same."""
    assert _timeout is not None
    host = socket.gethostname()
    names = [f"cores of {host} {place}" for place in range(ranks.local_world)]
    place = int(store.add(f"ranks of {host}", 1)) - 1
    if place < len(names):  # two launchers on one host would make more
        store.set(names[place], json.dumps(sorted(os.sched_getaffinity(0))))
    store.wait(names, _timeout)
    union = {core for name in names for core in json.loads(store.get(name))}
    return max(1, len(union) // ranks.local_world)


def record_flights(traces: Path) -> None:
    """Turn on torch's flight recorder: when a collective of NCCL times out, each rank writes its latest ones to `traces`.
    `torchfrtrace` finds the collective that did not match. Settings of the environment have priority."""
    traces.mkdir(parents=True, exist_ok=True)
    prefix = str(traces.absolute() / f"{os.environ.get('SLURM_JOB_ID', 'local')}_rank_")
    for name, value in (("BUFFER_SIZE", "2000"), ("DUMP_TEMP_FILE", prefix)):
        old = {"BUFFER_SIZE": "TORCH_NCCL_TRACE_BUFFER_SIZE", "DUMP_TEMP_FILE": "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"}[name]
        os.environ.setdefault(old, value)  # the name before torch 2.8, which newer ones read too
        os.environ.setdefault(f"TORCH_FR_{name}", os.environ[old])
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")


def use_device(device: torch.device) -> None:
    """Call it first in every thread that may touch the device: a new thread starts on GPU 0, and its first call there makes a
    context of half a gigabyte on the first GPU for every rank of the node."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def host_buffer(count: int, length: int, device: torch.device) -> NDArray[np.float16]:
    """Memory for `count` signals [12, length]. For a GPU it is pinned: a reader's thread fills it, and the copy to the device
    is cheap. Torch reuses such memory, and not before the copies from it have ended."""
    if device.type == "cuda":
        use_device(device)
        return np.asarray(torch.empty((count, 12, length), dtype=torch.float16, pin_memory=True).numpy())
    return np.empty((count, 12, length), np.float16)


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """Copy to the device through pinned memory, on a stream of its own: the host does not wait for queued GPU work, nor does
    the copy."""
    t = torch.from_numpy(array)
    if device.type != "cuda":
        return t.to(device, non_blocking=True)
    copies, current = _copy_stream(device), torch.cuda.current_stream(device)
    with torch.cuda.stream(copies):
        out = (t if t.is_pinned() else t.pin_memory()).to(device, non_blocking=True)
    current.wait_stream(copies)
    out.record_stream(current)
    return out


@contextmanager
def session(
    device: Literal["auto", "cpu", "cuda"] = "auto", timeout_minutes: float = 10.0, traces: Path | None = None
) -> Iterator[Ranks]:
    """The ranks that torchrun started (gloo on CPU, NCCL on GPUs), or this process alone. Destroys the group that it creates.

    A collective that waits longer than the timeout raises an error instead of hanging. `traces`: for the flight recorder.
    """
    if dist.is_initialized():
        r, w = dist.get_rank(), dist.get_world_size()
        local, local_world = _environment()[2:] if "LOCAL_RANK" in os.environ else (r, w)
        cores = len(os.sched_getaffinity(0))
        yield Ranks(r, w, local, local_world, pick_device(device, local), max(1, cores // local_world))
        return
    r, w, local, local_world = _environment()
    ranks = Ranks(r, w, local, local_world, pick_device(device, local))
    if ranks.device.type == "cuda":
        torch.cuda.set_device(ranks.device)
    if "RANK" not in os.environ:
        yield replace(ranks, threads=len(os.sched_getaffinity(0)))
        return
    global _timeout
    _timeout = timedelta(minutes=timeout_minutes)
    # Several communicators on one GPU: NCCL 2.26 and newer then run their operations in the order in which they were issued.
    os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
    if traces is not None and ranks.device.type == "cuda":
        record_flights(traces)
    backend = "cpu:gloo,cuda:nccl" if ranks.device.type == "cuda" else "gloo"
    try:
        store, _, _ = next(rendezvous("env://", r, w, timeout=_timeout))
        # torchrun keeps its store across restarts: without a prefix, ranks would find the addresses of dead ones.
        store = PrefixStore(f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
        agree_on_device(store, ranks)
        ranks = replace(ranks, threads=share_of_cores(store, ranks))
        dist.init_process_group(backend, store=store, rank=r, world_size=w, timeout=_timeout)
    except (dist.DistError, ValueError) as error:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        reason = str(error).splitlines()[0]
        raise UserError(
            f"rank {r} of {w} does not reach the others at {where} (MASTER_ADDR, MASTER_PORT): {reason}"
        ) from error
    try:
        yield ranks
    finally:
        dist.destroy_process_group()


def background_group(name: str) -> Group:
    """A gloo group of all ranks with the session's timeout, for collectives in the background, on the host."""
    return dist.new_group(backend="gloo", timeout=_timeout, group_desc=name) if world() > 1 else None
