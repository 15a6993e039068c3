"""Checkpoints that cannot be half written and cannot execute anything.

A checkpoint is a folder `step-000200.1/` (the step, and the generation of the copy that wrote it: fence.py) with
`state.safetensors` (what all ranks hold alike), one `bank-<first row>.safetensors` per block of the banks, and `state.json`
(counters, hashes, the size and checksum of every file and of itself). The folder is written elsewhere and renamed when every
rank has finished; then the file `latest` names it. The last two are kept. torch.distributed.checkpoint is not used because it
loads its metadata with pickle.
"""

import json
import shutil
import threading
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch import distributed as dist

from ecgmatch_dist.distributed import group_beside
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.fence import Fence
from ecgmatch_dist.files import checksum, sync_folder, write_atomic, write_json, write_text
from ecgmatch_dist.watchdog import during

KEEP = 2


@dataclass(frozen=True)
class Block:
    """Consecutive rows of the banks: what one rank owns, or wants to load."""

    start: int
    tensors: dict[str, Tensor]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk. Tensors are read when asked for, and only the rows that are."""

    folder: Path
    counters: dict[str, Any]

    def tensors(self) -> dict[str, Tensor]:
        with safe_open(self.folder / "state.safetensors", "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)

    def rows(self, start: int, stop: int) -> Iterable[Block]:
        """The saved blocks cut to the rows [start, stop), whatever blocks they were saved in."""
        for path in sorted(self.folder.glob("bank-*.safetensors")):
            first = int(path.stem.split("-")[1])
            with safe_open(path, "pt") as file:
                names = list(file.keys())
                length = file.get_slice(names[0]).get_shape()[0]
                low, high = max(start, first), min(stop, first + length)
                if low < high:
                    yield Block(low, {n: file.get_slice(n)[low - first : high - first] for n in names})


class Checkpointer:
    """Saves in the background and finds what can be resumed. Every rank has one and calls it at the same steps."""

    def __init__(self, folder: Path, fits: Mapping[str, str], fence: Fence | None = None) -> None:
        """`fits` are the hashes (configuration, split) that a checkpoint must carry to be resumed from."""
        self.folder, self.fits, self.fence = folder, dict(fits), fence
        self.distributed = dist.is_initialized() and dist.get_world_size() > 1
        self.rank = dist.get_rank() if self.distributed else 0
        # Saving meets on a group of its own: its collectives must not interleave with those of the training step.
        self.group = group_beside()
        self.thread: threading.Thread | None = None
        self.error: BaseException | None = None
        self.places: dict[tuple[str, str], Tensor] = {}
        if self.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)

    def save(self, step: int, tensors: Mapping[str, Tensor], block: Block | None, counters: Mapping[str, Any]) -> None:
        """Copy the state and write it behind the next steps. `block` is None on ranks that hold a second copy of the rows."""
        self.wait()
        state = self._copy("state", tensors) if self.rank == 0 else {}
        rows = self._copy("bank", block.tensors) if block else {}
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        first = block.start if block else 0
        self.thread = threading.Thread(target=self._guarded, args=(step, state, first, rows, dict(counters)))
        self.thread.start()

    def _copy(self, kind: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors in main memory, in the same place at each save: fresh memory would cost most of the time."""
        out = {}
        for name, tensor in tensors.items():
            place = self.places.get((kind, name))
            if place is None or place.shape != tensor.shape or place.dtype != tensor.dtype:
                place = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
                self.places[kind, name] = place
            out[name] = place.copy_(tensor.detach(), non_blocking=True)
        return out

    def wait(self) -> None:
        """Until the save under way is on disk; its error, if it had one, is raised here."""
        if self.thread:
            self.thread.join()
            self.thread = None
        if isinstance(self.error, UserError):
            raise self.error
        if self.error:
            raise UserError(f"{self.folder}: the checkpoint could not be written: {self.error}") from self.error

    def _guarded(self, *args: Any) -> None:
        try:
            self._write(*args)
        except Exception as error:
            self.error = self.fence.explain(error) if self.fence else error

    def _write(
        self, step: int, state: dict[str, Tensor], first: int, rows: dict[str, Tensor], counters: dict[str, Any]
    ) -> None:
        unfinished = (self.fence.desk if self.fence else self.folder) / f"unfinished-{step:06d}"
        if self.rank == 0:
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
        self._gather({})
        mine = {}
        if rows and len(next(iter(rows.values()))):
            mine[f"bank-{first:012d}.safetensors"] = rows
        if self.rank == 0:
            mine["state.safetensors"] = state
        for name, tensors in mine.items():
            write_atomic(unfinished / name, partial(save_file, tensors))
        files = self._gather({name: describe(unfinished / name) for name in mine})
        if self.rank == 0:
            record = {"step": step, "fits": self.fits, "files": files, "counters": counters}
            write_json(unfinished / "state.json", record | {"checksum": checksum_of(record)})
            self._publish(unfinished, f"step-{step:06d}.{self.fence.generation if self.fence else 1}")

    def _publish(self, unfinished: Path, name: str) -> None:
        """Put a checkpoint in its place, point to it, and drop what is too old."""
        if self.fence:
            self.fence.check()
        unfinished.rename(self.folder / name)
        sync_folder(self.folder)
        (self.fence.write_text if self.fence else write_text)(self.folder / "latest", f"{name}\n")
        for old in sorted(self.folder.glob("step-*"), key=generation_and_step)[:-KEEP]:
            shutil.rmtree(old)

    def _gather(self, mine: dict[str, Any]) -> dict[str, Any]:
        """The ranks' facts in one; no rank goes on before all have come here."""
        every: list[dict[str, Any]] = [mine]
        if self.distributed:
            every *= dist.get_world_size()
            with during("checkpoint"):
                dist.all_gather_object(every, mine, group=self.group)
        return {name: value for facts in every for name, value in sorted(facts.items())}

    def latest(self) -> tuple[Checkpoint | None, list[str]]:
        """The newest checkpoint that is whole and belongs to this run, and what is to be said about those that are not.

        Rank 0 looks; the others are told, so that all resume from the same one even if a folder changes meanwhile.
        """
        notes: list[str] = []
        answer: list[Any] = [None, notes, None]
        if self.rank == 0:
            for folder in self._candidates(notes):
                try:
                    answer[0] = (folder.name, self._read(folder))
                    break
                except UserError as error:
                    answer[2] = str(error)
                    break
                except (OSError, ValueError, KeyError, TypeError) as error:
                    notes.append(f"{folder} is damaged ({error}): trying the one before")
        if self.distributed:
            dist.broadcast_object_list(answer, src=0, group=self.group)
        found, notes, refusal = answer
        if refusal:
            raise UserError(refusal)
        return (Checkpoint(self.folder / found[0], found[1]) if found else None), notes

    def _candidates(self, notes: list[str]) -> list[Path]:
        """What `latest` names and what the folder lists, newest first: a listing can be older than the pointer (NFS), and the
        pointer older than the listing (a run that was killed between a checkpoint and its pointer)."""
        found = set(self.folder.glob("step-*"))
        try:
            pointed = self.folder / (self.folder / "latest").read_text(encoding="utf-8").strip()
            generation_and_step(pointed)
            found.add(pointed)
        except (OSError, ValueError, IndexError) as error:
            if found:
                notes.append(f"{self.folder / 'latest'} names no checkpoint ({error}): trying the newest one there is")
        return sorted(found, key=generation_and_step, reverse=True)

    def _read(self, folder: Path) -> dict[str, Any]:
        record = json.loads((folder / "state.json").read_text())
        if record.pop("checksum") != checksum_of(record):
            raise ValueError("state.json has another checksum than when it was written")
        for name, expected in self.fits.items():
            if record["fits"].get(name) != expected:
                raise UserError(
                    f"{folder}: belongs to another {name} (its hash differs): resume with the same one, "
                    "or give the run another --name or --tag"
                )
        for name, expected in record["files"].items():
            actual = describe(folder / name)
            if actual["bytes"] != expected["bytes"]:
                raise ValueError(f"{name} has {actual['bytes']} bytes instead of {expected['bytes']}")
            if actual != expected:
                raise ValueError(f"{name} has another checksum than when it was written")
        return {"step": record["step"], **record["counters"]}


