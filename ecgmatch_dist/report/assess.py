"""Check each run's result against its saved predictions, resample its test metrics, and measure its calibration."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ecgmatch_dist.errors import UserError
from ecgmatch_dist.metrics import looked_at
from ecgmatch_dist.report.calibration import brier, reliability
from ecgmatch_dist.report.resample import Floats, Scores, counts, interval, resample
from ecgmatch_dist.report.run_files import predictions
from ecgmatch_dist.report.runs import FinishedRun

CHECKED = ("map", "macro_auc", "ranking_loss", "coverage")
"""Metrics without thresholds: recomputed from the predictions, they must equal the result's."""
TOLERANCE = 2e-3
"""Probabilities are saved in single precision."""


@dataclass(frozen=True)
class Assessment:
    """What the saved predictions of a run say beyond its result."""

    contradiction: str = ""
    """Where result and predictions disagree; such a run is left out."""
    unreadable: str = ""
    """Why the predictions cannot be read; the result is used all the same."""
    calibration: dict[str, float] = field(default_factory=dict)
    """Macro means of "ece" and "brier"."""
    replicates: dict[str, Floats] = field(default_factory=dict)
    """The six metrics on resampled test recordings [R]."""


Assessments = dict[str, Assessment]
"""By run folder."""


def assess(runs: Sequence[FinishedRun], replicates: int) -> Assessments:
    """Assess runs of one split. All use the same resamples, so that differences between runs are paired."""
    out: Assessments = {}
    weights: dict[int, Scores] = {}
    for run in runs:
        try:
            labels, probabilities = predictions(run)
        except UserError as error:
            out[str(run.folder)] = Assessment(unreadable=str(error))
            continue
        thresholds = np.array(run.thresholds)
        n = len(labels)
        if n not in weights:
            weights[n] = split_counts(run, n, replicates)
        resampled = resample(labels, probabilities, thresholds, weights[n])
        if contradiction := find_contradiction(run, {name: float(values[0]) for name, values in resampled.items()}):
            out[str(run.folder)] = Assessment(contradiction=contradiction)
            continue
        classes = [looked_at(labels, probabilities, c) for c in range(labels.shape[1])]
        classes = [(y, p) for y, p in classes if len(y)]
        calibration = {
            "ece": float(np.mean([reliability(*of_class).ece for of_class in classes])),
            "brier": float(np.mean([brier(*of_class) for of_class in classes])),
        }
        known = {name: values[1:] for name, values in resampled.items() if np.isfinite(values[1:]).any()}
        out[str(run.folder)] = Assessment(calibration=calibration, replicates=known)
    return out


def split_counts(run: FinishedRun, n: int, replicates: int) -> Scores:
    """The resamples of a run's split: the same for all its runs."""
    return counts(n, replicates, seed=int(run.split_sha256[:8].encode().hex(), 16))


@dataclass(frozen=True)
class CommitteeDifference:
    """A run against the mean prediction of the runs that it started from."""

    committee_map: float
    replicates: Floats | None
    """The run's MAP minus the committee's on resampled test recordings [R]; None where the run has none."""


def committee_difference(
    run: FinishedRun, members: Sequence[FinishedRun], assessed: Assessments
) -> CommitteeDifference:
    """Test MAP of the members' mean probabilities, and how far `run` is from it on the same resamples."""
    found = [predictions(member) for member in members]
    labels = found[0][0]
    if any(other.shape != labels.shape or (other != labels).any() for other, _ in found):
        raise UserError(f"{run.name}: the runs that it started from were not tested on the same recordings")
    mean: Scores = (
        np.stack([probabilities for _, probabilities in found]).mean(axis=0, dtype=np.float64).astype(np.float32)
    )
    thresholds = np.array(run.thresholds)
    ours = assessed[str(run.folder)].replicates.get("map") if str(run.folder) in assessed else None
    draws = 0 if ours is None else len(ours)
    theirs = resample(labels, mean, thresholds, split_counts(run, len(labels), draws))["map"]
    return CommitteeDifference(float(theirs[0]), None if ours is None else ours - theirs[1:])


def find_contradiction(run: FinishedRun, exact: dict[str, float]) -> str:
    for name in CHECKED:
        recorded, computed = run.test.get(name), exact[name]
        if abs(recorded - computed) > TOLERANCE * max(1.0, abs(computed)):
            return f"result.json says {name} {recorded:.4f}, its predictions give {computed:.4f}"
    return ""


def replicates_by_seed(runs: Iterable[FinishedRun], metric: str, assessed: Assessments) -> dict[int, Floats]:
    """Resampled values of a metric, for those runs that have them."""
    found = {run.seed: assessed[str(run.folder)].replicates.get(metric) for run in runs if str(run.folder) in assessed}
    return {seed: values for seed, values in found.items() if values is not None}


def difference_interval(ours: dict[int, Floats], theirs: dict[int, Floats]) -> tuple[float, float] | None:
    """95 % interval of the mean difference over the seeds that both have; None without such a seed."""
    seeds = sorted(ours.keys() & theirs.keys())
    return interval(np.mean([ours[seed] - theirs[seed] for seed in seeds], axis=0)) if seeds else None
