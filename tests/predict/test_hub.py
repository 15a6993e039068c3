"""Names of models: folders, and names on the hub, from a cache as the hub's own client lays it out; no network is asked."""

import shutil
from pathlib import Path

import pytest

import ecgmatch_dist as em
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.export import command
from ecgmatch_dist.measurements import trees_file
from ecgmatch_dist.record import hub, second_opinion
from tests.support.prediction import ecg, write_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The client's cache, empty, and no network."""
    constants = pytest.importorskip("huggingface_hub.constants", reason="needs the extra `hub`")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache"


def publish(cache: Path, folder: Path) -> None:
    place = cache / "models--ward--ecg"
    shutil.copytree(folder, place / "snapshots" / COMMIT)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text(COMMIT)


def test_a_model_of_the_hub_answers_as_the_run(cache: Path, tmp_path: Path) -> None:
    run = write_model(tmp_path / "run")
    command.main(run, to=tmp_path / "model", onnx=False)
    names = {path.name for path in (tmp_path / "model").iterdir()}
    assert names | {trees_file.NAME, *second_opinion.FILES} == {*hub.FILES}
    publish(cache, tmp_path / "model")
    expected = em.load(run, "cpu").predict(ecg(), rate=500)
    for name in ("hub://ward/ecg", "ward/ecg", "ward/ecg@main", f"ward/ecg@{COMMIT}", Path("hub://ward/ecg")):
        model = em.load(name, "cpu")
        assert model.name == "ward/ecg"
        assert model.predict(ecg(), rate=500).probabilities == expected.probabilities
    assert em.load("run", "cpu").name == "run"


def test_what_cannot_be_had_is_one_sentence(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"^hub://ward/none cannot be fetched \(.*\); check name and network$"):
        em.load("hub://ward/none")
    with pytest.raises(UserError, match=r"^ward/none: no such folder; as a name on the hub it cannot be fetched"):
        em.load("ward/none")
    (tmp_path / "pickled").mkdir()
    (tmp_path / "pickled" / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    publish(cache, tmp_path / "pickled")
    with pytest.raises(UserError, match=r"hub://ward/ecg holds no model\.safetensors"):
        em.load("hub://ward/ecg")
    monkeypatch.setattr(hub, "find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"hub://ward/ecg needs huggingface_hub; pip install 'ecgmatch-dist\[hub\]'"):
        em.load("hub://ward/ecg")


def test_a_mistyped_path_is_not_looked_for_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    assert hub.model_folder("runs/mistyped") == (Path("runs/mistyped"), "mistyped")
    assert hub.model_folder("mistyped") == (Path("mistyped"), "mistyped")
    assert hub.model_folder(tmp_path / "x") == (tmp_path / "x", "x")
    assert hub.model_folder(Path())[1] == tmp_path.name


def test_the_models_of_the_package_answer_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert hub.included() == ["chapman_ptbxl"]
    model = em.load("chapman_ptbxl", "cpu")
    answer = model.predict(ecg(), rate=500)
    assert (model.name, list(answer.probabilities)) == ("chapman_ptbxl", ["CD", "Rhythm", "STT", "Other", "Normal"])
    assert answer.nearest == ()  # the package holds no recordings
    card = (hub.INCLUDED / "chapman_ptbxl" / "README.md").read_text(encoding="utf-8")
    assert "CC BY 4.0" in card
    assert "Not a medical device" in card


@pytest.mark.parametrize("name", ["chapman_ptb", "chapman-ptbxl", "Chapman_PTBXL", "chapmann_ptbxl"])
def test_a_mistyped_name_of_a_model_of_the_package(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=f"^{name}: no such folder; did you mean chapman_ptbxl, "):
        hub.model_folder(name)
    (tmp_path / name).mkdir()
    assert hub.model_folder(name) == (Path(name), name)


def test_a_folder_of_ones_own_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "chapman_ptbxl")
    assert hub.model_folder("chapman_ptbxl") == (Path("chapman_ptbxl"), "chapman_ptbxl")
