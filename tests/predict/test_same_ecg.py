"""The same ECG at another rate or in another unit is nearly the same input for the network, so it gets nearly the same answer.

`docs/predict.md` has the differences of a trained model's answers."""

from pathlib import Path

import numpy as np
import pytest
from scipy.signal import resample_poly

from ecgmatch_dist.data.formats.read import from_array, read
from ecgmatch_dist.data.preprocess import LEADS, PRESETS
from ecgmatch_dist.predict.prepare import Inputs, prepare

DATABASES = ("chapman_shaoxing", "georgia", "ningbo", "ptb-xl")


def seen(signal: np.ndarray, rate: float, **said: object) -> np.ndarray:
    """The network's input for an array."""
    settings = {"unit": "mV", "leads": LEADS} | said
    recording = from_array(signal, rate=rate, **settings)  # type: ignore[arg-type]
    return prepare(recording, Inputs(PRESETS["cpu"], 0)).x.astype(np.float64)


@pytest.mark.parametrize("database", DATABASES)
def test_of_originals(database: str, shared_data: Path) -> None:
    header = next((shared_data / "wfdb500" / database / "g1").glob("*.hea"))
    original = read(header)
    expected = prepare(original, Inputs(PRESETS["cpu"], 0)).x.astype(np.float64)
    size = np.sqrt(np.mean(expected**2))
    order = np.random.default_rng(0).permutation(12)
    signal, rate = original.signal, original.rate
    for what, found, most in (
        ("250 Hz", seen(resample_poly(signal, 1, 2, axis=1, padtype="line"), rate / 2), 0.05),
        ("1000 Hz", seen(resample_poly(signal, 2, 1, axis=1, padtype="line"), rate * 2), 0.05),
        ("permuted", seen(signal[order], rate, leads=[LEADS[v] for v in order]), 0),
        ("turned", seen(signal.T, rate), 0),
        ("microvolts", seen(np.round(1000 * signal).astype(np.int16), rate, unit="uV"), 0.02),
    ):
        difference = np.sqrt(np.mean((found - expected) ** 2)) / size
        assert difference <= most, f"{what}: {difference:.4f}"
