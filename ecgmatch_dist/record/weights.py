"""best.safetensors: the best weights; the file's metadata hold what is needed to use them."""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from ecgmatch_dist.config import Model
from ecgmatch_dist.data.preprocess import Preprocess
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.files.strict import check_format, convert

FORMAT = 1
REMEDY = "name the folder of a finished run"


@dataclass(frozen=True)
class ModelNotes:
    """Classes, preprocessing and architecture of a model."""

    classes: tuple[str, ...]
    scheme: str
    thresholds: tuple[float, ...]
    preprocess: Preprocess
    model: Model
    step: int
    crop: int = 0
    """Samples that the network was trained on: longer recordings are predicted by the mean over crops; 0: the whole."""
    format: int = FORMAT


def save_weights(path: Path, model: nn.Module, notes: ModelNotes) -> None:
    """Write the network without the layers that only training needs."""
    state = {name: t for name, t in model.state_dict().items() if not name.startswith("auxiliary.")}
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    content = save(tensors, {name: json.dumps(value) for name, value in asdict(notes).items()})
    path.write_bytes(with_sorted_header(content))


def with_sorted_header(content: bytes) -> bytes:
    """The same safetensors file with its header in the order of the names: safetensors writes the notes in random order, but
    equal weights shall be equal files. Offsets of tensors count from
    the header's end, so they stay right."""
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    text = json.dumps(header, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    padded = text + b" " * (-len(text) % 8)
    return len(padded).to_bytes(8, "little") + padded + content[8 + size :]


def read_notes(path: Path) -> ModelNotes:
    """The notes in a file of weights."""
    with _open(path) as file:
        return _parse(file.metadata(), path)


def load_weights(path: Path) -> tuple[dict[str, Tensor], ModelNotes]:
    """Tensors by name, and the notes."""
    with _open(path) as file:
        notes = _parse(file.metadata(), path)
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    if bad := [name for name, tensor in tensors.items() if not bool(tensor.isfinite().all())]:
        raise UserError(f"{path}: {bad[0]} has values that are not finite; {REMEDY}")
    return tensors, notes


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, "pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: not the weights of a run ({error}); {REMEDY}") from None


def _parse(metadata: dict[str, str] | None, path: Path) -> ModelNotes:
    try:
        value: dict[str, Any] = {name: json.loads(text) for name, text in (metadata or {}).items()}
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: its metadata are not JSON ({error}); {REMEDY}") from None
    check_format(value, FORMAT, path, REMEDY)
    notes = convert(value, ModelNotes, str(path))
    if len(notes.thresholds) != len(notes.classes) or not all(map(math.isfinite, notes.thresholds)):
        raise UserError(f"{path}: {len(notes.classes)} classes need as many finite thresholds; {REMEDY}")
    return notes
