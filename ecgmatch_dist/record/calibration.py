"""calibration.json: from the network's logits to probabilities that can be read as frequencies, fitted on the validation part.

A network is often too sure or too shy: of the recordings that it gives 0.8, fewer or more than 80 % have the class. Platt's
method repairs this with two numbers per class, a slope (the inverse of a temperature) and a shift. The order stays.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.special import expit, logit

from ecgmatch_dist.errors import UserError
from ecgmatch_dist.files.strict import check_format, convert, read_object
from ecgmatch_dist.metrics import absent, looked_at
from ecgmatch_dist.record.predictions import predictions_file, read_predictions

FORMAT = 1
REMEDY = "remove the file: it is then computed from predictions/validation.npz"
FLAT, STEEP = 0.01, 100.0
"""Bounds of the slope: it must rise, so that no decision turns round."""
FEWEST = 50
"""Validation recordings that it takes to read a calibrated probability as a frequency."""
Floats = NDArray[np.floating[Any]]


@dataclass(frozen=True)
class Calibration:
    """calibrated probability = sigmoid(slope x logit + shift), per class."""

    slope: tuple[float, ...]
    shift: tuple[float, ...]
    recordings: int
    """Validation recordings that it was fitted on."""
    format: int = FORMAT

    @property
    def few(self) -> bool:
        """Whether its probabilities must not be read as frequencies."""
        return self.recordings < FEWEST

    def __call__(self, logits: Floats) -> NDArray[np.float64]:
        """Logits [..., C] -> calibrated probabilities [..., C]."""
        return np.asarray(expit(np.array(self.slope) * logits + np.array(self.shift)), np.float64)

    def of_probabilities(self, p: Floats) -> NDArray[np.float64]:
        """Probabilities of the network [..., C] -> calibrated ones."""
        return self(to_logits(p))


def to_logits(p: Floats) -> NDArray[np.float64]:
    """The logits of stored probabilities; 32 bits round those of a sure network to 0 or 1."""
    return np.asarray(logit(np.clip(p.astype(np.float64), 1e-7, 1 - 1e-7)), np.float64)


def fit_calibration(y: NDArray[np.uint8], p: Floats) -> Calibration:
    """Labels y [n, C] (1, 0 or UNKNOWN) and probabilities p [n, C]. A class without positives or negatives stays as it is."""
    pairs = [(1.0, 0.0)] * y.shape[1]
    for c in np.flatnonzero(~absent(y)):
        labels, probabilities = looked_at(y, p, c)
        pairs[c] = _platt(labels, to_logits(probabilities))
    slope, shift = zip(*pairs, strict=True)
    return Calibration(slope, shift, len(y))


def _platt(y: NDArray[Any], logits: NDArray[np.float64]) -> tuple[float, float]:
    """Slope and shift with the highest likelihood. Platt's targets, not 0 and 1: where the classes are separated, those would
    have no finite optimum."""
    positive = int(y.sum())
    target = np.where(y == 1, (positive + 1) / (positive + 2), 1 / (len(y) - positive + 2))

    def loss(parameters: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        value = parameters[0] * logits + parameters[1]
        error = expit(value) - target
        return float((np.logaddexp(0, value) - target * value).mean()), np.array(
            [(error * logits).mean(), error.mean()]
        )

    slope, shift = minimize(loss, [1.0, 0.0], jac=True, method="L-BFGS-B", bounds=[(FLAT, STEEP), (None, None)]).x
    return float(slope), float(shift)


def to_file(calibration: Calibration) -> dict[str, Any]:
    return asdict(calibration)


def read_calibration(folder: Path, classes: int) -> Calibration:
    """That of a run folder. Older versions did not write one: it is then fitted to the validation predictions."""
    path = folder / "calibration.json"
    if not path.is_file():
        found = read_predictions(predictions_file(folder, "validation"))
        return fit_calibration(found.labels, found.probabilities)
    value = read_object(path, REMEDY)
    check_format(value, FORMAT, path, REMEDY)
    calibration = convert(value, Calibration, str(path))
    if not len(calibration.slope) == len(calibration.shift) == classes or min(calibration.slope) <= 0:
        raise UserError(f"{path}: it needs a positive slope and a shift for each of the {classes} classes; {REMEDY}")
    return calibration
