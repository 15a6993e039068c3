"""The files of a run folder: each is read as it was written, as the first release wrote it, or refused with the remedy."""

import io
import json
import math
import re
import zipfile
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from ecgmatch_dist.config import Config, Model
from ecgmatch_dist.data.preprocess import Preprocess
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.files.atomic import write_json
from ecgmatch_dist.record import config_file, environment, result, weights
from ecgmatch_dist.record.config_file import read_config, to_file
from ecgmatch_dist.record.environment import describe_environment, read_environment
from ecgmatch_dist.record.predictions import predictions_file, read_arrays, read_predictions, write_arrays
from ecgmatch_dist.record.result import read_result
from ecgmatch_dist.record.weights import ModelNotes, load_weights, read_notes, save_weights
from tests.support.run_factory import CLASSES, example_result

CONFIG = Config(split=Path("split.json"), tag="a", seed=3)
NOTES = ModelNotes(
    classes=CLASSES,
    scheme="ecgmatch5",
    thresholds=(0.1, 0.2, 0.3, 0.4, 0.5),
    preprocess=Preprocess(rate=100, length=1024),
    model=Model(width=16, heads=2),
    step=40,
)


def refusal(read: Callable[[Path], object], path: Path) -> str:
    with pytest.raises(UserError) as caught:
        read(path)
    return str(caught.value)


def without(value: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: entry for name, entry in value.items() if name not in names}


# config.json


def test_config(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    write_json(path, to_file(CONFIG))
    assert json.loads(path.read_text())["format"] == config_file.FORMAT
    saved = read_config(path)
    assert saved.fingerprint == CONFIG.fingerprint()
    assert saved.settings == CONFIG.to_json()
    saved.check(CONFIG, tmp_path)


def test_config_of_the_first_release(tmp_path: Path) -> None:
    """It had no `format` and called the fingerprint `meaning`. This one is what it computed for these settings."""
    path = tmp_path / "config.json"
    write_json(path, {**CONFIG.to_json(), "meaning": "127ffa0315396fb7"})
    saved = read_config(path)
    assert saved == config_file.SavedConfig(CONFIG.to_json(), CONFIG.fingerprint())
    saved.check(CONFIG, tmp_path)


def test_config_of_a_run_with_other_settings(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    write_json(path, to_file(CONFIG))
    other = replace(CONFIG, optim=replace(CONFIG.optim, steps=7))
    expected = f"{tmp_path} holds a run with another configuration (optim.steps was {CONFIG.optim.steps}, is 7): "
    message = refusal(lambda path: read_config(path).check(other, tmp_path), path)
    assert message == expected + "give this one a --tag of its own, or remove the folder"
    write_json(path, to_file(CONFIG) | {"fingerprint": "another hash of the same settings"})
    message = refusal(lambda path: read_config(path).check(CONFIG, tmp_path), path)
    assert "another configuration (settings of another version)" in message


def test_config_of_another_version_or_without_fingerprint(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    write_json(path, to_file(CONFIG) | {"format": 3})
    expected = f"{path}: format 3, but this version of ecgmatch_dist reads 2; {config_file.REMEDY}"
    assert refusal(read_config, path) == expected
    for value in (CONFIG.to_json(), without(to_file(CONFIG), "fingerprint")):
        write_json(path, value)
        assert refusal(read_config, path) == f"{path}: the key `fingerprint` is missing; {config_file.REMEDY}"
    path.unlink()
    assert refusal(read_config, path) == f"{path}: not found; {config_file.REMEDY}"


# result.json


def test_result(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    write_json(path, example_result(map=0.75) | {"precision": "bf16", "committee": ["b", "c"]})
    read = read_result(path)
    assert (read.format, read.precision, read.committee) == (result.FORMAT, "bf16", ("b", "c"))
    assert read.test.map == read.validation.map == 0.75
    assert read.classes == CLASSES
    write_json(tmp_path / "again.json", asdict(read))
    assert asdict(read_result(tmp_path / "again.json")) == asdict(read)


def test_result_of_the_first_release(tmp_path: Path) -> None:
    """It had no `format` and no `precision`, and called the fingerprint `config_meaning`."""
    path = tmp_path / "result.json"
    now = example_result()
    write_json(path, without(now, "format", "precision", "fingerprint") | {"config_meaning": "f"})
    read = read_result(path)
    assert (read.format, read.precision, read.fingerprint) == (result.FORMAT, "", "f")
    write_json(path, without(now, "precision"))
    assert asdict(read_result(path)) == asdict(read)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"format": 3}, f"{{}}: format 3, but this version of ecgmatch_dist reads 2; {result.REMEDY}"),
        ({"seed": "twenty"}, "{}: seed = 'twenty': it takes a whole number"),
        ({"sed": 20}, "{}: unknown key `sed`; known are name, split, "),
        ({"config_meaning": "f"}, "{}: unknown key `config_meaning`; known are name, split, "),
        ({"ratio": math.nan}, f"{{}}: ratio is nan, not a finite number; {result.REMEDY}"),
        ({"seconds": math.inf}, f"{{}}: seconds is inf, not a finite number; {result.REMEDY}"),
        ({"thresholds": [0.5]}, f"{{}}: 1 thresholds for 5 classes; {result.REMEDY}"),
        ({"classes": [], "thresholds": []}, f"{{}}: 0 thresholds for 0 classes; {result.REMEDY}"),
    ],
)
def test_a_wrong_result_is_refused(tmp_path: Path, change: dict[str, Any], expected: str) -> None:
    path = tmp_path / "result.json"
    write_json(path, example_result() | change)
    assert refusal(read_result, path).startswith(expected.format(path))