def describe(path: Path) -> dict[str, Any]:
    """By which a file is known again."""
    return {"bytes": path.stat().st_size, "checksum": checksum(path)}


def checksum_of(record: dict[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(record, sort_keys=True).encode()):08x}"


def generation_and_step(folder: Path) -> tuple[int, int]:
    """The age of a checkpoint: what an older copy of the run wrote late never hides what a newer one wrote."""
    step, generation = folder.name.split("-")[1].split(".")
    return int(generation), int(step)


def pack_optimizer(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimiser's state as named tensors: `optimizer.<parameter number>.<name>`."""
    state = optimizer.state_dict()["state"]
    return {
        f"optimizer.{number}.{name}": value
        for number, values in state.items()
        for name, value in values.items()
        if isinstance(value, Tensor)
    }


def unpack_optimizer(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Put back what `pack_optimizer` gave; learning rates follow from the step, so they are not part of it."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = optimizer.state_dict()
    state["state"] = {}
    for key, value in tensors.items():
        if key.startswith("optimizer."):
            _, number, name = key.split(".", 2)
            like = parameters[int(number)]
            if value.shape == like.shape:
                # Fused optimisers walk through memory, and weights lie there as channels_last, which files do not keep.
                value = torch.empty_like(like, dtype=value.dtype).copy_(value)
            state["state"].setdefault(int(number), {})[name] = value
    optimizer.load_state_dict(state)
