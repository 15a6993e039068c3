"""An entry for the PhysioNet/CinC Challenge 2021: its `load_model` and `run_model`, around a model of ours.

That Challenge is the one about many classes of 12-lead ECGs. Its runner reads the header as text and the signal file as an
array of integers, and expects for each recording the classes, 0 or 1, and a probability per class. A class is named by its
SNOMED CT codes, several joined by `|`, as the Challenge's own scorer writes classes that count as one.
"""

import re
import shutil
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ecgmatch_dist.data.formats.leads import millivolts
from ecgmatch_dist.data.formats.wfdb_record import MISSING
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.files.atomic import write_text
from ecgmatch_dist.predict.model import Predictor

SCALE = re.compile(r"(?P<gain>[-+.\deE]+)?(?:\((?P<baseline>-?\d+)\))?(?:/(?P<unit>\S+))?")
DOCKERFILE = """FROM python:{python}-slim
RUN mkdir /physionet
COPY ./ /physionet
WORKDIR /physionet
RUN pip install --no-cache-dir -r requirements.txt
"""


def class_names(model: Predictor) -> list[str]:
    return ["|".join(sorted(codes)) for codes in model.scheme.codes]


def run(
    model: Predictor, header: str, recording: NDArray[Any]
) -> tuple[list[str], NDArray[np.int64], NDArray[np.float64]]:
    """Classes, labels [C] and probabilities [C] of a recording [leads, samples] of a signal file."""
    rate, leads, signal = physical(header, recording)
    answer = model.predict(signal, rate=rate, leads=leads)
    labels = np.array([name in answer.predicted for name in model.classes], np.int64)
    return class_names(model), labels, np.array(list(answer.probabilities.values()))


def physical(header: str, recording: NDArray[Any]) -> tuple[float, Sequence[str], NDArray[np.float32]]:
    """Rate, names of the leads, and the signal in mV."""
    lines = [line.split() for line in header.splitlines() if line.strip() and not line.startswith("#")]
    if len(lines) < 2 or len(lines[0]) < 3 or len(lines) != len(recording) + 1:
        raise UserError(
            f"a header of {max(len(lines) - 1, 0)} leads and a recording of {len(recording)}: they do not match"
        )
    signal = np.array(recording, np.float32)
    signal[np.asarray(recording) == MISSING] = np.nan
    for row, words in enumerate(lines[1:]):
        scale = SCALE.fullmatch(words[2])
        if scale is None:
            raise UserError(f"{' '.join(words)}: not a line of a WFDB header")
        baseline = float(scale["baseline"] or (words[4] if len(words) > 4 else 0))
        signal[row] = (signal[row] - baseline) / float(scale["gain"] or 200) * millivolts(scale["unit"] or "mV")
    return float(lines[0][2].split("/")[0]), [words[-1] for words in lines[1:]], signal


def write_entry(to: Path, model_folder: Path) -> None:
    """A folder that the Challenge's runner takes: team_code.py, the model, this package, what it needs, a Dockerfile."""
    to.mkdir(parents=True, exist_ok=True)
    shutil.copytree(model_folder, to / "model", ignore=shutil.ignore_patterns("*.onnx", "*.html"))
    package = Path(str(files("ecgmatch_dist")))
    shutil.copytree(package, to / "ecgmatch_dist", ignore=shutil.ignore_patterns("__pycache__", "_recipes"))
    write_text(to / "team_code.py", (files("ecgmatch_dist.export") / "team_code.py.txt").read_text(encoding="utf-8"))
    write_text(to / "requirements.txt", "".join(f"{line}\n" for line in needed()))
    python = f"{sys.version_info.major}.{sys.version_info.minor}"  # the versions in requirements.txt are for this one
    write_text(to / "Dockerfile", DOCKERFILE.format(python=python))


def needed() -> list[str]:
    """What this package needs, in the versions that are installed here."""
    try:
        names = [line for line in requires("ecgmatch-dist") or [] if "extra ==" not in line]
    except PackageNotFoundError:
        raise UserError(
            "--challenge: this package is not installed, so its needs are not known; pip install it"
        ) from None
    plain = [re.split(r"[\s<>=!~;]", name)[0] for name in names]
    return [f"{name}=={version(name.partition('[')[0]).partition('+')[0]}" for name in plain]
