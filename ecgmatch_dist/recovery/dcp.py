"""Extensions of torch.distributed.checkpoint (DCP): sharded rows, reusable host copies, one safetensors file per rank."""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint._hf_utils import CUSTOM_METADATA_KEY, SAVED_OFFSETS_KEY
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.futures import Future

from ecgmatch_dist.distributed.collectives import Group
from ecgmatch_dist.files.atomic import let_others_read, size_and_checksum, sync_file


@dataclass(frozen=True)
class Rows:
    """This rank's block of a tensor that is sharded over a group: ceil(total / ranks) rows per rank, in rank order."""

    own: Tensor
    total: int
    group: Group

    def as_dtensor(self, own: Tensor) -> Tensor:
        """`own` (the block, or its copy in main memory) as a DTensor, which DCP can re-shard to any number of ranks."""
        if self.group is None:
            return own
        mesh = DeviceMesh.from_group(self.group, "cpu")
        whole = torch.Size([self.total, *own.shape[1:]])
        return DTensor.from_local(own, mesh, [Shard(0)], run_check=False, shape=whole, stride=own.stride())


# The state of a run by part (student, teacher, bank, ...) and name. DCP spends time on each part.
Parts = Mapping[str, Mapping[str, Tensor | Rows]]


class HostStager(AsyncStager):
    """Copies the state to main memory, so that the run can go on. The buffers are reused, because allocating them would take
    most of the time. They are contiguous, as files are; channels_last weights are not."""

    def __init__(self) -> None:
        self.buffers: dict[str, Tensor] = {}
        self.pinned = False

    def stage(self, state_dict: Parts) -> dict[str, Any]:
        staged = {
            part: {name: self._copy(f"{part}.{name}", value) for name, value in values.items()}
            for part, values in state_dict.items()
        }
        if self.pinned:  # asked of a machine whose GPUs are not used, CUDA would make a context on the first one
            torch.cuda.current_stream().synchronize()
        return staged

    def _copy(self, name: str, value: Tensor | Rows) -> Tensor:
        tensor = value.own if isinstance(value, Rows) else value
        buffer = self.buffers.get(name)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            self.pinned = self.pinned or tensor.is_cuda
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self.buffers[name] = buffer
        buffer.copy_(tensor.detach(), non_blocking=True)
        return value.as_dtensor(buffer) if isinstance(value, Rows) else buffer

    @property
    def should_synchronize_after_execute(self) -> bool:
        return False  # `stage` waits for its copies

    def synchronize_staging(self) -> None:
        return

    def close(self) -> None:
        self.buffers.clear()


class Writer(StorageWriter):
    """Writes the tensors of each rank to one safetensors file in `folder`/state, in the layout of DCP's reader. Then rank 0
    calls `on_finish` with the size and checksum of every file.

    DCP's own writer of this format builds the file in memory and blocks all other threads: 1.5 s for half a GiB.
    """

    def __init__(self, folder: Path, on_finish: Callable[[dict[str, Any]], None]) -> None:
        self.folder, self.on_finish = folder, on_finish

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing to do: a writer writes one checkpoint."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False  # the folder is given to __init__

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if is_coordinator:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir()
            (self.folder / "state").mkdir()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return [replace(plan, storage_data=f"state/rank-{rank:05d}.safetensors") for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file. DCP sends its name, size and checksum to rank 0."""
        written: Future[list[WriteResult]] = Future()
        if not plan.items:
            written.set_result([])
            return written
        tensors = {item.index.fqn: cast(Tensor, planner.resolve_data(item)) for item in plan.items}
        offsets = {item.index.fqn: {SAVED_OFFSETS_KEY: list(item.index.offset or [])} for item in plan.items}
        path = self.folder / plan.storage_data
        save_file(tensors, path, {CUSTOM_METADATA_KEY: json.dumps(offsets), "format": "pt"})
        let_others_read(path)
        sync_file(path)
        description = size_and_checksum(path)
        written.set_result([WriteResult(MetadataIndex(plan.storage_data), description["bytes"], description)])
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        self.on_finish({file.index.fqn: file.storage_data for of_rank in results for file in of_rank})
