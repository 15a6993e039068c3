"""`opinion/`: what a run's network and its trees answer together is what `predict --trees` answers afterwards."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import ecgmatch_dist as em
from ecgmatch_dist.config import Optim
from ecgmatch_dist.data.index import file_sha256
from ecgmatch_dist.data.split_file import Split
from ecgmatch_dist.data.store import ShardStore
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.export import command as export
from ecgmatch_dist.measurements import trees_file
from ecgmatch_dist.measurements.measure import measure_all
from ecgmatch_dist.measurements.opinion import mixture
from ecgmatch_dist.measurements.trees import MeasurementTrees, PublicTrees, descend, grow, with_answers
from ecgmatch_dist.measurements.trees_file import load_trees, rounded_down
from ecgmatch_dist.methods.ecgmatch import ECGMatchSettings
from ecgmatch_dist.metrics import compute_metrics
from ecgmatch_dist.predict import command as predict
from ecgmatch_dist.predict.model import Predictor
from ecgmatch_dist.predict.prepare import Prepared
from ecgmatch_dist.predict.result import Prediction
from ecgmatch_dist.record.calibration import fit_calibration
from ecgmatch_dist.record.predictions import predictions_file, read_predictions
from ecgmatch_dist.record.second_opinion import (
    Together,
    folder_of,
    load_opinion,
    read_together,
    save_opinion,
)
from ecgmatch_dist.run import with_trees
from tests.support.measured import recordings
from tests.support.prediction import ecg, write_model, write_record
from tests.support.training import run, tiny

OPTIM = Optim(steps=2, labelled_batch=8, unlabelled_batch=16)
METHOD = ECGMatchSettings(neighbours=3, measurements=True, memory=1.0)


@pytest.fixture(scope="module")
def finished(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has asked trees."""
    return run(tiny(data, tmp_path_factory.mktemp("runs"), METHOD, optim=OPTIM, pretrain=OPTIM))


def answers(folder: Path, data: Path, part: str, trees: bool) -> list[Prediction]:
    """Those of the loaded model for the recordings of a part."""
    split, store = Split.load(data / "split.json"), ShardStore(data / "shards", ["chapman"])
    x = store.read(split.rows(store)[part]).astype(np.float16)
    prepared = [Prepared(f"r{i}", f"r{i}", each[None], ()) for i, each in enumerate(x)]
    return [each for each in em.load(folder, "cpu", trees=trees).answers(prepared) if isinstance(each, Prediction)]


def numbers(found: list[Prediction]) -> NDArray[np.float64]:
    return np.array([list(each.probabilities.values()) for each in found])


@pytest.mark.parametrize("part", ["validation", "test"])
def test_a_loaded_model_answers_as_the_run_did(finished: Path, data: Path, part: str) -> None:
    saved = read_predictions(predictions_file(folder_of(finished), part))
    both, alone = (answers(finished, data, part, trees) for trees in (True, False))
    np.testing.assert_allclose(numbers(both), saved.probabilities, atol=3e-6)
    marks = list(both[0].thresholds.values())
    decides = np.abs(saved.probabilities - marks) > 1e-6  # a threshold is one of these numbers, and digits may differ
    assert ((numbers(both) >= marks) == (saved.probabilities >= marks))[decides].all()
    assert (~decides).sum() <= 2 * len(marks)
    np.testing.assert_allclose(
        numbers(alone), read_predictions(predictions_file(finished, part)).probabilities, atol=3e-6
    )
    together = read_together(finished)
    assert together
    assert tuple(both[0].thresholds.values()) == together.thresholds
    calibrated = np.array([list(each.calibrated.values()) for each in both])
    assert np.abs(calibrated - numbers(alone)).max() > 0.01


def test_share_and_thresholds_come_from_validation(finished: Path) -> None:
    """The log says the best validation MAP of the shares that were tried. Thresholds are values of the validation part."""
    together = read_together(finished)
    assert together
    found = read_predictions(predictions_file(folder_of(finished), "validation"))
    log = (finished / "log.txt").read_text()
    scores = [float(line.rpartition(" ")[2]) for line in log.splitlines() if "second opinion" in line]
    assert together.validation.map == pytest.approx(scores[-1], abs=1e-4)
    for c, threshold in enumerate(together.thresholds):
        assert threshold in found.probabilities[:, c].astype(float)


