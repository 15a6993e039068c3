"""The same ECG at another rate, in another unit or format gets nearly the same answer from the package's own model.

`docs/predict.md` has the differences on all originals."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from scipy.signal import resample_poly

import ecgmatch_dist as em
from ecgmatch_dist.data.formats.read import read
from ecgmatch_dist.data.preprocess import LEADS
from ecgmatch_dist.predict.model import Predictor
from ecgmatch_dist.predict.result import Failure, Prediction
from tests.support.formats import WRITERS, as_hdf5

DATABASES = ("chapman_shaoxing", "georgia", "ningbo", "ptb-xl")
EIGHT = [0, 1, 6, 7, 8, 9, 10, 11]


@cache
def model() -> Predictor:
    return em.load("chapman_ptbxl", "cpu")


def numbers(answer: Prediction | Failure) -> np.ndarray:
    """Outputs and calibrated probabilities, [2, C]."""
    assert isinstance(answer, Prediction), answer.error
    return np.array([[*answer.probabilities.values()], [*answer.calibrated.values()]])


def otherwise(signal: np.ndarray, rate: float) -> Iterator[tuple[str, Prediction]]:
    """The signal in other words."""
    order = np.random.default_rng(0).permutation(12)
    predict = model().predict
    yield "250 Hz", predict(resample_poly(signal, 1, 2, axis=1, padtype="line"), rate=rate / 2)
    yield "1000 Hz", predict(resample_poly(signal, 2, 1, axis=1, padtype="line"), rate=rate * 2)
    yield "permuted", predict(signal[order], rate=rate, leads=[LEADS[v] for v in order])
    yield "turned", predict(signal.T, rate=rate)
    yield "microvolts", predict(np.round(1000 * signal).astype(np.int16), rate=rate, unit="uV")
    yield "eight leads", predict(signal[EIGHT], rate=rate, leads=[LEADS[v] for v in EIGHT])


@pytest.mark.parametrize("database", DATABASES)
def test_rates_units_leads(database: str, shared_data: Path) -> None:
    for header in sorted((shared_data / "wfdb500" / database / "g1").glob("*.hea"))[:3]:
        original = read(header)
        expected = numbers(model().predict(original.signal, rate=original.rate))
        for what, answer in otherwise(original.signal, original.rate):
            difference = np.abs(numbers(answer) - expected).max()
            assert difference <= (1e-5 if what in ("permuted", "turned") else 0.02), f"{header.stem}, {what}"


@pytest.mark.parametrize("database", DATABASES)
def test_formats(database: str, shared_data: Path, tmp_path: Path) -> None:
    header = next(iter(sorted((shared_data / "wfdb500" / database / "g1").glob("*.hea"))))
    original = read(header)
    (answer,) = model().predict_files(header)
    rate, said = int(original.rate), {"rate": original.rate, "unit": "mV", "leads": LEADS}
    for name, (write, asked) in {**WRITERS, "code15.hdf5": (as_hdf5, said)}.items():
        path = tmp_path / name
        write(path, original.signal, rate)
        found = next(iter(model().predict_files(path, **(said if asked else {}))))  # type: ignore[arg-type]
        assert np.abs(numbers(found) - numbers(answer)).max() <= 0.02, name
