"""Checkpoints that cannot be half written and cannot execute anything.

torch.distributed.checkpoint (DCP) plans which rank writes what, writes in the background on a process group of its own, and
re-shards the banks on load for any number of ranks. Its default format keeps the plan in a pickle, which can execute code.
Here it writes safetensors, which hold only numbers and JSON (dcp.py).

A checkpoint is a folder `step-000200.1/` (the step, then the generation that wrote it: generations.py):

    state/rank-*.safetensors    the replicated state (rank 0) and each rank's rows of the banks
    best.safetensors            the best model at this step; the run folder's may already be newer
    state.json                  counters, hashes, size and checksum of every file, checksum of itself

It is written in the workspace and renamed when every rank has finished. Then the file `latest` names it. The last two are kept.
"""

import copy
import json
import os
import re
import shutil
import warnings
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from ecgmatch_dist.distributed.collectives import Group, rank, world
from ecgmatch_dist.distributed.session import background_group
from ecgmatch_dist.distributed.whereabouts import during
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.files.atomic import size_and_checksum, sync_file, sync_folder, write_json, write_text
from ecgmatch_dist.recovery.dcp import HostStager, Parts, Rows, Writer
from ecgmatch_dist.recovery.generations import REMEDY, Fence

KEEP = 2
FORMAT = 2
BEST = "best.safetensors"
NAME = re.compile(r"step-\d+\.\d+")
warnings.filterwarnings(
    "ignore", "torch.distributed is disabled"
)  # DCP's warning for a single process, which is usual here


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk."""

    folder: Path
    counters: dict[str, Any]
    group: Group = None

    def load(self, rows: Mapping[str, Rows]) -> dict[str, Tensor]:
        """All tensors in main memory, named `<part>.<name>`; of `rows`, only this rank's block. A collective."""
        reader = HuggingFaceStorageReader(str(self.folder / "state"))
        saved = reader.read_metadata().state_dict_metadata
        state = {n: torch.empty(s.size, dtype=s.properties.dtype) for n, s in saved.items() if n not in rows}  # type: ignore[union-attr]
        own = {name: torch.empty(block.own.shape, dtype=block.own.dtype) for name, block in rows.items()}
        with during("checkpoint"):
            load(
                state | {name: block.as_dtensor(own[name]) for name, block in rows.items()},
                storage_reader=reader,
                process_group=self.group,
            )
        return state | own

    @property
    def best(self) -> Path | None:
        """Weights of the best model at this step, if there was one."""
        path = self.folder / BEST
        return path if path.is_file() else None


