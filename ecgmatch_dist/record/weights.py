"""best.safetensors: the best weights; the file's metadata hold what is needed to use them."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
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
    save_file(tensors, path, {name: json.dumps(value) for name, value in asdict(notes).items()})


def read_notes(path: Path) -> ModelNotes:
    """The notes in a file of weights."""
    with _open(path) as file:
        return _parse(file.metadata(), path)


def load_weights(path: Path) -> tuple[dict[str, Tensor], ModelNotes]:
    """Tensors by name, and the notes."""
    with _open(path) as file:
        notes = _parse(file.metadata(), path)
        return {name: file.get_tensor(name) for name in file.keys()}, notes  # noqa: SIM118 (not a mapping)


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
    except ValueError as error:
        raise UserError(f"{path}: its metadata are not JSON ({error}); {REMEDY}") from None
    check_format(value, FORMAT, path, REMEDY)
    return convert(value, ModelNotes, str(path))
