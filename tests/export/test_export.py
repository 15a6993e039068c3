"""An exported model gives the same answers: read back by `em.load`, and as an ONNX graph without this package's code."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import ecgmatch_dist as em
from ecgmatch_dist.data.preprocess import PRESETS, Preprocess, preprocess
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.export import command
from ecgmatch_dist.export.graph import Graph
from ecgmatch_dist.export.onnx_file import check_signals, run_onnx
from ecgmatch_dist.export.signal import Prepare
from tests.support.prediction import ecg, write_model


@pytest.mark.parametrize("rate", [100, 250, 500, 1000, 257.5])
@pytest.mark.parametrize("seconds", [4, 10, 13])
@pytest.mark.parametrize("settings", [PRESETS["cpu"], PRESETS["official_code"], Preprocess(sequence=("zscore", "pad"))])
def test_preprocessing_in_torch_is_preprocessing(rate: float, seconds: float, settings: Preprocess) -> None:
    signals = check_signals(round(rate * seconds), rate)
    found = Prepare(rate, settings)(torch.from_numpy(signals)).numpy()
    for own, signal in zip(found, signals, strict=True):
        expected, _ = preprocess(signal, rate, settings)
        assert np.abs(own - expected).max() < 5e-3  # half precision: 4e-3 at 8 standard deviations
        assert np.abs(own - expected).mean() < 3e-4


@pytest.mark.parametrize(("seconds", "crop"), [(10, 0), (30, 0), (20, 512)])
def test_the_graph_is_predict(tmp_path: Path, seconds: float, crop: int) -> None:
    """Also for long recordings: windows, and a network of crops."""
    model = em.load(write_model(tmp_path / "run", crop=crop), "cpu")
    signals = np.stack([ecg(seconds, seed=seed) for seed in range(3)]).astype(np.float32)
    with torch.no_grad():
        found = Graph(model, 500, signals.shape[2])(torch.from_numpy(signals))
    expected = list(model.predict_many(signals, rate=500))
    assert np.abs(found.probability.numpy() - [list(p.probabilities.values()) for p in expected]).max() < 1e-4
    assert np.abs(found.calibrated.numpy() - [list(p.calibrated.values()) for p in expected]).max() < 1e-4
    assert np.abs(found.features.numpy() - [p.features for p in expected]).max() < 1e-2
    for row, answer in zip(found.predicted.numpy(), expected, strict=True):
        assert tuple(name for name, hit in zip(model.classes, row, strict=True) if hit) == answer.predicted


def test_the_folder_is_read_back(tmp_path: Path) -> None:
    run = write_model(tmp_path / "run")
    command.main(run, to=tmp_path / "out", onnx=False)
    model, copy = em.load(run, "cpu"), em.load(tmp_path / "out", "cpu")
    one, other = (m.predict(ecg(), rate=500) for m in (model, copy))
    assert (one.probabilities, one.calibrated, one.predicted) == (
        other.probabilities,
        other.calibrated,
        other.predicted,
    )
    assert other.nearest == ()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["classes"] == model.classes
    assert config["names"]["CD"] == "Conduction Disturbance"
    assert "Not a medical device" in (tmp_path / "out" / "README.md").read_text()
    with pytest.raises(UserError, match="not empty"):
        command.main(run, to=tmp_path / "out", onnx=False)


def test_what_can_be_refused_at_once_is_refused_before_anything_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fetch(place: Path | None) -> None:
        raise AssertionError("onnxruntime-web was fetched")

    monkeypatch.setattr(command, "find_ort_web", fetch)
    monkeypatch.setattr(command, "need_onnx", lambda: None)
    run = write_model(tmp_path / "run")
    with pytest.raises(UserError, match="not empty"):
        command.main(run, to=run, onnx=False, html=True)
    with pytest.raises(UserError, match="at least 1 sample per second"):
        command.main(run, to=tmp_path / "out", onnx=False, html=True, rate=0)


def test_a_model_that_was_exported_before_keeps_its_card(tmp_path: Path) -> None:
    """Its sources and their licences go with the weights."""
    command.main(Path("chapman_ptbxl"), to=tmp_path / "one", onnx=False)
    command.main(tmp_path / "one", to=tmp_path / "two", onnx=False)
    card = (tmp_path / "one" / "README.md").read_text()
    assert "PTB-XL (Wagner et al. 2020) and Chapman-Shaoxing (Zheng et al. 2020), both CC BY 4.0" in card
    assert (card.count("\n## Use\n"), card.count("library_name"), card.count("| CD |")) == (1, 1, 1)
    assert (tmp_path / "two" / "README.md").read_text() == card


@pytest.mark.slow
def test_onnx(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`command.main` compares the graph with `predict`; here the answers for other signals, and another number of them."""
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    run = write_model(tmp_path / "run")
    command.main(run, to=tmp_path / "out", rate=250, seconds=10)
    assert "4 recordings, at most" in capsys.readouterr().out
    signal = ecg(10, 250, seed=4).astype(np.float32)
    found = run_onnx(tmp_path / "out" / "model.onnx", signal[None])
    expected = em.load(run, "cpu").predict(signal, rate=250)
    assert found.probability[0].tolist() == pytest.approx(list(expected.probabilities.values()), abs=1e-4)
