"""What torch.distributed.checkpoint (DCP) needs to save tensors that ranks hold together: rows, copies, files."""

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

from ecgmatch_dist.distributed import Group
from ecgmatch_dist.files import describe, let_others_read, sync_file


@dataclass(frozen=True)
class Rows:
    """This rank's block of a tensor that a group of ranks holds together: ceil(total / ranks) rows each, in their order."""

    own: Tensor
    total: int
    group: Group

    def dealt(self, own: Tensor) -> Tensor:
        """`own`, the block or its copy in main memory, as what DCP can deal anew to any number of ranks."""
        if self.group is None:
            return own
        mesh = DeviceMesh.from_group(self.group, "cpu")
        whole = torch.Size([self.total, *own.shape[1:]])
        return DTensor.from_local(own, mesh, [Shard(0)], run_check=False, shape=whole, stride=own.stride())


# What a run saves, by part (student, teacher, bank, ...) and name. DCP looks at each part by itself, which takes time.
Parts = Mapping[str, Mapping[str, Tensor | Rows]]


class Copies(AsyncStager):
    """The state in main memory while the run goes on: in the same place at each save, because fresh memory would cost most of
    the time, and in the order of the indices, which files keep and channels_last weights do not have."""

    def __init__(self) -> None:
        self.places: dict[str, Tensor] = {}

    def stage(self, state_dict: Parts) -> dict[str, Any]:
        staged = {
            part: {name: self._copy(f"{part}.{name}", value) for name, value in values.items()}
            for part, values in state_dict.items()
        }
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        return staged

    def _copy(self, name: str, value: Tensor | Rows) -> Tensor:
        tensor = value.own if isinstance(value, Rows) else value
        place = self.places.get(name)
        if place is None or place.shape != tensor.shape or place.dtype != tensor.dtype:
            place = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self.places[name] = place
        place.copy_(tensor.detach(), non_blocking=True)
        return value.dealt(place) if isinstance(value, Rows) else place

    @property
    def should_synchronize_after_execute(self) -> bool:
        return False  # `stage` waits for its copies

    def synchronize_staging(self) -> None:
        return

    def close(self) -> None:
        self.places.clear()


class Writer(StorageWriter):
    """Each rank's tensors as one safetensors file in `folder`/state, as DCP's reader takes them; when all are written, `finish`
    is called on rank 0 with what there is.

    DCP's own writer of this format puts a file together in memory and lets no other thread run meanwhile: 1.5 s for half a GiB.
    """

    def __init__(self, folder: Path, finish: Callable[[dict[str, Any]], None]) -> None:
        self.folder, self.finished = folder, finish

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """One writer, one checkpoint."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False  # it is known by its folder alone

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
        """This rank's file; its name, size and checksum travel to rank 0."""
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
        facts = describe(path)
        written.set_result([WriteResult(MetadataIndex(plan.storage_data), facts["bytes"], facts)])
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        self.finished({done.index.fqn: done.storage_data for of_rank in results for done in of_rank})
