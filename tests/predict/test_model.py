"""`em.load`: the numbers of `evaluate`, whatever the order of leads, the unit, the batch and the length."""

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save
from scipy.special import expit, logit

import ecgmatch_dist as em
from ecgmatch_dist.data.preprocess import LEADS, preprocess
from ecgmatch_dist.data.stream import FiniteBatch
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.evaluate import predict_share
from ecgmatch_dist.predict.model import Predictor
from ecgmatch_dist.predict.result import Prediction
from ecgmatch_dist.record.weights import load_weights
from tests.support.prediction import ecg, write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Predictor:
    return em.load(str(write_model(tmp_path_factory.mktemp("model") / "run")))


def numbers(prediction: Prediction) -> list[float]:
    return list(prediction.probabilities.values())


def test_the_numbers_of_evaluate(model: Predictor) -> None:
    """The same preprocessing, half precision and network as for the shards of a run."""
    signals = [ecg(seed=seed) for seed in range(3)]
    x = np.stack([preprocess(s.astype(np.float32), 500, model.notes.preprocess)[0] for s in signals])
    batch = FiniteBatch(np.arange(3), x.astype(np.float16), np.ones(3, bool))
    _, rows = predict_share(model.network, [batch], torch.device("cpu"), torch.float32)
    found = list(model.predict_many(np.stack(signals), rate=500))
    assert np.allclose([numbers(p) for p in found], rows[:, :5].numpy(), atol=1e-6)
    assert np.allclose([p.features for p in found], rows[:, 5:].numpy(), atol=1e-5)
    assert [p.record for p in found] == ["array 0", "array 1", "array 2"]
    assert np.allclose(model.embed(signals[1], rate=500), rows[1, 5:].numpy(), atol=1e-5)


def test_order_of_leads_unit_and_axis_do_not_matter(model: Predictor) -> None:
    expected = numbers(model.predict(ecg(), rate=500))
    order = np.random.default_rng(3).permutation(12)
    names = [LEADS[v].lower() for v in order]
    other = model.predict(1000 * ecg()[order].T, rate=500, leads=names, unit="uV")
    assert numbers(other) == pytest.approx(expected, abs=2e-3)  # 32-bit rounding of other units, then 16 bits


def test_eight_leads_are_twelve(model: Predictor) -> None:
    there = [v for v in range(12) if v not in (2, 3, 4, 5)]
    eight = model.predict(ecg()[there], rate=500, leads=[LEADS[v] for v in there])
    assert {"derived:III", "derived:aVR", "derived:aVL", "derived:aVF"} <= set(eight.flags)
    assert numbers(eight) == pytest.approx(numbers(model.predict(ecg(), rate=500)), abs=2e-3)
    two = model.predict(ecg()[:2], rate=500, leads=["I", "II"])
    assert "missing:V3" in two.flags


def test_batches_do_not_matter(model: Predictor, tmp_path: Path) -> None:
    small = Predictor(model.folder, "cpu", batch=2)
    signals = [ecg(seconds, seed=seed) for seed, seconds in enumerate((10, 40, 8, 25, 10))]
    for one, other in zip(small.predict_many(signals, rate=500), model.predict_many(signals, rate=500), strict=True):
        assert numbers(one) == pytest.approx(numbers(other), abs=1e-6)
        assert [case.id for case in one.nearest] == [case.id for case in other.nearest]


def test_all_of_a_long_recording_counts(model: Predictor) -> None:
    """59 s, of which only the last ten differ."""
    signal = ecg(59)
    other = signal.copy()
    other[:, -5000:] = ecg(seed=9) + other[:, [-5001]]
    long = model.predict(signal, rate=500)
    assert [flag for flag in long.flags if flag.startswith("windows:")]
    assert "cropped" not in long.flags
    assert numbers(long) != pytest.approx(numbers(model.predict(other, rate=500)), abs=1e-6)
    assert "cropped" in model.predict(ecg(10.5), rate=500).flags  # hardly longer than 10.24 s: as in the shards


def test_normal_gives_way_to_other_classes(model: Predictor) -> None:
    """The thresholds of both are 0, so both are always reached."""
    assert "Normal" not in model.predict(ecg(), rate=500).predicted
    each = Predictor(model.folder, "cpu", only=False).predict(ecg(), rate=500)
    assert {"CD", "Normal"} <= set(each.predicted)
    assert "Rhythm" not in each.predicted  # its threshold is 1


@pytest.mark.parametrize(
    ("signal", "settings", "reason"),
    [
        (np.zeros((12, 5000)), {"rate": 500}, "no signal"),
        (ecg()[:1], {"rate": 500, "leads": ["I"]}, "leads"),
        (ecg(), {"rate": 500, "unit": "mmHg"}, "unit"),
        (ecg(), {"rate": 0}, "rate"),
        (ecg(), {"rate": 500, "leads": LEADS[:11]}, "11"),
    ],
)
def test_what_is_no_ecg_is_one_line(model: Predictor, signal: object, settings: dict[str, object], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        model.predict(signal, **settings)  # type: ignore[arg-type]


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    """The sentence says what it is instead, and what to name."""

    def told(name: str) -> str:
        with pytest.raises(UserError) as caught:
            em.load(tmp_path / name)
        return str(caught.value).removeprefix(f"{tmp_path / name}: ").removeprefix(f"{tmp_path}: ")

    assert told("").startswith(
        "holds no weights; name the folder of a finished run or of `ecgmatch export`, or a model"
    )
    run = write_model(tmp_path / "runs" / "within-ward@1.s20.ecgmatch")
    assert told("runs") == f"holds no weights; name a folder in it, such as {run}"
    assert told("runs/within-wrad@1.s20.ecgmatch") == f"no such folder; did you mean {run}?"
    assert told("runs/else").startswith("no such folder; name the folder of a finished run")
    (run / "best.safetensors").rename(run / "elsewhere")
    assert told(f"runs/{run.name}/elsewhere").startswith("a file, and no folder; name the folder")
    (run / "split.json").touch()
    assert told(f"runs/{run.name}").startswith("not finished: no best.safetensors yet; give the command again")


def test_a_network_of_crops_sees_a_long_recording_in_the_same_windows(tmp_path: Path) -> None:
    """As the graph and the page do: each prepared like a recording of the shards, and cropped like one."""
    model, signal = Predictor(write_model(tmp_path / "run", crop=512), "cpu"), ecg(20)
    prediction = model.predict(signal, rate=500)
    windows = [model.predict(signal[:, start : start + 5120], rate=500) for start in (0, 2440, 4880)]
    assert "windows:3" in prediction.flags
    mean = np.mean([logit(numbers(window)) for window in windows], 0)
    assert numbers(prediction) == pytest.approx(expit(mean).tolist(), abs=1e-5)


def test_weights_of_other_shapes_are_one_line(tmp_path: Path) -> None:
    file = write_model(tmp_path / "run") / "best.safetensors"
    tensors, notes = load_weights(file)
    name = next(iter(tensors))
    for changed in (tensors | {name: torch.ones(3)}, {k: t for k, t in tensors.items() if k != name}):
        file.write_bytes(save(changed, {key: json.dumps(value) for key, value in asdict(notes).items()}))
        with pytest.raises(UserError, match=f"the weights do not fit its settings .*{name}"):
            Predictor(tmp_path / "run", "cpu")
