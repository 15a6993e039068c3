"""The examples run as they stand, in small: training, a method of one's own that is nothing but one file, prediction."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import ecgmatch_dist as em
from ecgmatch_dist.predict.result import Prediction
from ecgmatch_dist.record.predictions import predictions_file, read_predictions
from ecgmatch_dist.record.result import read_result
from ecgmatch_dist.report.build import build_report

EXAMPLES = Path(__file__).parents[1] / "examples"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What examples/train.py leaves."""
    folder = tmp_path_factory.mktemp("example")
    load("train").main(folder, recordings=150, steps=4)
    return folder


def test_train(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = load("train").main(folder, recordings=150, steps=4)  # the second time, everything is there
    assert "finished already" in capsys.readouterr().out
    assert read_result(run / "result.json").method == "fixmatch"


def test_a_method_of_ones_own_is_one_file(folder: Path, tmp_path: Path) -> None:
    """Training, result and report take it without any change elsewhere."""
    run = load("own_method").main(folder, steps=4)
    result = read_result(run / "result.json")
    assert (result.method, result.started_from) == ("mean_teacher", "within-chapman@0.1.s20.supervised")
    page = build_report(folder / "runs", tmp_path / "report", replicates=50).read_text()
    assert "Mean Teacher" in page


@pytest.mark.slow
def test_a_method_of_ones_own_on_two_ranks(folder: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run([*torchrun, EXAMPLES / "own_method.py", folder], capture_output=True, text=True, check=False)
    # The folder holds a run of other length: refused by name on all ranks, which shows that both ranks know the method.
    assert "optim.steps was 4, is 150" in done.stderr


def test_predict(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = sorted((folder / "raw").rglob("*.hea"))[:2]
    load("predict").main(folder / "runs" / "within-chapman@0.1.s20.fixmatch", *records)
    out = capsys.readouterr().out
    assert out.count("most like chapman/") == 2
    assert "Normal 0." in out


def test_new_files_get_the_numbers_of_the_evaluation(folder: Path) -> None:
    """From the original recordings, by `em.load`: what training has stored for its test part, read from shards."""
    run = folder / "runs" / "within-chapman@0.1.s20.fixmatch"
    stored = read_predictions(predictions_file(run, "test"))
    paths = {path.stem: path for path in (folder / "raw").rglob("*.hea")}
    names = [str(name).removeprefix("chapman/") for name in stored.ids[:8]]
    for row, answer in enumerate(em.load(run).predict_files([paths[name] for name in names])):
        assert isinstance(answer, Prediction)
        assert list(answer.probabilities.values()) == pytest.approx(stored.probabilities[row].tolist(), abs=1e-4)
        assert answer.features == pytest.approx(stored.features[row], abs=1e-3)
