"""Originals of real databases: files given to `em.load` get the numbers that training's own evaluation computes from shards."""

from pathlib import Path

import numpy as np
import pytest
import torch

import ecgmatch_dist as em
from ecgmatch_dist.data.store import ShardStore
from ecgmatch_dist.data.stream import finite
from ecgmatch_dist.evaluate import predict
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