def test_a_run_of_an_older_version_gets_it_by_the_same_command(finished: Path, data: Path, tmp_path: Path) -> None:
    """Without result.json a run is measured again, and not trained."""
    shutil.copytree(finished.parent, tmp_path / "runs")
    again = tmp_path / "runs" / finished.name
    shutil.rmtree(folder_of(again))
    before = {path.name: path.read_bytes() for path in folder_of(finished).iterdir() if path.is_file()}
    with pytest.raises(UserError, match=r"^--trees: .* has no trees to ask .*rename result.json"):
        em.load(again, "cpu", trees=True)
    (again / "result.json").unlink()
    run(tiny(data, tmp_path / "runs", METHOD, optim=OPTIM, pretrain=OPTIM))
    assert {path.name: path.read_bytes() for path in folder_of(again).iterdir() if path.is_file()} == before


def test_an_export_with_trees_answers_alike_and_one_without_says_why_not(
    finished: Path, data: Path, tmp_path: Path
) -> None:
    export.main(finished, to=tmp_path / "with", onnx=False, trees=True)
    export.main(finished, to=tmp_path / "without", onnx=False)
    export.main(tmp_path / "with", to=tmp_path / "copy", onnx=False)
    expected = numbers(answers(finished, data, "test", trees=True))
    for name in ("with", "copy"):
        assert (numbers(answers(tmp_path / name, data, "test", trees=True)) == expected).all()
        assert not (folder_of(tmp_path / name) / "predictions").exists()
    with pytest.raises(UserError, match="has no trees to ask"):
        em.load(tmp_path / "without", "cpu", trees=True)


def fake(p: NDArray[np.float64], y: NDArray[np.uint8]) -> Together:
    measured = compute_metrics(y, p, np.full(p.shape[1], 0.5), ["A", "B"])
    return Together(share=0.5, thresholds=(0.5, 0.5), validation=measured, test=measured)


@pytest.fixture
def opinion(tmp_path: Path) -> tuple[Path, MeasurementTrees, NDArray[np.float32]]:
    """Trees that read the answers of public ones, in a folder; and new recordings."""
    (x, y), (other, theirs), (new, _) = recordings(60, 0), recordings(60, 1), recordings(30, 2)
    public = grow(measure_all(other, 100), theirs, 1)
    rows = measure_all(x, 100)
    own = grow(with_answers(rows, descend(public, rows)), y, 0)
    trees = MeasurementTrees(own, 100, PublicTrees(public, same_classes=True))
    p = trees.predict(x)
    folder_of(tmp_path).mkdir()
    save_opinion(tmp_path, trees, ("A", "B"), fake(p, y), lambda path, write: write(path))
    (folder_of(tmp_path) / "calibration.json").write_text(json.dumps(vars(fit_calibration(y, p))))
    return tmp_path, trees, new


def test_public_trees_are_asked_too(opinion: tuple[Path, MeasurementTrees, NDArray[np.float32]]) -> None:
    folder, trees, new = opinion
    loaded = load_opinion(folder, ("A", "B"), 100, None)
    assert loaded.trees.public
    assert loaded.trees.public.same_classes
    np.testing.assert_allclose(loaded.trees.predict(new), trees.predict(new), atol=1e-6)
    with pytest.raises(UserError, match="read the answers of other trees, which are not beside them"):
        load_trees(folder_of(folder) / "trees.safetensors")


def test_the_windows_of_a_recording_count_as_one(opinion: tuple[Path, MeasurementTrees, NDArray[np.float32]]) -> None:
    folder, trees, new = opinion
    loaded = load_opinion(folder, ("A", "B"), 100, normal=1)
    p = np.array([[0.2, 0.9], [0.6, 0.1]])
    found = loaded.beside(p, [new[:3], new[3:4]])
    asked = trees.predict(new[:4])
    mean = torch.from_numpy(np.stack([asked[:3].mean(0), asked[3]]))
    np.testing.assert_allclose(found, mixture(torch.from_numpy(p), mean, 0.5, 1).numpy(), atol=1e-6)