def test_a_wrong_value_of_one_class_is_named(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    value = example_result()
    value["validation"]["per_class"]["STT"]["ap"] = "high"
    write_json(path, value)
    assert refusal(read_result, path).startswith(f"{path}: validation.per_class.STT.ap = 'high': it takes a number")


# environment.json


def test_environment(tmp_path: Path) -> None:
    path = tmp_path / "environment.json"
    written = describe_environment(4)
    write_json(path, asdict(written))
    assert read_environment(path) == written
    assert written.world_size == 4
    assert written.torch == torch.__version__
    assert "faiss-cpu" in written.packages
    write_json(path, without(asdict(written), "format"))  # as the first release wrote it
    assert read_environment(path) == written


def test_environment_of_another_version(tmp_path: Path) -> None:
    path = tmp_path / "environment.json"
    write_json(path, asdict(describe_environment(1)) | {"format": 2})
    expected = f"{path}: format 2, but this version of ecgmatch_dist reads 1; {environment.REMEDY}"
    assert refusal(read_environment, path) == expected
    write_json(path, {"world_size": "four"})
    assert refusal(read_environment, path) == f"{path}: world_size = 'four': it takes a whole number"


# best.safetensors


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 2)
        self.auxiliary = nn.Linear(3, 2)


def save_metadata(path: Path, metadata: dict[str, str] | None) -> None:
    save_file({"w": torch.ones(1)}, path, metadata)


def test_weights(tmp_path: Path) -> None:
    path, model = tmp_path / "best.safetensors", Network()
    model.head.weight.data = model.head.weight.data.t().contiguous().t()  # not contiguous in memory
    save_weights(path, model, NOTES)
    tensors, notes = load_weights(path)
    assert notes == read_notes(path) == NOTES
    assert tensors.keys() == {"head.weight", "head.bias"}  # auxiliary layers are only for training
    for name, tensor in tensors.items():
        assert torch.equal(tensor, model.state_dict()[name])


def test_equal_weights_are_equal_files(tmp_path: Path) -> None:
    """safetensors writes the notes in an order that differs from process to process and from call to call."""
    paths = [tmp_path / f"{number}.safetensors" for number in range(8)]
    model = Network()
    for path in paths:
        save_weights(path, model, NOTES)
    assert len({path.read_bytes() for path in paths}) == 1
    size = int.from_bytes(paths[0].read_bytes()[:8], "little")
    header = json.loads(paths[0].read_bytes()[8 : 8 + size])
    assert list(header) == sorted(header)
    assert list(header["__metadata__"]) == sorted(header["__metadata__"])
    assert size % 8 == 0, "as safetensors aligns the tensors"


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    path, model = tmp_path / "best.safetensors", Network()
    model.head.bias.data[0] = math.nan
    save_weights(path, model, NOTES)
    with pytest.raises(UserError, match=r"head\.bias has values that are not finite"):
        load_weights(path)


def test_weights_of_the_first_release(tmp_path: Path) -> None:
    path = tmp_path / "best.safetensors"
    save_metadata(path, {name: json.dumps(value) for name, value in without(asdict(NOTES), "format").items()})
    assert read_notes(path) == load_weights(path)[1] == NOTES


@pytest.mark.parametrize("read", [read_notes, load_weights])
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"format": "2"}, f"format 2, but this version of ecgmatch_dist reads 1; {weights.REMEDY}"),
        ({"step": "4x"}, f"its metadata are not JSON (Extra data: line 1 column 2 (char 1)); {weights.REMEDY}"),
        ({"step": '"x"'}, "step = 'x': it takes a whole number"),
        (
            {"model": '{"colour": 3}'},
            "unknown key `model.colour`; known are width, heads, dropout, backbone, depth, first_width, feature",
        ),
        ({"preprocess": '{"rate": "fast"}'}, "preprocess.rate = 'fast': it takes a whole number"),
    ],
)
def test_wrong_notes_are_refused(
    tmp_path: Path, read: Callable[[Path], object], change: dict[str, str], expected: str
) -> None:
    path = tmp_path / "best.safetensors"
    save_metadata(path, {name: json.dumps(value) for name, value in asdict(NOTES).items()} | change)
    assert refusal(read, path) == f"{path}: {expected}"


