"""Originals of real databases get the same numbers on every way to a model, and those of training's own evaluation."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ecgmatch_dist as em
from ecgmatch_dist.data.formats.read import read
from ecgmatch_dist.data.store import ShardStore
from ecgmatch_dist.data.stream import finite
from ecgmatch_dist.evaluate import predict
from ecgmatch_dist.export import command as export
from ecgmatch_dist.export.onnx_file import run_onnx, write_onnx
from ecgmatch_dist.predict import command
from ecgmatch_dist.predict.result import Prediction

FOLDERS = {"chapman": "chapman_shaoxing", "g12ec": "georgia", "ningbo": "ningbo", "ptbxl": "ptb-xl"}


@pytest.mark.parametrize("database", FOLDERS)
def test_files_and_shards_of_originals(database: str, shared_data: Path, tmp_path: Path) -> None:
    raw = shared_data / "wfdb500" / FOLDERS[database]
    labels = shared_data / "labels" / "ptbxl.csv" if database == "ptbxl" else None
    em.build_shards(database, raw, tmp_path, preset="cpu", labels=labels)
    store = ShardStore(tmp_path, [database])
    model = em.load("chapman_ptbxl", "cpu")
    rows = np.arange(len(store))
    unknown = np.zeros((len(rows), len(model.classes)), np.uint8)
    batches = finite(store, rows, 8, 0, 1)
    expected = predict(model.network, batches, unknown, torch.device("cpu"), torch.float32, model.notes.crop)
    # the recipe of PTB-XL takes the names of the Challenge: 00431_hr is HR00431
    files = {f"HR{path.stem[:-3]}" if path.stem.endswith("_hr") else path.stem: path for path in raw.rglob("*.hea")}
    answers = model.predict_files([files[name.split("/")[1]] for name in store.ids(rows)])
    for row, answer in enumerate(answers):
        assert isinstance(answer, Prediction)
        assert list(answer.probabilities.values()) == pytest.approx(expected.probabilities[row].tolist(), abs=1e-4)
    assert len(rows) >= 8


@pytest.fixture(scope="module")
def originals(shared_data: Path) -> list[Path]:
    folders = [shared_data / "wfdb500" / name for name in FOLDERS.values()]
    return [path for folder in folders for path in sorted(folder.rglob("*.hea"))[:3]]


@pytest.fixture(scope="module")
def expected(originals: list[Path], tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    """What `ecgmatch predict` writes into its table, [12, C, 2]."""
    out = tmp_path_factory.mktemp("table") / "predictions.jsonl"
    command.main(Path("chapman_ptbxl"), tuple(map(str, originals)), out=out, workers=1)
    return np.array([numbers(json.loads(line)) for line in out.read_text().splitlines()])


def test_the_command_and_python(originals: list[Path], expected: np.ndarray, tmp_path: Path) -> None:
    """`em.load` with files and with arrays, also from an exported folder."""
    export.main(Path("chapman_ptbxl"), to=tmp_path / "model", onnx=False)
    for folder in ("chapman_ptbxl", tmp_path / "model"):
        model = em.load(folder, "cpu")
        from_files = [numbers(answer.to_json()) for answer in model.predict_files(originals)]
        from_arrays = [numbers(model.predict(x.signal, rate=x.rate).to_json()) for x in map(read, originals)]
        for found in (from_files, from_arrays):
            np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.slow
def test_the_command_and_onnx(originals: list[Path], expected: np.ndarray, tmp_path: Path) -> None:
    """The browser's graph is compared in tests/export/test_html.py."""
    pytest.importorskip("onnxscript")
    signals = np.stack([read(path).signal for path in originals])
    assert signals.shape[1:] == (12, 5000)
    write_onnx(tmp_path / "model.onnx", em.load("chapman_ptbxl", "cpu"), 500, 5000)
    graph = run_onnx(tmp_path / "model.onnx", signals)
    found = np.stack([graph.probability.numpy(), graph.calibrated.numpy()], axis=2)
    np.testing.assert_allclose(found, expected, atol=1e-4)


def numbers(row: dict[str, Any]) -> list[list[float]]:
    """Output and calibrated probability of each class, [C, 2]."""
    return [[values["probability"], values["calibrated"]] for values in row["classes"].values()]