NOT_THESE = "these are not the trees that opinion.json was measured with"


def changed(**values: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "opinion.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (changed(share=1.5), "share is 1.5: between 0 and 1"),
        (changed(thresholds=[0.5, float("nan")]), "a threshold is nan"),
        (changed(thresholds=[0.5]), "1 thresholds for 2 classes"),
        (changed(format=99), "format 99"),
        (changed(more=1), "more"),
        (lambda folder: (folder / "opinion.json").write_text("[]"), "instead of an object"),
        (lambda folder: (folder / "trees.safetensors").write_bytes(b"cut"), NOT_THESE),
        (lambda folder: (folder / "trees.safetensors").unlink(), NOT_THESE),
        (lambda folder: (folder / "public.safetensors").unlink(), NOT_THESE),
        (lambda folder: shutil.copy(folder / "public.safetensors", folder / "trees.safetensors"), NOT_THESE),
    ],
)
def test_a_damaged_folder_is_a_sentence(
    opinion: tuple[Path, MeasurementTrees, NDArray[np.float32]], damage: Callable[[Path], None], told: str
) -> None:
    folder = opinion[0]
    damage(folder_of(folder))
    with pytest.raises(UserError, match=told):
        load_opinion(folder, ("A", "B"), 100, None)


def accepted(folder: Path) -> None:
    """opinion.json names the trees that are there."""
    present = (path for path in (folder / "trees.safetensors", folder / "public.safetensors") if path.is_file())
    changed(trees=[file_sha256(path) for path in present])(folder)


def as_of_another_version(folder: Path) -> None:
    arrays = load_file(folder / "trees.safetensors")
    with safe_open(folder / "trees.safetensors", "np") as file:
        notes = json.loads(file.metadata()["notes"])
    save_file(arrays, folder / "trees.safetensors", {"notes": json.dumps(notes | {"version": 0})})


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda folder: (folder / "trees.safetensors").write_bytes(b"cut"), "not the trees of a model"),
        (lambda folder: (folder / "public.safetensors").unlink(), "read the answers of other trees"),
        (as_of_another_version, "measures ECGs otherwise than this version: train it anew"),
    ],
)
def test_trees_that_were_measured_are_read_with_care(
    opinion: tuple[Path, MeasurementTrees, NDArray[np.float32]], damage: Callable[[Path], None], told: str
) -> None:
    folder = opinion[0]
    damage(folder_of(folder))
    accepted(folder_of(folder))
    with pytest.raises(UserError, match=told):
        load_opinion(folder, ("A", "B"), 100, None)


def test_an_export_may_have_its_trees_beside_the_weights(
    opinion: tuple[Path, MeasurementTrees, NDArray[np.float32]],
) -> None:
    folder, trees, new = opinion
    (folder_of(folder) / "trees.safetensors").rename(folder / "trees.safetensors")
    loaded = load_opinion(folder, ("A", "B"), 100, None)
    np.testing.assert_allclose(loaded.trees.predict(new), trees.predict(new), atol=1e-6)
    changed(trees=[])(folder_of(folder))
    with pytest.raises(UserError, match="an older version has not noted which trees"):
        load_opinion(folder, ("A", "B"), 100, None)


def test_trees_of_other_classes_are_refused(opinion: tuple[Path, MeasurementTrees, NDArray[np.float32]]) -> None:
    with pytest.raises(UserError, match="trees of the classes A, B, not of the model's"):
        load_opinion(opinion[0], ("A", "C"), 100, None)


def test_no_measurement_changes_its_side() -> None:
    """A threshold between two float32 numbers goes down to the lower one: what was right of it stays there."""
    rng = np.random.default_rng(0)
    values = rng.standard_normal(1000).astype(np.float32)
    thresholds = (values[:-1].astype(np.float64) + np.nextafter(values[:-1], np.float32(np.inf))) / 2
    down = rounded_down(thresholds)
    for row in (values[:-1], np.nextafter(values[:-1], np.float32(np.inf))):
        assert ((row <= thresholds) == (row <= down)).all()


