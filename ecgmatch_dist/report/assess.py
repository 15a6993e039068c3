"""What the saved predictions of a run tell beyond its result: is the result theirs, how uncertain, how well calibrated."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ecgmatch_dist.metrics import compute_metrics
from ecgmatch_dist.report.calibration import brier, reliability
from ecgmatch_dist.report.records import predictions
from ecgmatch_dist.report.resample import Floats, Scores, counts, resample
from ecgmatch_dist.report.runs import METRICS, Damaged, Run

RANKED = ("map", "macro_auc", "ranking_loss", "coverage")
"""Metrics without thresholds: recomputed from predictions, they must be those of the result."""
TOLERANCE = 2e-3
"""Probabilities are saved in single precision."""


@dataclass(frozen=True)
class Assessment:
    """Of one run. `doubt` is empty, or says why its result must not be used."""

    doubt: str = ""
    unreadable: str = ""
    """Why the predictions cannot be read; the result itself still stands."""
    calibration: dict[str, float] = field(default_factory=dict)
    """Macro means of "ece" and "brier"."""
    replicates: dict[str, Floats] = field(default_factory=dict)
    """The six metrics on resampled test recordings [R]."""


def assess(runs: Sequence[Run], replicates: int) -> dict[str, Assessment]:
    """Assess runs that were tested on the same split; all see the same resamples, so that their differences are paired."""
    out: dict[str, Assessment] = {}
    weights: dict[int, Scores] = {}
    for run in runs:
        try:
            labels, probabilities = predictions(run)
        except Damaged as error:
            out[str(run.folder)] = Assessment(unreadable=str(error))
            continue
        thresholds = np.array(run.thresholds)
        measured = compute_metrics(labels, probabilities, thresholds, list(run.classes))
        exact = {name: float(measured[name]) for name in METRICS}
        if doubt := contradiction(run, exact):
            out[str(run.folder)] = Assessment(doubt=doubt)
            continue
        n = len(labels)
        if n not in weights:
            weights[n] = counts(n, replicates, seed=int(run.split_sha256[:8].encode().hex(), 16))
        classes = range(labels.shape[1])
        calibration = {
            "ece": float(np.mean([reliability(labels[:, c], probabilities[:, c]).ece for c in classes])),
            "brier": float(np.mean([brier(labels[:, c], probabilities[:, c]) for c in classes])),
        }
        drawn = resample(labels, probabilities, thresholds, weights[n], exact)
        known = {name: values for name, values in drawn.items() if np.isfinite(values).any()}
        out[str(run.folder)] = Assessment(calibration=calibration, replicates=known)
    return out


def contradiction(run: Run, exact: dict[str, float]) -> str:
    """Where the result and the predictions of a run tell different stories."""
    for name in RANKED:
        said, found = run.test[name], exact[name]
        if said is not None and abs(said - found) > TOLERANCE * max(1.0, abs(found)):
            return f"result.json says {name} {said:.4f}, its predictions give {found:.4f}"
    return ""
