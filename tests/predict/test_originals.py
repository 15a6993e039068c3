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
from ecgmatch_dist.export.onnx_file import run_onnx
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


def test_every_way_to_a_model_gives_the_same_numbers(shared_data: Path, tmp_path: Path) -> None:
    """The command, `em.load` with a file and with an array, the exported folder, its ONNX graph. The browser's graph is
    compared in tests/export/test_html.py, the evaluation above."""
    pytest.importorskip("onnxscript")
    folders = [shared_data / "wfdb500" / name for name in FOLDERS.values()]
    files = [path for folder in folders for path in sorted(folder.rglob("*.hea"))[:3]]
    out, exported = tmp_path / "predictions.jsonl", tmp_path / "model"
    command.main(Path("chapman_ptbxl"), tuple(map(str, files)), out=out, workers=1)
    expected = np.array([numbers(json.loads(line)) for line in out.read_text().splitlines()])
    export.main(Path("chapman_ptbxl"), to=exported)
    originals = [read(path) for path in files]
    assert {(original.rate, original.signal.shape) for original in originals} == {(500, (12, 5000))}
    for model in (em.load("chapman_ptbxl", "cpu"), em.load(exported, "cpu")):
        from_files = [numbers(answer.to_json()) for answer in model.predict_files(files)]
        from_arrays = [numbers(model.predict(original.signal, rate=500).to_json()) for original in originals]
        for found in (from_files, from_arrays):
            np.testing.assert_allclose(found, expected, atol=1e-4)
    graph = run_onnx(exported / "model.onnx", np.stack([original.signal for original in originals]))
    found = np.stack([graph.probability.numpy(), graph.calibrated.numpy()], axis=2)
    np.testing.assert_allclose(found, expected, atol=1e-4)


def numbers(row: dict[str, Any]) -> list[list[float]]:
    """Output and calibrated probability of each class, [C, 2]."""
    return [[values["probability"], values["calibrated"]] for values in row["classes"].values()]
