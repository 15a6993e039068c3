"""trees.safetensors: trees on measurements that come with a model, for runs that begin with it (`--weights`) and for its own
answers (`predict --trees`).

A node has 10 bytes: the measurement that it looks at (-1: a leaf), the threshold or, of a leaf, the share of positives, and its
right child. The left child is the next node. A child lies behind its parent, and number and depth of the trees are limited, so
no file can make a prediction endless.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from ecgmatch_dist.config import OPINION
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.files.atomic import write_atomic
from ecgmatch_dist.files.strict import check_format
from ecgmatch_dist.measurements.measure import number_of_measurements
from ecgmatch_dist.measurements.trees import Forests

NAME = "trees.safetensors"
FORMAT = 1
REMEDY = "write it anew by `ecgmatch export --trees`, or remove it: the model works without"
KINDS = {"feature": np.int16, "value": np.float32, "right": np.int32, "roots": np.int32, "trees": np.int32}
LEAF = -1
MOST_TREES, DEEPEST = 100_000, 200  # of all classes; nodes from a root to a leaf


class OtherMeasurements(UserError):
    """These trees are sound, but they read the measurements of another version."""


def save_trees(path: Path, forests: Forests, classes: Sequence[str], answers: int = 0) -> None:
    """Write forests. They read the measurements, and behind them so many `answers` of other trees. Shares are rounded to
    float32, thresholds down to it: measurements are float32, so none changes its side. Refuses what `load_trees` would."""
    if wrong := why_not_saved(forests, answers):
        raise UserError(f"{path}: {wrong}; export the model without --trees")
    notes = {"format": FORMAT, "classes": list(classes), "measurements": number_of_measurements(), "version": OPINION}
    notes |= {"answers": answers} if answers else {}
    content = save(as_arrays(forests), {"notes": json.dumps(notes, sort_keys=True)})
    write_atomic(path, lambda to: to.write_bytes(content))


def why_not_saved(forests: Forests, answers: int = 0) -> str:
    """Why these forests cannot have a file; empty: they can."""
    return what_is_wrong(as_arrays(forests), len(forests.trees), number_of_measurements() + answers)


def as_saved(forests: Forests) -> Forests:
    """The forests as `load_trees` returns them from their file."""
    return as_forests(as_arrays(forests))


def as_arrays(forests: Forests) -> dict[str, NDArray[Any]]:
    own = np.arange(len(forests.feature))
    leaf = forests.left == own
    assert np.array_equal(forests.left[~leaf], own[~leaf] + 1), "a left child is the next node"
    arrays = {
        "feature": np.where(leaf, LEAF, forests.feature),
        "value": np.where(leaf, forests.share.astype(np.float32), rounded_down(forests.threshold)),
        "right": forests.right,
        "roots": forests.roots,
        "trees": forests.trees,
    }
    return {name: np.ascontiguousarray(array, KINDS[name]) for name, array in arrays.items()}


def rounded_down(values: NDArray[np.float64]) -> NDArray[np.float32]:
    """The largest float32 that is not above each value."""
    nearest = values.astype(np.float32)
    return np.where(nearest > values, np.nextafter(nearest, np.float32(-np.inf)), nearest)


def load_trees(path: Path, answers: int = 0) -> tuple[Forests, tuple[str, ...]]:
    """The forests and their classes. Refuses trees of other measurements, or of another number of other trees' answers, and
    arrays that are no trees."""
    try:
        with safe_open(path, "np") as file:
            notes = json.loads((file.metadata() or {})["notes"])
            arrays = {name: file.get_tensor(name) for name in KINDS}
    except (OSError, SafetensorError, KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{path}: not the trees of a model ({error}); {REMEDY}") from None
    if not isinstance(notes, dict):
        raise UserError(f"{path}: not the trees of a model (its notes are no object); {REMEDY}")
    check_format(notes, FORMAT, path, REMEDY)
    measurements = number_of_measurements()
    if (notes.get("measurements"), notes.get("version")) != (measurements, OPINION):
        raise OtherMeasurements(
            f"{path}: these trees read other measurements than this version of ecgmatch_dist makes, and are not asked; "
            "`ecgmatch export --trees` makes new ones"
        )
    if notes.get("answers", 0) != answers:
        raise UserError(f"{path}: these trees read the answers of other trees, which are not beside them; {REMEDY}")
    classes = notes.get("classes")
    if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
        raise UserError(f"{path}: its classes are no list of names; {REMEDY}")
    if wrong := what_is_wrong(arrays, len(classes), measurements + answers):
        raise UserError(f"{path}: {wrong}; {REMEDY}")
    return as_forests(arrays), tuple(classes)


def what_is_wrong(arrays: dict[str, NDArray[Any]], classes: int, measurements: int) -> str:
    """Why these arrays are no forests of so many classes; empty: they are."""
    if any(array.dtype != KINDS[name] or array.ndim != 1 for name, array in arrays.items()):
        return "an array has another type or shape than it should"
    feature, value, right, roots, trees = (arrays[name] for name in KINDS)
    nodes, own = len(feature), np.arange(len(feature))
    leaf = feature == LEAF
    if not len(value) == len(right) == nodes:
        return "its arrays have different lengths"
    if len(trees) != classes or classes == 0:
        return f"it has trees of {len(trees)} classes and names of {classes}"
    if (trees < 1).any() or trees.sum(dtype=np.int64) != len(roots):
        return "a class has no tree, or others than there are"
    if len(roots) > MOST_TREES:
        return f"it has more than {MOST_TREES:,} trees"
    if roots[0] != 0 or (np.diff(roots.astype(np.int64)) < 1).any() or roots[-1] >= nodes:
        return "a tree begins outside of the nodes, or where another one does"
    if (feature < LEAF).any() or (feature >= measurements).any():
        return "a node looks at a measurement that does not exist"
    if (right[leaf] != own[leaf]).any() or (right[~leaf] <= own[~leaf] + 1).any() or (right >= nodes).any():
        return "a child does not lie behind its parent"
    if not np.isfinite(value).all() or (value[leaf] < 0).any() or (value[leaf] > 1).any():
        return "a threshold is not finite, or a share not between 0 and 1"
    level = roots
    for _ in range(DEEPEST):
        inner = level[~leaf[level]]
        level = np.unique(np.concatenate([inner + 1, right[inner]]))
    return f"a tree is deeper than {DEEPEST} nodes" if len(level) else ""


def as_forests(arrays: dict[str, NDArray[Any]]) -> Forests:
    feature, value, right, roots, trees = (arrays[name] for name in KINDS)
    own = np.arange(len(feature), dtype=np.int32)
    leaf = feature == LEAF
    value = value.astype(np.float64)
    return Forests(
        feature=np.where(leaf, 0, feature).astype(np.int32),
        threshold=np.where(leaf, 0.0, value),
        left=np.where(leaf, own, own + 1).astype(np.int32),
        right=right,
        share=np.where(leaf, value, 0.0),
        roots=roots,
        trees=trees,
    )