@pytest.mark.parametrize("read", [read_notes, load_weights])
def test_other_files_are_not_weights(tmp_path: Path, read: Callable[[Path], object]) -> None:
    path = tmp_path / "best.safetensors"
    assert re.search(f"not the weights of a run .*; {weights.REMEDY}$", refusal(read, path))
    path.write_text("something else")
    assert re.search(f"not the weights of a run .*; {weights.REMEDY}$", refusal(read, path))
    save_metadata(path, None)
    assert refusal(read, path) == f"{path}: the key `classes` is missing"


# predictions/*.npz

ARRAYS: dict[str, Any] = {
    "ids": np.array(["own/a", "own/b", "own/c"]),
    "labels": np.array([[0, 1], [1, 0], [1, 1]], np.uint8),
    "probabilities": np.array([[0, 0.9], [0.8, 0.1], [0.5, 1]], np.float32),
    "features": np.ones((3, 4), np.float32),
}

OTHER_NAME = "own".encode("utf-32-le"), "oww".encode("utf-32-le")  # as NumPy stores texts


def test_predictions(tmp_path: Path) -> None:
    path = predictions_file(tmp_path, "test")
    assert path == tmp_path / "predictions" / "test.npz"
    path.parent.mkdir()
    write_arrays(path, ARRAYS)
    read = read_predictions(path)
    for name, array in ARRAYS.items():
        assert getattr(read, name).dtype == array.dtype
        assert np.array_equal(getattr(read, name), array)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"ids": ARRAYS["ids"][:2]}, r"arrays do not match \(ids \(2,\), labels \(3, 2\), .*\); train the run again$"),
        ({"labels": ARRAYS["labels"][:, :1]}, r"arrays do not match \(.*labels \(3, 1\), probabilities \(3, 2\), "),
        ({"features": ARRAYS["features"][:2]}, r"arrays do not match \(.*features \(2, 4\)\); train the run again$"),
        (
            {"labels": ARRAYS["labels"] * 2},
            "labels must be 0 or 1, probabilities between 0 and 1; train the run again$",
        ),
        ({"probabilities": ARRAYS["probabilities"] * 2}, "labels must be 0 or 1, probabilities between 0 and 1; "),
        ({"probabilities": ARRAYS["probabilities"] * np.nan}, "labels must be 0 or 1, probabilities between 0 and 1; "),
    ],
)
def test_predictions_that_make_no_sense(tmp_path: Path, change: dict[str, Any], expected: str) -> None:
    write_arrays(tmp_path / "test.npz", ARRAYS | change)
    assert re.search(expected, refusal(read_predictions, tmp_path / "test.npz"))


def test_damaged_predictions(tmp_path: Path) -> None:
    path = tmp_path / "test.npz"
    assert refusal(read_predictions, path) == f"{path}: not found; the run has not finished, or another version made it"
    write_arrays(path, without(ARRAYS, "features"))
    assert refusal(read_predictions, path).endswith("features is not a file in the archive; train the run again")
    write_arrays(path, ARRAYS)
    content = path.read_bytes()
    for damaged in (b"", b"x", content[: len(content) // 2], content.replace(*OTHER_NAME)):
        path.write_bytes(damaged)
        assert re.search(r"damaged \(.*\); train the run again$", refusal(read_predictions, path))


def test_predictions_that_unfold_or_claim_too_much(tmp_path: Path) -> None:
    path = tmp_path / "test.npz"
    np.savez_compressed(path, **ARRAYS)
    assert refusal(read_predictions, path) == f"{path}: compressed, which no run writes; train the run again"
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": (10**13,)})
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("ids.npy", header.getvalue())
    assert "damaged (" in refusal(read_predictions, path)
    write_arrays(path, ARRAYS)
    content = path.read_bytes()
    at = content.index(b"PK\1\2") + 6  # the version that the first member needs
    path.write_bytes(content[:at] + b"\xff" + content[at + 1 :])
    assert "damaged (" in refusal(read_predictions, path)
    np.save(path.with_suffix(".npy"), np.zeros(3))
    path.write_bytes(path.with_suffix(".npy").read_bytes())
    assert "damaged (" in refusal(read_predictions, path)


def test_nothing_pickled_is_written_or_read(tmp_path: Path) -> None:
    path = tmp_path / "bank.npz"
    objects = np.array([{"a": 1}], dtype=object)
    with pytest.raises(ValueError, match="pickle"):
        write_arrays(path, {"z": objects})
    np.savez(path, z=objects)
    assert zipfile.is_zipfile(path)
    assert re.search(r"damaged \(.*pickle", refusal(lambda path: read_arrays(path, ("z",)), path))