class Checkpointer:
    """Saves in the background and finds the checkpoint to resume from. Every rank calls it at the same steps."""

    def __init__(self, folder: Path, must_match: Mapping[str, str], fence: Fence | None = None) -> None:
        """`must_match`: hashes (configuration, manifest, split) that a checkpoint must have to be resumed from."""
        self.folder, self.must_match, self.fence = folder, dict(must_match), fence
        # A group of its own: collectives of a save must not interleave with those of the training step.
        self.group = background_group("checkpoint")
        self.stager = HostStager()
        self.saving: Future[Any] | None = None
        if rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
        self.intact = [path.name for path in self._listed()]  # not read yet; `latest` drops the damaged ones

    def save(self, step: int, state: Parts, counters: Mapping[str, Any], best: Path | None = None) -> None:
        """Copy the state now and write it in the background. Tensors are saved from rank 0, `Rows` from every rank that passes
        them. `best`: file of weights to save with it."""
        self.wait()
        unfinished = (self.fence.workspace if self.fence else self.folder) / f"unfinished-{step:06d}"
        own = {
            part: {name: value for name, value in tensors.items() if rank() == 0 or isinstance(value, Rows)}
            for part, tensors in state.items()
        }
        finish = partial(
            self._publish, unfinished, step, copy.deepcopy(dict(counters))
        )  # the caller goes on changing them
        with self._translate_errors():
            if rank() == 0 and best and best.is_file():
                link_or_copy(best, unfinished.with_suffix(".best"))  # now: the next validation may replace it
            saving = async_save(
                own, storage_writer=Writer(unfinished, finish), process_group=self.group, async_stager=self.stager
            )
        assert isinstance(saving, Future)
        self.saving = saving

    def wait(self) -> None:
        """Wait until the running save is on disk. If it failed, its error is raised here."""
        if self.saving:
            saving, self.saving = self.saving, None
            with self._translate_errors(), during("checkpoint"):
                saving.result()

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Turn the errors of all ranks into `Superseded`, if that is the cause, or into a one-line UserError."""
        try:
            yield
        except (CheckpointException, OSError) as error:
            cause: BaseException = error
            where = ""
            if isinstance(error, CheckpointException):
                number, (cause, _) = min(error.failures.items())
                where = f"rank {number}: "
            if isinstance(cause, UserError):
                raise cause from error
            if self.fence:
                self.fence.raise_if_superseded(error)
            raise UserError(f"{self.folder}: the checkpoint could not be written: {where}{cause}. {REMEDY}") from error

    def _publish(self, unfinished: Path, step: int, counters: dict[str, Any], files: dict[str, Any]) -> None:
        """On rank 0, when all ranks have written: add state.json, rename the folder, update `latest`, delete old ones."""
        best = unfinished.with_suffix(".best")
        if best.exists():
            best.replace(unfinished / BEST)
            files |= {BEST: size_and_checksum(unfinished / BEST)}
        record = {
            "format": FORMAT,
            "step": step,
            "fits": self.must_match,
            "files": dict(sorted(files.items())),
            "counters": counters,
        }
        sync_folder(unfinished / "state")
        write_json(unfinished / "state.json", record | {"checksum": checksum_of(record)})
        name = f"step-{step:06d}.{self.fence.generation if self.fence else 1}"
        if self.fence:
            self.fence.check()
        unfinished.rename(self.folder / name)
        sync_folder(self.folder)
        (self.fence.write_text if self.fence else write_text)(self.folder / "latest", f"{name}\n")
        self.intact = [*self.intact, name][-KEEP:]
        for old in self._listed():
            if old.name not in self.intact:
                shutil.rmtree(old)

    def _listed(self) -> list[Path]:
        """The checkpoints in the folder, newest last. Folders with other names are ignored."""
        return sorted((p for p in self.folder.glob("step-*") if NAME.fullmatch(p.name)), key=generation_and_step)

    def latest(self) -> tuple[Checkpoint | None, list[str]]:
        """The newest intact checkpoint of this run, and a note for the log on each damaged one.

        Rank 0 chooses and broadcasts, so that all ranks resume from the same one even if the folder changes meanwhile.
        """
        notes: list[str] = []
        answer: list[Any] = [None, notes, None]
        if rank() == 0:
            for folder in self._candidates(notes):
                try:
                    answer[0] = (folder.name, self._read(folder))
                    self.intact = [folder.name]
                    break
                except UserError as error:
                    answer[2] = str(error)
                    break
                except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
                    notes.append(f"{folder} is damaged ({error}): trying the previous one")
        if world() > 1:
            dist.broadcast_object_list(answer, src=0, group=self.group)
        found, notes, refusal = answer
        if refusal:
            raise UserError(refusal)
        return (Checkpoint(self.folder / found[0], found[1], self.group) if found else None), notes

    def _candidates(self, notes: list[str]) -> list[Path]:
        """The checkpoint that `latest` names and those in the folder, newest first. Either may be stale: the listing on NFS,
        and `latest` if the run was killed between a checkpoint and its pointer."""
        found = set(self._listed())
        try:
            pointed = self.folder / (self.folder / "latest").read_text(encoding="utf-8").strip()
            generation_and_step(pointed)
            found.add(pointed)
        except (OSError, ValueError, IndexError) as error:
            if found:
                notes.append(f"{self.folder / 'latest'} names no checkpoint ({error}): trying the newest in the folder")
        return sorted(found, key=generation_and_step, reverse=True)

    def _read(self, folder: Path) -> dict[str, Any]:
        record = json.loads((folder / "state.json").read_text())
        if not isinstance(record, dict):
            raise ValueError("state.json is not an object")
        if record.pop("checksum") != checksum_of(record):
            raise ValueError("state.json has the wrong checksum")
        if record.get("format") != FORMAT:
            raise UserError(
                f"{folder}: written by another version of ecgmatch_dist: finish the run with that one, "
                "or give this one another --tag"
            )
        for name, expected in self.must_match.items():
            if record["fits"].get(name) != expected:
                raise UserError(
                    f"{folder}: has another {name} (the hashes differ): resume with the same one, "
                    "or give the run another --tag"
                )
        for name, expected in record["files"].items():
            actual = size_and_checksum(folder / name)
            if actual["bytes"] != expected["bytes"]:
                raise ValueError(f"{name} has {actual['bytes']} bytes instead of {expected['bytes']}")
            if actual != expected:
                raise ValueError(f"{name} has the wrong checksum")
        return {"step": record["step"], **record["counters"]}


def link_or_copy(path: Path, to: Path) -> None:
    """A hard link is enough, because `path` is only ever replaced, never changed. A copy where links are not possible."""
    to.unlink(missing_ok=True)
    try:
        os.link(path, to)
    except OSError:
        shutil.copyfile(path, to)
        sync_file(to)


def checksum_of(record: dict[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(record, sort_keys=True).encode()):08x}"


def generation_and_step(folder: Path) -> tuple[int, int]:
    """Sort key by age. The generation comes first: a late checkpoint of an older copy never hides one of a newer copy."""
    step, generation = folder.name.split("-")[1].split(".")
    return int(generation), int(step)