def test_the_command_answers_with_trees(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    record = write_record(tmp_path / "new", "ecg", ecg())
    predict.main(finished, (str(record),), trees=True, pages=tmp_path / "pages", out=tmp_path / "both.csv")
    predict.main(finished, (str(record),), out=tmp_path / "alone.csv")
    assert (tmp_path / "both.csv").read_text() != (tmp_path / "alone.csv").read_text()
    page = (tmp_path / "pages" / "ecg.html").read_text()
    together = read_together(finished)
    assert together
    assert f"The trees count {100 * together.share:.0f} %" in page
    assert "output of both" in page
    predict.main(finished, (str(record),), trees=True)
    assert "output of both" in " ".join(capsys.readouterr().out.split())


def test_a_table_is_not_continued_with_another_opinion(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = shutil.copytree(finished.parent, tmp_path / "runs") / finished.name
    record = write_record(tmp_path / "new", "ecg", ecg())
    with monkeypatch.context() as interrupted:
        interrupted.setattr(Predictor, "answers", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            predict.main(model, (str(record),), trees=True, out=tmp_path / "both.csv")
    before = (folder_of(model) / "opinion.json").read_text()
    changed(share=1.0)(folder_of(model))
    with pytest.raises(UserError, match="begun with another model or other settings"):
        predict.main(model, (str(record),), trees=True, out=tmp_path / "both.csv")
    (folder_of(model) / "opinion.json").write_text(before)
    predict.main(model, (str(record),), trees=True, out=tmp_path / "both.csv")
    assert len((tmp_path / "both.csv").read_text().splitlines()) == 2


def test_while_it_is_measured_anew_nothing_answers(
    finished: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill between the first file and the last one must not leave a mixture that answers."""
    again = shutil.copytree(finished.parent, tmp_path / "runs") / finished.name
    (again / "result.json").unlink()
    monkeypatch.setattr(with_trees, "save_opinion", lambda *_: (_ for _ in ()).throw(RuntimeError("killed")))
    with pytest.raises(RuntimeError, match="killed"):
        run(tiny(data, tmp_path / "runs", METHOD, optim=OPTIM, pretrain=OPTIM))
    with pytest.raises(UserError, match="has no trees to ask"):
        load_opinion(again, ("A", "B"), 100, None)


def test_trees_that_have_no_file_do_not_end_a_finished_training(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trees_file, "DEEPEST", 1)
    folder = run(tiny(data, tmp_path, METHOD, optim=OPTIM, pretrain=OPTIM))
    assert (folder / "result.json").is_file()
    assert "the trees have no file (a tree is deeper than 1 nodes)" in (folder / "log.txt").read_text()
    with pytest.raises(UserError, match=r"has no trees to ask .*this one's log says why not"):
        em.load(folder, "cpu", trees=True)


def test_a_run_that_measures_otherwise_is_not_to_be_measured_again(finished: Path, tmp_path: Path) -> None:
    """Its command would refuse the folder."""
    model = shutil.copytree(finished.parent, tmp_path / "runs") / finished.name
    shutil.rmtree(folder_of(model))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"fingerprint": "0" * 16}))
    with pytest.raises(UserError, match=r"measures ECGs otherwise than this version: train it anew, with a --tag"):
        em.load(model, "cpu", trees=True)


def test_a_model_that_has_asked_no_trees_says_so(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no trees to ask .*few_labels"):
        em.load(write_model(tmp_path / "run"), "cpu", trees=True)


def test_the_included_model_has_trees_that_answer() -> None:
    """Its trees are those that go with the weights; share and thresholds lie beside them."""
    both, alone = (em.load("chapman_ptbxl", "cpu", trees=trees) for trees in (True, False))
    assert both.opinion
    assert both.opinion.together.test.map > 0.85
    assert both.tested == both.opinion.together.test
    assert alone.tested is None
    found, network = (numbers([model.predict(ecg(), rate=500)])[0] for model in (both, alone))
    assert np.abs(found - network).max() > 1e-3
