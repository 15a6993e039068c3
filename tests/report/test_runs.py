"""Reading run folders: every folder is used or reported with a reason; nothing ends the report."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as trials
from hypothesis import strategies as some
from numpy.typing import NDArray

import tests.support.run_factory as factory
from ecgmatch_dist.config import from_json
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.report.arrange import find_studies
from ecgmatch_dist.report.assess import assess
from ecgmatch_dist.report.header import make_header
from ecgmatch_dist.report.run_files import count_recordings, curves, predictions, split_sizes
from ecgmatch_dist.report.runs import Problem, find_runs, is_run, result_settings
from ecgmatch_dist.report.sections import make_sections


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return factory.write_run(tmp_path_factory.mktemp("pristine"), sizes=300)


@pytest.fixture
def root(pristine: Path, tmp_path: Path) -> Path:
    """A folder with one good run."""
    shutil.copytree(pristine, tmp_path / "runs" / "good")
    return tmp_path / "runs"


def found(root: Path) -> tuple[list[str], dict[str, Problem]]:
    runs, problems = find_runs(root, root / "report")
    return [run.name for run in runs], {problem.folder.name: problem for problem in problems}


def edit(folder: Path, **changes: object) -> None:
    """Change result.json; None removes a key."""
    result = json.loads((folder / "result.json").read_text()) | changes
    kept = {key: value for key, value in result.items() if key not in changes or value is not None}
    (folder / "result.json").write_text(json.dumps(kept))


DAMAGE: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "cut": (lambda f: (f / "result.json").write_text('{"name": "wi'), "damaged", "result.json: not JSON"),
    "binary": (lambda f: (f / "result.json").write_bytes(b"\xff\xfe\x00"), "damaged", "result.json: not JSON"),
    "list": (lambda f: (f / "result.json").write_text("[1]"), "damaged", "result.json: a list instead of an object"),
    "deep": (lambda f: (f / "result.json").write_text("[" * 100_000), "damaged", "result.json: not JSON"),
    "keyless": (lambda f: edit(f, method=None), "damaged", "the key `method` is missing"),
    "wrong type": (lambda f: edit(f, seed="twenty"), "damaged", "seed = 'twenty': it takes a whole number"),
    "yes": (lambda f: edit(f, seed=True), "damaged", "seed = True: it takes a whole number"),
    "nan": (lambda f: edit(f, ratio=float("nan")), "damaged", "ratio is nan, not a finite number"),
    "no metrics": (lambda f: edit(f, test={"map": 0.5}), "damaged", "test: the key `ranking_loss` is missing"),
    "thresholds": (lambda f: edit(f, thresholds=[0.5]), "damaged", "1 thresholds for 5 classes"),
    "configless": (lambda f: (f / "config.json").unlink(), "damaged", "config.json: not found"),
    "running": (lambda f: (f / "result.json").unlink(), "unfinished", "step 200"),
    "result folder": (
        lambda f: (f / "result.json").rename(f / "was").with_name("result.json").mkdir(),
        "damaged",
        "cannot be read",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_run_is_named_with_the_reason(name: str, root: Path, pristine: Path) -> None:
    damage, kind, reason = DAMAGE[name]
    folder = root / "bad"
    shutil.copytree(pristine, folder)
    damage(folder)
    names, problems = found(root)
    assert names == ["good"]
    assert problems["bad"].kind == kind
    assert reason in problems["bad"].reason


def test_foreign_folders_are_named_and_hidden_ones_and_the_report_are_not(root: Path) -> None:
    for name in ("logs/deep/inside", ".cache", "report/tables"):
        (root / name).mkdir(parents=True)
    names, problems = found(root)
    assert names == ["good"]
    assert {name: problem.kind for name, problem in problems.items()} == {"logs": "foreign"}


def test_runs_of_a_sweep_in_its_own_folder_are_found(root: Path, pristine: Path) -> None:
    shutil.copytree(pristine, root / "sweep" / "inner")
    edit(root / "sweep" / "inner", fingerprint="other")
    (root / "sweep" / "notes").mkdir()
    names, problems = found(root)
    assert names == ["good", "inner"]
    assert list(problems) == ["notes"]


def test_one_run_folder_is_a_folder_of_runs(pristine: Path) -> None:
    assert found(pristine)[0] == [pristine.name]


def test_a_copy_of_a_run_does_not_count_twice(root: Path, pristine: Path) -> None:
    shutil.copytree(pristine, root / "good (copy)")
    names, problems = found(root)
    assert names == ["good"]
    assert problems["good (copy)"].kind == "duplicate"


def test_runs_of_other_measurements_are_not_averaged_with_todays(tmp_path: Path) -> None:
    """Their settings are the same, but the trees have read other numbers: the fingerprint tells."""
    for seed in (19, 20, 21):
        folder = factory.write_run(tmp_path, seed=seed, sizes=300, change={"method.measurements": True})
        config = json.loads((folder / "config.json").read_text())
        settings = {key: value for key, value in config.items() if key not in ("format", "fingerprint")}
        config["fingerprint"] = from_json(settings).fingerprint() if seed > 19 else "of another version"
        (folder / "config.json").write_text(json.dumps(config))
    runs, _ = find_runs(tmp_path, tmp_path / "report")
    assert [run.settings.get("method.measurements of") for run in runs] == ["another version", None, None]
    kinds = {study.kind: [row.label for row in study.rows] for study in find_studies(runs)}
    assert kinds["main"] == ["ECGMatch"]
    assert kinds["other"] == ["ECGMatch", "ECGMatch (measurements of = another version)"]


def test_a_run_without_predictions_keeps_its_metrics(root: Path) -> None:
    (root / "good" / "predictions" / "test.npz").unlink()
    names, problems = found(root)
    assert names == ["good"]
    assert (problems["good"].kind, "no predictions/test.npz" in problems["good"].reason) == ("incomplete", True)


def test_a_result_that_its_predictions_contradict_is_left_out(root: Path) -> None:
    runs, _ = find_runs(root, root / "report")
    assert assess(runs, 10)[str(runs[0].folder)].contradiction == ""
    result = json.loads((root / "good" / "result.json").read_text())
    result["test"]["map"] += 0.05
    (root / "good" / "result.json").write_text(json.dumps(result))
    runs, _ = find_runs(root, root / "report")
    assert "result.json says map" in assess(runs, 10)[str(runs[0].folder)].contradiction


@pytest.mark.parametrize(
    "arrays",
    [
        {"labels": np.zeros((4, 5), np.uint8)},
        {"labels": np.zeros((4, 5), np.uint8), "probabilities": np.zeros((3, 5), np.float32)},
        {"labels": np.zeros((4, 2), np.uint8), "probabilities": np.zeros((4, 2), np.float32)},
        {"labels": np.zeros((0, 5), np.uint8), "probabilities": np.zeros((0, 5), np.float32)},
        {"labels": np.full((4, 5), 7, np.uint8), "probabilities": np.zeros((4, 5), np.float32)},
        {"labels": np.zeros((4, 5), np.uint8), "probabilities": np.full((4, 5), np.nan, np.float32)},
        {"labels": np.zeros((4, 5), np.uint8), "probabilities": np.array([[{}] * 5] * 4, object)},
    ],
    ids=["missing", "lengths", "classes", "empty", "labels", "nan", "pickle"],
)
def test_bad_predictions_are_refused(arrays: dict[str, NDArray[Any]], root: Path) -> None:
    np.savez(root / "good" / "predictions" / "test.npz", allow_pickle=True, **arrays)
    (run,), _ = find_runs(root, root / "report")
    with pytest.raises(UserError, match=r"test\.npz"):
        predictions(run)


def test_curves_survive_half_a_line_and_a_repeated_step(root: Path) -> None:
    lines = ['{"step": 1, "kind": "train", "loss": 3.0}', '{"step": 2, "kind": "train", "loss": 2.0}', "[]", "null"]
    lines += ['{"step": 2, "kind": "train", "loss": 1.0, "note": "text", "bad": NaN}', '{"step": 3, "kind": "tra']
    (root / "good" / "metrics.jsonl").write_text("\n".join(lines))
    (run,), _ = find_runs(root, root / "report")
    assert list(curves(run)) == ["train:loss"]
    steps, values = curves(run)["train:loss"]
    assert (steps.tolist(), values.tolist()) == ([1, 2], [3.0, 1.0])


def test_recordings_are_counted_by_database_and_part(root: Path) -> None:
    (run,), _ = find_runs(root, root / "report")
    assert count_recordings(run) == {"chapman": {"labelled": 12, "unlabelled": 228, "validation": 30, "test": 30}}


def test_settings_leave_out_what_does_not_change_a_result(root: Path) -> None:
    config = json.loads((root / "good" / "config.json").read_text())
    flat = result_settings(config)
    assert flat["method.lambda_u"] == 0.8
    places = ("split", "shards", "runs", "seed", "tag", "bank.backend", "data.cache", "runtime.threads")
    assert not [key for key in flat if key.startswith(places)]
    assert {"runtime.precision", "runtime.batchnorm", "data.window"} <= flat.keys()  # these do change it


JSON = some.recursive(
    some.none() | some.booleans() | some.floats() | some.text(),
    lambda x: some.lists(x) | some.dictionaries(some.text(), x),
)


@trials(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])  # of a busy machine
@given(
    some.dictionaries(
        some.sampled_from(["test", "seed", "classes", "ratio", "thresholds", "databases", "method", "x"]), JSON
    )
)
def test_no_change_to_a_result_ends_the_report(pristine: Path, changes: dict[str, object]) -> None:
    before = (pristine / "result.json").read_text()
    try:
        (pristine / "result.json").write_text(json.dumps(json.loads(before) | changes))
        runs, problems = find_runs(pristine, pristine / "report")
        assert len(runs) + len(problems) >= 1
    finally:
        (pristine / "result.json").write_text(before)


@trials(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])  # of a busy machine
@given(some.sampled_from(["config.json", "environment.json", "split.json"]), JSON, some.data())
def test_no_change_to_another_file_ends_it_either(
    pristine: Path, file: str, value: object, data: some.DataObject
) -> None:
    before = (pristine / file).read_text()
    keys = some.sampled_from([*json.loads(before), "x"])
    try:
        (pristine / file).write_text(json.dumps(json.loads(before) | {data.draw(keys): value}))
        runs, problems = find_runs(pristine, pristine / "report")
        sizes, studies = split_sizes(runs, problems), find_studies(runs)
        sections = make_sections(studies, sizes, {}, 100, {})
        assert not runs or (make_header(runs, studies, sizes, {}).run_summary and sections)
    finally:
        (pristine / file).write_text(before)


def test_names_from_a_result_never_leave_the_reports_folder(root: Path) -> None:
    edit(root / "good", protocol="../../up", databases=["/etc", "..", "a b"], scheme="x/" + "y" * 300)
    runs, _ = find_runs(root, root / "report")
    studies = find_studies(runs)
    parts = [part for section in make_sections(studies, split_sizes(runs, []), {}, 100, {}) for part in section.parts]
    keys = [table.key for part in parts for table in part.tables] + [
        task.key for part in parts for task in part.figures
    ]
    assert keys
    assert all(re.fullmatch(r"\w[\w.+=-]{0,120}", key) for key in keys)
    assert len(keys) == len(set(keys))


def test_an_empty_folder_is_no_run(tmp_path: Path) -> None:
    assert not is_run(tmp_path)
