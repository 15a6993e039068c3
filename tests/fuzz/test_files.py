"""What a run folder, a recipe and a server hold: results, settings, weights, predictions, checkpoints, TOML, HTTP answers."""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ecgmatch_dist import resources
from ecgmatch_dist.config import Config, Model
from ecgmatch_dist.data import http
from ecgmatch_dist.data.databases import load_recipe
from ecgmatch_dist.data.http import Fetcher, FetchError
from ecgmatch_dist.data.labels import load_scheme
from ecgmatch_dist.data.preprocess import Preprocess
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.files.atomic import write_json
from ecgmatch_dist.launch.expand import load_sweep
from ecgmatch_dist.launch.site import load_site
from ecgmatch_dist.measurements.measure import number_of_measurements
from ecgmatch_dist.measurements.trees import descend, grow
from ecgmatch_dist.measurements.trees_file import load_trees, save_trees
from ecgmatch_dist.record.config_file import read_config, to_file
from ecgmatch_dist.record.predictions import read_predictions, write_arrays
from ecgmatch_dist.record.result import read_result
from ecgmatch_dist.record.second_opinion import read_together
from ecgmatch_dist.record.weights import ModelNotes, load_weights, save_weights
from ecgmatch_dist.recovery.checkpoint import Checkpointer
from tests.support.mutate import bounded_memory, fuzz, mutated, refused_at_most
from tests.support.run_factory import CLASSES, example_result


@pytest.fixture(autouse=True)
def bounded() -> Iterator[None]:
    with bounded_memory():
        yield


def write_weights(path: Path) -> None:
    model = Model(width=16, heads=2)
    notes = ModelNotes(CLASSES, "ecgmatch5", (0.5,) * len(CLASSES), Preprocess(rate=100, length=1024), model, step=4)
    save_weights(path, torch.nn.Linear(3, 2), notes)


def write_predictions(path: Path) -> None:
    labels = np.eye(5, dtype=np.uint8)
    features = np.ones((5, 3), np.float32)
    ids = np.array([f"own/r{i}" for i in range(5)])
    write_arrays(path, {"ids": ids, "labels": labels, "probabilities": labels.astype(np.float32), "features": features})


def write_trees(path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((40, number_of_measurements())).astype(np.float32)
    save_trees(path, grow(rows, (rows[:, :2] > 0).astype(np.uint8), seed=0, settings={"n_estimators": 3}), ("A", "B"))


def read_trees(path: Path) -> None:
    forests, classes = load_trees(path)
    p = descend(forests, np.ones((2, number_of_measurements()), np.float32))
    assert p.shape == (2, len(classes))
    assert ((p >= 0) & (p <= 1)).all()


def write_opinion(path: Path) -> None:
    result = example_result()
    write_json(path, {name: result[name] for name in ("thresholds", "validation", "test")} | {"share": 0.5})


FILES: dict[str, tuple[Callable[[Path], object], Callable[[Path], object]]] = {
    "result.json": (lambda path: write_json(path, example_result()), read_result),
    "config.json": (lambda path: write_json(path, to_file(Config(split=Path("s.json")))), read_config),
    "best.safetensors": (write_weights, load_weights),
    "trees.safetensors": (write_trees, read_trees),
    "test.npz": (write_predictions, read_predictions),
    "opinion/opinion.json": (write_opinion, lambda path: read_together(path.parents[1])),
}
TOML: dict[str, tuple[str, Callable[[str], object]]] = {
    "recipe": ("shards/ptbxl.toml", load_recipe),
    "scheme": ("shards/labels/ecgmatch5.toml", load_scheme),
    "sweep": ("launch/ablation.toml", load_sweep),
    "site": ("slurm/gpu.toml", load_site),
}


@pytest.mark.parametrize("name", FILES)
@fuzz
@given(data=st.data())
def test_files_of_a_run(tmp_path: Path, name: str, data: st.DataObject) -> None:
    write, read = FILES[name]
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    if not (tmp_path / "good").exists():
        write(tmp_path / "good")
    path.write_bytes(data.draw(mutated((tmp_path / "good").read_bytes())))
    with refused_at_most(UserError):
        read(path)


@pytest.mark.parametrize("name", TOML)
@fuzz
@given(data=st.data())
def test_toml(tmp_path: Path, name: str, data: st.DataObject) -> None:
    source, read = TOML[name]
    folder, _, rest = source.partition("/")
    path = tmp_path / "own.toml"
    path.write_bytes(data.draw(mutated((resources.folder(folder) / rest).read_bytes())))
    with refused_at_most(UserError):
        read(str(path))


@fuzz
@given(data=st.data(), name=st.sampled_from(("state.json", "latest", "state/rank-00000.safetensors")))
def test_checkpoints(tmp_path: Path, data: st.DataObject, name: str) -> None:
    folder = tmp_path / "checkpoints"
    good = tmp_path / "good" / Path(name).name
    checkpointer = Checkpointer(folder, {"split": "s"})
    if not folder.joinpath("latest").exists():
        checkpointer.save(3, {"student": {"w": torch.arange(6.0)}}, {"step": 3})
        checkpointer.wait()
    path = folder / name if name == "latest" else folder / "step-000003.1" / name
    good.parent.mkdir(exist_ok=True)
    if not good.exists():
        good.write_bytes(path.read_bytes())
    path.write_bytes(data.draw(mutated(good.read_bytes())))
    try:
        with refused_at_most(UserError):
            found, notes = checkpointer.latest()
            assert found is None or found.counters["step"] == 3 or notes
    finally:
        path.write_bytes(good.read_bytes())


class Answers:
    """A server that gives every client the same bytes, whatever they are."""

    def __init__(self) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}/"
        self.answer = b""
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self.socket.accept()
                with client, suppress(OSError):
                    client.recv(65536)
                    client.sendall(self.answer)


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Answers]:
    monkeypatch.setattr(http, "PAUSE", 0.0)
    monkeypatch.setattr(http, "LONGEST_PAUSE", 0.0)
    monkeypatch.setattr(http, "ATTEMPTS", 2)
    monkeypatch.setattr(http, "TIMEOUT", (2, 0.2))
    found = Answers()
    yield found
    found.socket.close()


RESPONSE = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 12\r\nRetry-After: 1\r\n\r\nabc file.dat"


@fuzz
@given(data=st.data())
def test_http_answers(answers: Answers, tmp_path: Path, data: st.DataObject) -> None:
    answers.answer = data.draw(mutated(RESPONSE))
    for ask in (lambda: Fetcher((answers.url,)).text("SUMS"), lambda: fetch(answers.url, tmp_path)):
        with refused_at_most(FetchError):
            ask()


def fetch(url: str, folder: Path) -> Any:
    return Fetcher((url,)).fetch("a.dat", "0" * 64, folder / "a.dat")


def test_a_mutation_is_another_file() -> None:
    """The fuzzer itself: it must damage what it is given."""
    seen = set()

    @fuzz
    @given(mutated(json.dumps({"a": [1, 2, 3]}).encode()))
    def collect(content: bytes) -> None:
        seen.add(content)

    collect()
    assert len(seen) > 10
