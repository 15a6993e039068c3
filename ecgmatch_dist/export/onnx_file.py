"""model.onnx: the graph of `graph.py` in ONNX, checked against `predict` before anybody uses it."""

import json
import logging
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ecgmatch_dist.data.preprocess import LEADS
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.export.graph import Answer, Graph
from ecgmatch_dist.predict.model import Predictor

TOLERANCE = 1e-4
"""Largest difference of a probability between the graph and `predict`."""


def need_onnx() -> None:
    missing = [name for name in ("onnx", "onnxruntime", "onnxscript") if find_spec(name) is None]
    if missing:
        raise UserError(f"{', '.join(missing)}: not installed; pip install 'ecgmatch-dist[onnx]', or give --no-onnx")


def write_onnx(path: Path, model: Predictor, rate: float, samples: int) -> None:
    """The graph for recordings of `samples` at `rate`, any number of them at once."""
    import onnx

    graph = Graph(model, rate, samples).cpu().eval()
    example = torch.zeros(2, len(LEADS), samples)
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # of torch's own code
        program = torch.onnx.export(
            graph,
            (example,),
            input_names=["signal"],
            output_names=list(Answer._fields),
            dynamic_shapes={"signal": {0: torch.export.Dim("recordings")}},
            dynamo=True,
            verbose=False,
        )
    assert program is not None
    program.save(str(path), external_data=False)
    proto = onnx.load(str(path))
    for key, value in about(model, rate, samples).items():
        proto.metadata_props.add(key=key, value=json.dumps(value))
    onnx.checker.check_model(proto)
    onnx.save(proto, str(path))


def about(model: Predictor, rate: float, samples: int) -> dict[str, Any]:
    """What a program must know to call the graph; also the metadata of the file."""
    return {
        "input": "signal, float32 [recordings, 12, samples], mV, no missing values",
        "leads": list(LEADS),
        "rate": rate,
        "samples": samples,
        "classes": list(model.scheme.classes),
        "outputs": list(Answer._fields),
        "warning": "for research; not a medical device",
    }


def run_onnx(path: Path, signals: NDArray[np.float32]) -> Answer:
    """The answers of the file for signals [b, 12, n], by onnxruntime."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return Answer(*(torch.from_numpy(np.asarray(value)) for value in session.run(None, {"signal": signals})))


def check_onnx(path: Path, model: Predictor, rate: float, signals: NDArray[np.float32]) -> float:
    """The largest difference between the file and `predict` for signals [b, 12, n]. More than TOLERANCE is an error."""
    found = run_onnx(path, signals)
    expected = list(model.predict_many(signals, rate=rate))
    worst = 0.0
    for own, name in ((found.probability, "probabilities"), (found.calibrated, "calibrated")):
        numbers = np.array([list(getattr(answer, name).values()) for answer in expected])
        worst = max(worst, float(np.abs(own.numpy() - numbers).max()))
    if not worst <= TOLERANCE:
        raise UserError(
            f"{path}: it differs from `predict` by {worst:.1e}, more than {TOLERANCE:g}; please report this"
        )
    return worst


def check_signals(samples: int, rate: float) -> NDArray[np.float32]:
    """Four made-up recordings [4, 12, samples]: beats with drift and noise; the last has a flat lead."""
    rng = np.random.default_rng(0)
    t = np.arange(samples) / rate
    beats = np.exp(-0.5 * (((t + rng.uniform(0, 1, (4, 12, 1)) / 9) % 0.8 - 0.4) / 0.012) ** 2)
    drift = np.sin(2 * np.pi * 0.3 * t + rng.uniform(0, 6, (4, 12, 1))) / 3
    signals = rng.uniform(-1.5, 1.5, (4, 12, 1)) * beats + drift + rng.normal(0, 0.02, (4, 12, samples))
    signals[3, 7] = 0.1
    return signals.astype(np.float32)
