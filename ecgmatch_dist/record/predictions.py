"""predictions/*.npz and the other arrays of a run folder. No pickles are written or read."""

import zipfile
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ecgmatch_dist.data.labels import UNKNOWN
from ecgmatch_dist.errors import UserError


class SavedPredictions(NamedTuple):
    """Predictions of the best model for the n recordings of a part."""

    ids: NDArray[np.str_]
    """[n], "database/key"."""
    labels: NDArray[np.uint8]
    """[n, C]: 1, 0, or UNKNOWN (255) where nobody has looked for the class."""
    probabilities: NDArray[np.float32]
    """[n, C]"""
    features: NDArray[np.float32]
    """z, [n, D]"""


def predictions_file(folder: Path, part: str) -> Path:
    """Path of the predictions for a part of the split."""
    return folder / "predictions" / f"{part}.npz"


def write_arrays(path: Path, arrays: dict[str, NDArray[Any]]) -> None:
    with path.open("wb") as file:
        np.savez(file, allow_pickle=False, **arrays)


def read_arrays(path: Path, names: tuple[str, ...]) -> list[NDArray[Any]]:
    """Arrays of an .npz by name."""
    remedy = "train the run again"
    try:
        with zipfile.ZipFile(path) as file:  # a compressed one may unfold to any size, and none of ours is compressed
            if any(member.compress_type != zipfile.ZIP_STORED for member in file.infolist()):
                raise UserError(f"{path}: compressed, which no run writes; {remedy}")
        with np.load(path, allow_pickle=False) as file:
            return [file[name] for name in names]
    except FileNotFoundError:
        raise UserError(f"{path}: not found; the run has not finished, or another version made it") from None
    except KeyError as error:
        raise UserError(f"{path}: {error.args[0]}; {remedy}") from None
    except (OSError, ValueError, EOFError, MemoryError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"{path}: damaged ({error}); {remedy}") from None


def read_predictions(path: Path) -> SavedPredictions:
    """Read predictions and check their shapes and values."""
    found = SavedPredictions(*read_arrays(path, SavedPredictions._fields))
    ids, labels, probabilities, features = found
    if labels.ndim != 2 or labels.shape != probabilities.shape or not len(ids) == len(labels) == len(features):
        shapes = ", ".join(f"{name} {array.shape}" for name, array in found._asdict().items())
        raise UserError(f"{path}: its arrays do not match ({shapes}); train the run again")
    if not np.isin(labels, (0, 1, UNKNOWN)).all() or not ((probabilities >= 0) & (probabilities <= 1)).all():
        raise UserError(f"{path}: labels must be 0 or 1, probabilities between 0 and 1; train the run again")
    return found
