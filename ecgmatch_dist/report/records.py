"""The larger files of a run, read when a figure or an interval needs them: predictions, curves, correlation matrices, split."""

import json
import math
import zipfile
import zlib
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ecgmatch_dist.report.runs import PARTS, Damaged, Run, read_object


class Predictions(NamedTuple):
    """Labels [n, C] and probabilities [n, C] of a part, and how many recordings it has."""

    labels: NDArray[np.uint8]
    probabilities: NDArray[np.float32]


class Curve(NamedTuple):
    """A scalar over the steps of a run."""

    steps: NDArray[np.int64]
    values: NDArray[np.float64]


def arrays(path: Path, names: tuple[str, ...]) -> list[NDArray[Any]]:
    """Named arrays of an .npz; nothing pickled is loaded."""
    try:
        with np.load(path, allow_pickle=False) as file:
            return [file[name] for name in names]
    except FileNotFoundError:
        raise Damaged(f"no {path.name}") from None
    except KeyError as error:
        raise Damaged(f"{path.name}: {error.args[0]}") from None
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise Damaged(f"{path.name} is damaged: {error}") from None


def predictions(run: Run, part: str = "test") -> Predictions:
    """What the kept model says of a part."""
    name = f"{part}.npz"
    labels, probabilities = arrays(run.folder / "predictions" / name, ("labels", "probabilities"))
    if (
        labels.ndim != 2
        or labels.shape != probabilities.shape
        or labels.shape[1] != len(run.classes)
        or not len(labels)
    ):
        raise Damaged(
            f"{name}: labels {labels.shape} and probabilities {probabilities.shape} for {len(run.classes)} classes"
        )
    if not np.isin(labels, (0, 1)).all() or not ((probabilities >= 0) & (probabilities <= 1)).all():
        raise Damaged(f"{name}: labels must be 0 or 1, probabilities between 0 and 1")
    return Predictions(labels.astype(np.uint8), probabilities.astype(np.float32))


def features(run: Run) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
    """Features z [n, D] and labels [n, C] of the bank's recordings, or of the test part where the method has no bank."""
    bank, test = run.folder / "bank.npz", run.folder / "predictions" / "test.npz"
    path = bank if bank.exists() else test
    z, labels = arrays(path, ("features", "labels"))
    if z.ndim != 2 or len(z) != len(labels) or len(z) < 3 or z.shape[1] < 2 or not np.isfinite(z).all():
        raise Damaged(f"{path.name}: features of shape {z.shape} cannot be mapped")
    return z, labels


def correlations(run: Run) -> tuple[NDArray[np.float64], NDArray[np.float64]] | None:
    """R_b and R_u [C, C], where the method has them."""
    if not (run.folder / "correlation.npz").exists():
        return None
    R_b, R_u = arrays(run.folder / "correlation.npz", ("R_b", "R_u"))
    size = (len(run.classes), len(run.classes))
    if R_b.shape != size or R_u.shape != size:
        raise Damaged(f"correlation.npz: matrices of shape {R_b.shape} and {R_u.shape} for {len(run.classes)} classes")
    return R_b.astype(np.float64), R_u.astype(np.float64)


def curves(run: Run) -> dict[str, Curve]:
    """Every scalar of metrics.jsonl as `train:loss`, `validation:map`, ...; of a step that was run again, the last value."""
    points: dict[str, dict[int, float]] = defaultdict(dict)
    try:
        with (run.folder / "metrics.jsonl").open(encoding="utf-8", errors="replace") as file:
            for line in file:
                try:
                    record = json.loads(line)
                    step, kind = int(record.pop("step")), record.pop("kind")
                except (
                    ValueError,
                    KeyError,
                    TypeError,
                    AttributeError,
                ):  # the last line of a killed run may be half a line
                    continue
                for name, value in record.items():
                    if isinstance(value, int | float) and math.isfinite(value):
                        points[f"{kind}:{name}"][step] = value
    except OSError:
        return {}
    ordered = {name: sorted(values.items()) for name, values in points.items()}
    return {
        name: Curve(np.array([s for s, _ in v]), np.array([x for _, x in v])) for name, v in sorted(ordered.items())
    }


def recordings(run: Run) -> dict[str, dict[str, int]]:
    """Recordings of each database in each part of the run's split: {"chapman": {"labelled": 388, ...}}."""
    parts = read_object(run.folder / "split.json").get("parts")
    if not isinstance(parts, dict):
        raise Damaged("split.json has no `parts`")
    out: dict[str, dict[str, int]] = {}
    for part in PARTS:
        keys = parts.get(part, [])
        if not isinstance(keys, list):
            raise Damaged(f"split.json: `{part}` is no list")
        for key in keys:
            of_database = out.setdefault(str(key).split("/", 1)[0], dict.fromkeys(PARTS, 0))
            of_database[part] += 1
    return out
