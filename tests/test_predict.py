"""Prediction of new recordings: thresholds, nearest cases, the page, and one-line errors for bad input."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import wfdb
from safetensors.torch import save_file
from torch import Tensor

from ecgmatch_dist import predict
from ecgmatch_dist.config import Model
from ecgmatch_dist.data.preprocess import preprocess
from ecgmatch_dist.data.recordings import LEADS
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.network.crops import places
from ecgmatch_dist.network.model import build_model


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder with an untrained model and forty known cases."""
    folder = tmp_path / "run"
    (folder / "predictions").mkdir(parents=True)
    model = build_model(5, Model(width=16, heads=2), seed=0)
    notes = {
        "classes": ["CD", "Rhythm", "STT", "Other", "Normal"],
        "scheme": "ecgmatch5",
        "thresholds": [0.0, 1.0, 0.5, 0.5, 0.5],
        "preprocess": {
            "rate": 100,
            "length": 1024,
            "low": 1.0,
            "high": 47.0,
            "order": 3,
            "sequence": ["pad", "filter", "zscore"],
        },
        "model": {"width": 16, "heads": 2, "dropout": 0.5},
        "step": 50,
    }
    state: dict[str, Tensor] = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(state, folder / "best.safetensors", {name: json.dumps(value) for name, value in notes.items()})
    rng = np.random.default_rng(0)
    for part in ("labelled", "validation"):
        arrays = {
            "ids": np.array([f"chapman/{part}{i}" for i in range(20)]),
            "labels": np.eye(5, dtype=np.uint8)[np.arange(20) % 5],
            "probabilities": np.full((20, 5), 0.5, np.float32),
        }
        np.savez(
            folder / "predictions" / f"{part}.npz", **arrays, features=rng.standard_normal((20, 16)).astype(np.float32)
        )
    return folder


@pytest.fixture
def record(tmp_path: Path) -> Path:
    rng = np.random.default_rng(1)
    signal = np.cumsum(rng.standard_normal((5000, 12)), axis=0) / 50
    wfdb.wrsamp(
        "N1",
        500,
        ["mV"] * 12,
        list(LEADS),
        signal,
        fmt=["16"] * 12,
        adc_gain=[1000] * 12,
        baseline=[0] * 12,
        write_dir=str(tmp_path),
    )
    return tmp_path / "N1.hea"


def test_thresholds_and_nearest_cases(run: Path, record: Path) -> None:
    predictor = predict.Predictor(run)
    prediction = predictor(predict.read_record(record), nearest=4)
    assert "CD" in prediction.predicted  # threshold 0
    assert "Rhythm" not in prediction.predicted  # threshold 1
    similarity = [case.similarity for case in prediction.nearest]
    assert similarity == sorted(similarity, reverse=True)
    assert len(similarity) == 4
    assert "resampled" in prediction.flags


def test_a_known_case_finds_itself(run: Path) -> None:
    predictor = predict.Predictor(run)
    ids, labels, features = predictor.cases
    for i in (0, 7, 25):
        (case,) = predictor.nearest(3 * features[i], 1)
        assert case.id == ids[i]
        assert case.similarity == pytest.approx(1, abs=1e-6)
        assert case.classes == [predictor.classes[int(labels[i].argmax())]]


def test_the_page(run: Path, record: Path, tmp_path: Path) -> None:
    predict.main(run, (record, record.with_suffix("")), out=tmp_path / "out")
    page = (tmp_path / "out" / "index.html").read_text()
    assert page.count("data:image/svg+xml;base64,") == 2
    assert "http" not in page
    written = json.loads((tmp_path / "out" / "predictions.json").read_text())
    assert [entry["record"] for entry in written] == ["N1", "N1"]
    assert set(written[0]["probabilities"]) == {"CD", "Rhythm", "STT", "Other", "Normal"}


def test_bad_input_is_one_line(run: Path, record: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not the weights of a run"):
        predict.Predictor(tmp_path)
    with pytest.raises(UserError, match="nothing-here"):
        predict.read_record(tmp_path / "nothing-here")
    record.with_suffix(".dat").write_bytes(record.with_suffix(".dat").read_bytes()[:1000])
    with pytest.raises(UserError, match="N1"):
        predict.read_record(record)
    (run / "predictions" / "labelled.npz").unlink()
    with pytest.raises(UserError, match=r"labelled\.npz.*has not finished"):
        predict.Predictor(run)


def test_a_longer_recording_is_seen_whole_by_a_network_of_crops(run: Path, record: Path, tmp_path: Path) -> None:
    """Ten seconds and the same ten seconds with ten more: the paper's way does not see the difference."""
    signal = wfdb.rdrecord(str(record.with_suffix(""))).p_signal
    rng = np.random.default_rng(2)
    longer = np.concatenate([signal, np.cumsum(rng.standard_normal((5000, 12)), axis=0) / 50 + signal[-1]])
    kinds = {"fmt": ["16"] * 12, "adc_gain": [1000] * 12, "baseline": [0] * 12, "write_dir": str(tmp_path)}
    wfdb.wrsamp("N2", 500, ["mV"] * 12, list(LEADS), longer, **kinds)
    predictor = predict.Predictor(run)
    assert "cropped" in predictor(predict.read_record(tmp_path / "N2"), 1).flags
    predictor.crop = 512
    prediction = predictor(predict.read_record(tmp_path / "N2"), 1)
    assert "cropped" not in prediction.flags
    x, _ = preprocess(longer.T, 500, replace(predictor.preprocess, length=2000))
    x = torch.from_numpy(x.astype(np.float16).astype(np.float32))[None]
    with torch.no_grad():
        logits = [predictor.model(x[:, :, start : start + 512]).logits for start in places(2000, 512)]
    expected = torch.stack(logits).mean(0).sigmoid()[0].tolist()
    assert list(prediction.probabilities.values()) == pytest.approx(expected, rel=1e-3)
