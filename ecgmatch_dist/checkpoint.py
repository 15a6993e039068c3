"""Checkpoints that cannot be half written and cannot execute anything.

torch.distributed.checkpoint (DCP) does the work: it plans who writes what, writes behind the next steps on a process group of
its own, and deals the rows of the banks anew to any number of ranks. Its usual format keeps the plan in a pickle, and a pickle
can execute; here it writes its other one, safetensors, which holds numbers and JSON (dealt.py).

A checkpoint is a folder `step-000200.1/` (the step, and the generation of the copy that wrote it: fence.py):

    state/rank-*.safetensors    what all ranks hold alike, and each rank's rows of the banks
    best.safetensors            the model kept so far; the run folder's may be of a later step already
    state.json                  counters, hashes, size and checksum of every file and of itself

It is written elsewhere and renamed when every rank has finished; then the file `latest` names it. The last two are kept.
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

from ecgmatch_dist.dealt import Copies, Parts, Rows, Writer
from ecgmatch_dist.distributed import Group, group_beside, rank, world
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.fence import REMEDY, Fence
from ecgmatch_dist.files import describe, sync_file, sync_folder, write_json, write_text
from ecgmatch_dist.watchdog import during

KEEP = 2
FORMAT = 2  # of the folder; another number is another version's
BEST = "best.safetensors"
NAME = re.compile(r"step-\d+\.\d+")
warnings.filterwarnings("ignore", "torch.distributed is disabled")  # says DCP of one process, which is usual here


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk."""

    folder: Path
    counters: dict[str, Any]
    group: Group = None

    def load(self, rows: Mapping[str, Rows]) -> dict[str, Tensor]:
        """All tensors in main memory, as `<part>.<name>`; of `rows` only this rank's. All ranks call it together."""
        reader = HuggingFaceStorageReader(str(self.folder / "state"))
        saved = reader.read_metadata().state_dict_metadata
        state = {n: torch.empty(s.size, dtype=s.properties.dtype) for n, s in saved.items() if n not in rows}  # type: ignore[union-attr]
        own = {name: torch.empty(block.own.shape, dtype=block.own.dtype) for name, block in rows.items()}
        with during("checkpoint"):
            load(
                state | {name: block.dealt(own[name]) for name, block in rows.items()},
                storage_reader=reader,
                process_group=self.group,
            )
        return state | own

    @property
    def best(self) -> Path | None:
        """The weights of the model that was kept at this step, if there was one."""
        path = self.folder / BEST
        return path if path.is_file() else None


class Checkpointer:
    """Saves in the background and finds what can be resumed. Every rank has one and calls it at the same steps."""

    def __init__(self, folder: Path, fits: Mapping[str, str], fence: Fence | None = None) -> None:
        """`fits` are the hashes (configuration, manifest, split) that a checkpoint must carry to be resumed from."""
        self.folder, self.fits, self.fence = folder, dict(fits), fence
        # Saving meets on a group of its own: its collectives must not interleave with those of the training step.
        self.group = group_beside()
        self.copies = Copies()
        self.saving: Future[Any] | None = None
        if rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
        self.good = [path.name for path in self._listed()]  # as far as known; what `latest` finds damaged is not

    def save(self, step: int, state: Parts, counters: Mapping[str, Any], best: Path | None = None) -> None:
        """Copy the state and write it behind the next steps. Of tensors, rank 0's count; of rows, those of all ranks that bring
        any. `best`: weights to keep with it."""
        self.wait()
        unfinished = (self.fence.desk if self.fence else self.folder) / f"unfinished-{step:06d}"
        mine = {
            part: {name: value for name, value in tensors.items() if rank() == 0 or isinstance(value, Rows)}
            for part, tensors in state.items()
        }
        finish = partial(self._publish, unfinished, step, copy.deepcopy(dict(counters)))  # they count on meanwhile
        with self._explained():
            if rank() == 0 and best and best.is_file():
                hold(best, unfinished.with_suffix(".best"))  # now: the next validation may replace it
            saving = async_save(
                mine, storage_writer=Writer(unfinished, finish), process_group=self.group, async_stager=self.copies
            )
        assert isinstance(saving, Future)
        self.saving = saving

    def wait(self) -> None:
        """Until the save under way is on disk; its error, if it had one, is raised here."""
        if self.saving:
            saving, self.saving = self.saving, None
            with self._explained(), during("checkpoint"):
                saving.result()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Errors of all ranks as one that says what went wrong, or that a newer copy of the run has taken over."""
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
                self.fence.blame(error)
            raise UserError(f"{self.folder}: the checkpoint could not be written: {where}{cause}. {REMEDY}") from error

    def _publish(self, unfinished: Path, step: int, counters: dict[str, Any], files: dict[str, Any]) -> None:
        """Rank 0, when all ranks have written: add the record, put the folder in its place, point to it, drop the too old."""
        kept = unfinished.with_suffix(".best")
        if kept.exists():
            kept.replace(unfinished / BEST)
            files |= {BEST: describe(unfinished / BEST)}
        record = {
            "format": FORMAT,
            "step": step,
            "fits": self.fits,
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
        self.good = [*self.good, name][-KEEP:]
        for old in self._listed():
            if old.name not in self.good:
                shutil.rmtree(old)

    def _listed(self) -> list[Path]:
        """The checkpoints in the folder, the newest last. What somebody else puts beside them is left alone."""
        return sorted((p for p in self.folder.glob("step-*") if NAME.fullmatch(p.name)), key=generation_and_step)

    def latest(self) -> tuple[Checkpoint | None, list[str]]:
        """The newest checkpoint that is whole and belongs to this run, and what is to be said about those that are not.

        Rank 0 looks; the others are told, so that all resume from the same one even if a folder changes meanwhile.
        """
        notes: list[str] = []
        answer: list[Any] = [None, notes, None]
        if rank() == 0:
            for folder in self._candidates(notes):
                try:
                    answer[0] = (folder.name, self._read(folder))
                    self.good = [folder.name]
                    break
                except UserError as error:
                    answer[2] = str(error)
                    break
                except (OSError, ValueError, KeyError, TypeError) as error:
                    notes.append(f"{folder} is damaged ({error}): trying the one before")
        if world() > 1:
            dist.broadcast_object_list(answer, src=0, group=self.group)
        found, notes, refusal = answer
        if refusal:
            raise UserError(refusal)
        return (Checkpoint(self.folder / found[0], found[1], self.group) if found else None), notes

    def _candidates(self, notes: list[str]) -> list[Path]:
        """What `latest` names and what the folder lists, newest first: a listing can be older than the pointer (NFS), and the
        pointer older than the listing (a run that was killed between a checkpoint and its pointer)."""
        found = set(self._listed())
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
        if record.get("format") != FORMAT:
            raise UserError(
                f"{folder}: written by another version of ecgmatch_dist: finish the run with that one, "
                "or give this one another --name or --tag"
            )
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


def hold(path: Path, to: Path) -> None:
    """A second name for a file that is only ever replaced as a whole; a copy where the file system has no such names."""
    to.unlink(missing_ok=True)
    try:
        os.link(path, to)
    except OSError:
        shutil.copyfile(path, to)
        sync_file(to)


def checksum_of(record: dict[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(record, sort_keys=True).encode()):08x}"


def generation_and_step(folder: Path) -> tuple[int, int]:
    """The age of a checkpoint: what an older copy of the run wrote late never hides what a newer one wrote."""
    step, generation = folder.name.split("-")[1].split(".")
    return int(generation), int(step)
