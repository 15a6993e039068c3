"""The larger files of a run, read only when needed: predictions, features, correlation matrices, curves, split."""

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ecgmatch_dist.data.split_file import Split
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.record.metrics_file import read_metrics
from ecgmatch_dist.record.predictions import predictions_file, read_arrays, read_predictions
from ecgmatch_dist.report.runs import FinishedRun, Problem

SplitSizes = dict[str, dict[str, dict[str, int]]]
"""Recordings by checksum of the split, database and part; empty for a split that cannot be read."""


class Curve(NamedTuple):
    """A scalar over the steps of a run."""

    steps: NDArray[np.int64]
    values: NDArray[np.float64]


def predictions(run: FinishedRun) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Labels and probabilities of the test part, both [n, C]."""
    found = read_predictions(predictions_file(run.folder, "test"))
    if found.labels.shape[1] != len(run.classes) or not len(found.labels):
        raise UserError(f"test.npz: labels {found.labels.shape} for {len(run.classes)} classes")
    return found.labels, found.probabilities


def features(run: FinishedRun) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
    """Features z [n, D] and labels [n, C] of the bank's recordings, or of the test part where the method has no bank."""
    bank = run.folder / "bank.npz"
    path = bank if bank.exists() else predictions_file(run.folder, "test")
    z, labels = read_arrays(path, ("features", "labels"))
    if z.ndim != 2 or len(z) != len(labels) or len(z) < 3 or z.shape[1] < 2 or not np.isfinite(z).all():
        raise UserError(f"{path.name}: features of shape {z.shape} cannot be mapped")
    return z, labels


def correlations(run: FinishedRun) -> tuple[NDArray[np.float64], NDArray[np.float64]] | None:
    """R_b and R_u [C, C], where the method has them."""
    path = run.folder / "correlation.npz"
    if not path.exists():
        return None
    R_b, R_u = read_arrays(path, ("R_b", "R_u"))
    C = len(run.classes)
    if R_b.shape != (C, C) or R_u.shape != (C, C):
        raise UserError(f"correlation.npz: matrices of shape {R_b.shape} and {R_u.shape} for {C} classes")
    return R_b.astype(np.float64), R_u.astype(np.float64)


def curves(run: FinishedRun) -> dict[str, Curve]:
    """Every scalar of metrics.jsonl as `train:loss`, `validation:map`, ... A step that was repeated keeps its last value."""
    points: dict[str, dict[int, float]] = defaultdict(dict)
    for line in read_metrics(run.folder):
        for name, value in line.values.items():
            points[f"{line.kind}:{name}"][line.step] = value
    ordered = {name: sorted(values.items()) for name, values in points.items()}
    return {
        name: Curve(np.array([s for s, _ in v]), np.array([x for _, x in v])) for name, v in sorted(ordered.items())
    }


def count_recordings(run: FinishedRun) -> dict[str, dict[str, int]]:
    """Recordings by database and part of the run's split: {"chapman": {"labelled": 388, ...}}."""
    return Split.load(run.folder / "split.json").count_by_database()


def split_sizes(runs: Iterable[FinishedRun], problems: list[Problem]) -> SplitSizes:
    """Read each split once, from the first run that used it. Unreadable ones are added to `problems`."""
    sizes: SplitSizes = {}
    for run in runs:
        if run.split_sha256 in sizes:
            continue
        try:
            sizes[run.split_sha256] = count_recordings(run)
        except UserError as error:
            reason = f"{error}: the paper's values are not shown beside this split"
            problems.append(Problem(run.folder, "incomplete", reason))
            sizes[run.split_sha256] = {}
    return sizes
