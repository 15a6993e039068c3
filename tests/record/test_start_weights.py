"""`--weights`: a chain begins with a trained model, which is known by its content, fits, and has not seen the test part."""

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from ecgmatch_dist.arguments import parse
from ecgmatch_dist.config import Config, Data, Model, from_json
from ecgmatch_dist.data.split_file import Split
from ecgmatch_dist.data.splits import make_split
from ecgmatch_dist.data.store import ShardStore
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.export import command as export
from ecgmatch_dist.measurements import trees_file
from ecgmatch_dist.measurements.measure import measure_all
from ecgmatch_dist.measurements.trees import PUBLISHED, grow
from ecgmatch_dist.methods.ecgmatch import ECGMatchSettings
from ecgmatch_dist.methods.supervised import SupervisedSettings
from ecgmatch_dist.presets import few_labels
from ecgmatch_dist.record.ancestors import Ancestor, ancestors, file_checksum
from ecgmatch_dist.record.config_file import read_config
from ecgmatch_dist.record.hub import INCLUDED
from ecgmatch_dist.record.start_weights import (
    begins_with,
    check_not_seen,
    check_same_everywhere,
    pinned,
    public_trees,
    seen_test_recordings,
    starting_weights,
)
from ecgmatch_dist.record.weights import load_weights, save_weights
from tests.support.ranks import run_threads
from tests.support.shard_factory import make_shards, random_codes
from tests.support.training import assert_same_bits, final_state, learnable, make_data, run, tiny


@pytest.fixture(scope="module")
def public(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on another database, as somebody would publish it."""
    folder = tmp_path_factory.mktemp("public")
    codes = random_codes(100)
    make_shards(folder / "shards", "ptbxl", 100, 128, codes, signals=learnable(codes, 128))
    make_split(ShardStore(folder / "shards", ["ptbxl"]), "within", 1.0, 5, "ecgmatch5").save(folder / "split.json")
    return run(tiny(folder, folder / "runs", SupervisedSettings()).settled())


@pytest.mark.parametrize("method", [SupervisedSettings, ECGMatchSettings])
def test_a_run_may_be_settled_again(method: type[ECGMatchSettings] | type[SupervisedSettings]) -> None:
    """A job of a sweep gets a configuration that is settled and pinned, and settles it once more."""
    asking = replace(few_labels(), method=method(measurements=True), weights="chapman_ptbxl", tag="trees")
    planned = pinned(asking.settled())
    assert "+" in planned.weights
    assert pinned(from_json(planned.to_json()).settled()) == planned


def test_chains_share_their_start_whether_or_not_they_ask_trees() -> None:
    chain = replace(few_labels(), weights="chapman_ptbxl", selfsupervised="contrastive")
    runs = [replace(chain, method=SupervisedSettings(measurements=asks)) for asks in (False, True)] + [
        chain.supervised()
    ]
    assert len({pinned(run.settled()).without_labels().fingerprint() for run in runs}) == 1


def test_the_first_run_of_the_chain_begins_with_the_weights(data: Path, tmp_path: Path, public: Path) -> None:
    config = tiny(data, tmp_path, weights=str(public))
    still = replace(config.pretrain, lr=1e-9, steps=1)
    folder = run(replace(config, pretrain=still))
    begun, given = (load_file(path / "best.safetensors") for path in (tmp_path / f"{stem(folder)}.supervised", public))
    for name in (name for name in given if name.endswith("weight")):
        torch.testing.assert_close(
            begun[name], given[name], rtol=0, atol=1e-7
        )  # also the classifier: the same five classes
    saved = read_config(folder / "config.json").settings["weights"]
    assert saved.startswith(f"{public}#")
    told, later = ((tmp_path / f"{stem(folder)}.{name}" / "log.txt").read_text() for name in ("supervised", "ecgmatch"))
    assert f"begins with {public} (checksum {saved.partition('#')[2]})\n" in told
    assert "begins with" not in later  # it starts from the first run


def stem(folder: Path) -> str:
    return folder.name.rpartition(".")[0]


def test_an_exported_model_is_the_same_start_as_its_run(data: Path, tmp_path: Path, public: Path) -> None:
    export.main(public, to=tmp_path / "model", onnx=False)
    config = tiny(data, tmp_path, SupervisedSettings(), weights=str(public))
    moved = replace(config, weights=str(tmp_path / "model"), runs=tmp_path / "others")
    assert pinned(config).fingerprint() == pinned(moved).fingerprint() != tiny(data, tmp_path).fingerprint()
    assert_same_bits(final_state(run(config)), final_state(run(moved)))


def test_other_weights_of_the_same_name_are_another_run(data: Path, tmp_path: Path, public: Path) -> None:
    model = tmp_path / "model"
    export.main(public, to=model, onnx=False)
    config = pinned(tiny(data, tmp_path, weights=str(model)))
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x07")
    with pytest.raises(
        UserError, match=r"not the weights and trees that the run began with .* give the run another --tag"
    ):
        pinned(config)
    assert pinned(tiny(data, tmp_path, weights=str(model))).fingerprint() != config.fingerprint()


def test_the_trees_of_a_model_advise_the_run_that_begins_with_it(data: Path, tmp_path: Path, public: Path) -> None:
    plain, grown, again = (tmp_path / name for name in ("plain", "grown", "again"))
    export.main(public, to=plain, onnx=False)
    export.main(public, to=grown, onnx=False, trees=True)
    export.main(grown, to=again, onnx=False)  # keeps them
    method = ECGMatchSettings(neighbours=3, measurements=True, memory=1.0)
    configs = [tiny(data, tmp_path / f"runs-{m.name}", method, weights=str(m)) for m in (plain, grown, again)]
    prints = [pinned(config).fingerprint() for config in configs]
    assert prints[0] != prints[1] == prints[2]
    folders = [run(config) for config in configs[:2]]
    told = [(folder / "log.txt").read_text() for folder in folders]
    assert "second opinion: trees on measurements reach" in told[0]
    assert "second opinion: trees on measurements, and those that came with the weights, reach" in told[1]
    banks = [final_state(folder)["bank.p"] for folder in folders]
    assert not torch.equal(*banks)
    classes = ("CD", "Rhythm", "STT", "Other", "Normal")
    same, others = (public_trees(configs[1], names) for names in (classes, ("AF", "LBBB")))
    assert same is not None
    assert others is not None
    assert (same.same_classes, others.same_classes) == (True, False)
    assert public_trees(configs[0], classes) is None


def test_trees_learn_from_the_labelled_part_alone(data: Path, tmp_path: Path) -> None:
    """Or they would know the test recordings by which the model is judged."""
    first = run(tiny(data, tmp_path / "runs", SupervisedSettings()))
    export.main(first, to=tmp_path / "model", onnx=False, trees=True)
    store, split = ShardStore(data / "shards", ["chapman"]), Split.load(data / "split.json")
    rows, labels = split.rows(store)["labelled"], split.labels(store, "labelled")
    grown = grow(measure_all(store.read(rows), 100), labels, split.seed, settings=PUBLISHED)
    found, classes = trees_file.load_trees(tmp_path / "model" / trees_file.NAME)
    assert classes == ("CD", "Rhythm", "STT", "Other", "Normal")
    assert np.array_equal(found.feature, grown.feature)
    np.testing.assert_allclose(
        found.share, np.where(grown.left == np.arange(len(grown.left)), grown.share, 0), atol=1e-6
    )


def test_trees_decide_the_runs_that_ask_them_alone(data: Path, tmp_path: Path, public: Path) -> None:
    """So the supervised start of a chain is the same run, whatever lies beside the weights."""
    model = tmp_path / "model"
    export.main(public, to=model, onnx=False)
    asks, labels_alone = (
        tiny(data, tmp_path, method, weights=str(model))
        for method in (ECGMatchSettings(neighbours=3, measurements=True), SupervisedSettings())
    )
    before = [pinned(config) for config in (asks, labels_alone.settled())]
    shutil.copyfile(INCLUDED / "chapman_ptbxl" / trees_file.NAME, model / trees_file.NAME)
    after = [pinned(config) for config in (asks, labels_alone.settled())]
    assert [a.fingerprint() == b.fingerprint() for a, b in zip(before, after, strict=True)] == [False, True]
    assert after[0].start().fingerprint() == after[1].fingerprint() == before[0].start().fingerprint()
    assert pinned(after[0]) == after[0]
    assert pinned(after[0].start()) == after[0].start()


def test_trees_of_other_measurements_are_not_asked(
    data: Path, tmp_path: Path, public: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The weights are as good as before. On the hub, nobody can remove the trees."""
    export.main(public, to=tmp_path / "model", onnx=False, trees=True)
    path = tmp_path / "model" / trees_file.NAME
    path.write_bytes(path.read_bytes().replace(rb"\"version\": 2", rb"\"version\": 1"))
    method = ECGMatchSettings(neighbours=3, measurements=True)
    folder = run(tiny(data, tmp_path / "runs", method, weights=str(tmp_path / "model")))
    told = capsys.readouterr().out
    assert "warning:" in told
    assert "read other measurements than this version of ecgmatch_dist makes, and are not asked" in told
    assert "second opinion: trees on measurements reach" in (folder / "log.txt").read_text()


def test_ranks_that_find_other_files_are_refused(data: Path, tmp_path: Path, public: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(public, other)
    file = other / "best.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x07")

    def check(rank: int, world: int, places: tuple[Path, Path]) -> str:
        try:
            check_same_everywhere(pinned(tiny(data, tmp_path, weights=str(places[rank]))))
        except UserError as error:
            return str(error)
        return ""

    def asked(config: Config) -> None:
        raise UserError("asked")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ecgmatch_dist.train.check_same_everywhere", asked)
        with pytest.raises(UserError, match="asked"):
            run(tiny(data, tmp_path / "runs", weights=str(public)))
    assert run_threads(2, check, (public, public)) == ["", ""]
    for told in run_threads(2, check, (public, other)):
        assert "1 ranks find other weights or trees under this name than rank 0; bring the same folder" in told


def test_broken_trees_end_the_run_before_it_has_a_folder(data: Path, tmp_path: Path, public: Path) -> None:
    export.main(public, to=tmp_path / "model", onnx=False)
    (tmp_path / "model" / "trees.safetensors").write_bytes(b"no trees")
    method = ECGMatchSettings(neighbours=3, measurements=True)
    config = tiny(data, tmp_path / "runs", method, weights=str(tmp_path / "model"))
    with pytest.raises(UserError, match=r"trees\.safetensors: not the trees of a model .* `ecgmatch export --trees`"):
        run(config)
    assert not list((tmp_path / "runs").glob("*"))
    run(replace(config, method=SupervisedSettings()))  # asks no trees


def test_trees_need_the_recordings_of_a_run(tmp_path: Path, public: Path) -> None:
    export.main(public, to=tmp_path / "model", onnx=False)
    with pytest.raises(UserError, match=r"--trees: .*model is no run's folder.* give the folder of the run"):
        export.main(tmp_path / "model", to=tmp_path / "more", onnx=False, trees=True)
    with pytest.raises(UserError, match="nowhere"):
        export.main(public, to=tmp_path / "more", onnx=False, trees=True, shards=str(tmp_path / "nowhere"))
    gone = tmp_path / "gone"
    shutil.copytree(public, gone)
    config = (gone / "config.json").read_text()
    (gone / "config.json").write_text(config.replace(str(public.parents[1] / "shards"), "moved"))
    with pytest.raises(UserError, match=r"--trees: moved.*, or give --shards, where they are now"):
        export.main(gone, to=tmp_path / "more", onnx=False, trees=True)
    assert not (tmp_path / "more").exists()
    with pytest.raises(UserError, match="--shards elsewhere: is read for the trees alone; give --trees"):
        export.main(public, to=tmp_path / "more", onnx=False, shards="elsewhere")


def test_other_classes_begin_with_a_classifier_of_their_own(data: Path, tmp_path: Path, public: Path) -> None:
    config = tiny(data, tmp_path, SupervisedSettings(), weights=str(public))
    preprocess = ShardStore(data / "shards", ["chapman"]).preprocess
    assert "classifier.weight" not in starting_weights(config, preprocess, ["AF", "LBBB"])
    assert "classifier.weight" in starting_weights(config, preprocess, ["CD", "Rhythm", "STT", "Other", "Normal"])
    told = begins_with(pinned(config), starting_weights(config, preprocess, ["AF", "LBBB"]))
    assert told.startswith(f"begins with {public} (checksum ")
    assert told.endswith("; its classes are others: the classifier begins anew")


def test_what_does_not_fit_is_told_with_the_option(data: Path, tmp_path: Path, public: Path) -> None:
    config = tiny(data, tmp_path, SupervisedSettings(), weights=str(public))
    with pytest.raises(UserError, match=r"model\.width = 32: the weights in .* have 16; give --model\.width 16"):
        run(replace(config, model=Model(width=32, heads=2)))
    with pytest.raises(UserError, match=r"another preprocessing \(100 Hz, 12 x 1024\) than the shards have"):
        run(replace(config, model=replace(parse(["--preset", "few_labels"]).model), weights="chapman_ptbxl"))
    with pytest.raises(UserError, match=r"weights = '.*nowhere': no such folder; name the folder of a finished run"):
        run(replace(config, weights=str(tmp_path / "nowhere")))


def test_weights_that_lie_about_their_network_are_refused(data: Path, tmp_path: Path, public: Path) -> None:
    """They may come from a web page: a sentence, and no folder of a run."""
    weights, notes = load_weights(public / "best.safetensors")
    model = torch.nn.Module()
    for number, value in enumerate(weights.values()):
        model.register_buffer(f"wrong{number}", value)
    (tmp_path / "model").mkdir()
    save_weights(tmp_path / "model" / "best.safetensors", model, notes)
    config = tiny(data, tmp_path / "runs", SupervisedSettings(), weights=str(tmp_path / "model"))
    with pytest.raises(
        UserError, match=r"best\.safetensors: \S+ has the shape .*, its settings say .*; name the folder"
    ):
        run(config)
    assert not list((tmp_path / "runs").glob("*"))


def test_a_model_that_knows_the_test_recordings_is_refused(data: Path, tmp_path: Path, public: Path) -> None:
    other = make_split(ShardStore(data / "shards", ["chapman"]), "within", 0.2, 21, "ecgmatch5")
    other.save(tmp_path / "other.json")
    config = tiny(data, tmp_path, SupervisedSettings(), split=tmp_path / "other.json")
    knows = run(tiny(data, tmp_path / "runs", SupervisedSettings()))
    with pytest.raises(
        UserError, match=r"trained or chosen with \d+ of the \d+ test recordings of within-chapman.*s21"
    ):
        run(replace(config, weights=str(knows)))
    split = Split.load(config.split)
    assert check_not_seen(replace(config, weights=str(public)), split) == ""
    assert "was trained on chapman: if it has seen" in check_not_seen(replace(config, weights="chapman_ptbxl"), split)


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [("luvt", "tttt", ["a, row 0", "a, row 1", "a, row 2"]), ("lt-t", "-t--", []), ("llll", "lluv", [])],
)
def test_recordings_that_are_letters_are_compared_too(old: str, new: str, found: list[str]) -> None:
    def split(letters: str, manifest: str = "m") -> Split:
        nothing: dict[str, dict[str, int]] = {}
        return Split(
            "s",
            "within",
            ("a",),
            None,
            1.0,
            1,
            "x",
            True,
            {},
            nothing,
            {"a": manifest},
            format=3,
            letters={"a": letters},
        )

    assert seen_test_recordings(split(old), split(new)) == found
    assert seen_test_recordings(split(old, "built anew"), split(new)) is None


def test_only_the_first_run_of_the_chain_begins_with_them(public: Path) -> None:
    config: Config = pinned(parse(["--weights", str(public), "--preset", "cpu"]))
    assert config.weights.startswith(f"{public}#")
    assert config.start().begins_with == config.weights
    assert config.begins_with == ""


@pytest.fixture(scope="module")
def hospital(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on recordings of one's own that began with an exported run on chapman, whose classes are the same."""
    folder = tmp_path_factory.mktemp("hospital")
    make_data(folder)
    first = run(tiny(folder, folder / "first", SupervisedSettings()))
    export.main(first, to=folder / "given", onnx=False)
    codes = random_codes(100)
    make_shards(folder / "own", "my_hospital", 100, 128, codes, signals=learnable(codes, 128))
    make_split(ShardStore(folder / "own", ["my_hospital"]), "within", 1.0, 5, "ecgmatch5").save(folder / "own.json")
    config = tiny(folder, folder / "runs", SupervisedSettings(), split=folder / "own.json", shards=str(folder / "own"))
    return run(replace(config, weights=str(folder / "given")))


def test_what_came_before_the_weights_counts_too(data: Path, tmp_path: Path, hospital: Path) -> None:
    """A run that began with a model of chapman, and its export, know chapman."""
    export.main(hospital, to=tmp_path / "passed on", onnx=False)
    export.main(tmp_path / "passed on", to=tmp_path / "again", onnx=False)
    assert "began with given (trained on chapman)." in (hospital / "model_card.md").read_text()
    split = Split.load(data / "split.json")
    for model in (hospital, tmp_path / "passed on", tmp_path / "again"):
        told = check_not_seen(tiny(data, tmp_path, weights=str(model)), split)
        assert f"{model} began with given, which was trained on chapman: if it has seen test recordings" in told
    own = Split.load(hospital / "split.json")
    elsewhere = replace(own, databases=("elsewhere",), parts={part: [] for part in own.parts})
    assert check_not_seen(tiny(data, tmp_path, weights=str(tmp_path / "again")), elsewhere) == ""


@pytest.mark.parametrize("trees", ["", "+0123456789abcdef"])
@pytest.mark.parametrize("older", [False, True])
def test_the_included_model_before_the_weights_is_found(
    data: Path, tmp_path: Path, hospital: Path, trees: str, older: bool
) -> None:
    """Older runs have one checksum of weights and trees."""
    model, given = shutil.copytree(hospital, tmp_path / "model"), INCLUDED / "chapman_ptbxl"
    content = [(given / name).read_bytes() for name in ("model.safetensors", trees_file.NAME)]
    checksum = hashlib.sha256(b"".join(content[: 1 + older])).hexdigest()[:16]
    edit(model, weights=f"chapman_ptbxl#{checksum}{trees}")
    assert ancestors(model) == [Ancestor("chapman_ptbxl", ("chapman", "ptbxl"), given)]
    told = check_not_seen(tiny(data, tmp_path, weights=str(model)), Split.load(data / "split.json"))
    assert "began with chapman_ptbxl, which was trained on chapman: if it has seen" in told


def test_a_run_before_the_weights_is_compared_recording_by_recording(data: Path, tmp_path: Path) -> None:
    """The first run has seen test recordings of another split of its database."""
    first = run(tiny(data, tmp_path / "runs", SupervisedSettings()))
    second = shutil.copytree(first, tmp_path / "runs" / "second")
    edit(second, weights=f"elsewhere/{first.name}#{file_checksum(first / 'best.safetensors')}")  # found beside it
    other = make_split(ShardStore(data / "shards", ["chapman"]), "within", 0.2, 21, "ecgmatch5")
    (second / "split.json").unlink()
    other.save(second / "split.json")
    with pytest.raises(
        UserError, match=rf"began with {first.name}, which was trained or chosen with \d+ of the \d+ test"
    ):
        check_not_seen(tiny(data, tmp_path, weights=str(second)), other)


def test_a_model_that_has_read_an_archive_is_told(data: Path, tmp_path: Path) -> None:
    """Its tars may hold any recordings, here all of chapman: the databases of the split do not say so."""
    codes = random_codes(60)
    make_shards(tmp_path / "own", "my_hospital", 60, 128, codes, signals=learnable(codes, 128))
    make_split(ShardStore(tmp_path / "own", ["my_hospital"]), "within", 0.5, 5, "ecgmatch5").save(tmp_path / "own.json")
    tars = Data(reader="webdataset", archive=f"{data}/shards/chapman/chapman-{{000000..000003}}.tar")
    config = tiny(data, tmp_path / "runs", split=tmp_path / "own.json", shards=str(tmp_path / "own"))
    model = run(replace(config, data=tars))
    export.main(model, to=tmp_path / "given", onnx=False)
    later = run(replace(config, runs=tmp_path / "later", method=SupervisedSettings(), weights=str(tmp_path / "given")))
    export.main(later, to=tmp_path / "passed on", onnx=False)
    split = Split.load(data / "split.json")

    def told(start: Path) -> str:
        return check_not_seen(tiny(data, tmp_path, weights=str(start)), split)

    for start in (model, tmp_path / "given"):
        assert told(start).startswith(f"{start} has also learnt from an archive (`data.archive`), and nobody knows")
    for start in (later, tmp_path / "passed on"):
        assert told(start).startswith(f"{start} began with given, which has also learnt from an archive")
    assert told(tmp_path / "runs" / f"{stem(model)}.supervised") == ""  # the archive is in its settings, but not read
    edit(tmp_path / "runs" / f"{stem(model)}.supervised", selfsupervised="contrastive")
    assert "has also learnt from an archive" in told(tmp_path / "runs" / f"{stem(model)}.supervised")


def test_what_cannot_be_found_any_more_is_told(data: Path, tmp_path: Path, hospital: Path) -> None:
    split = Split.load(data / "split.json")
    model = shutil.copytree(hospital, tmp_path / "runs" / "model")

    def told() -> str:
        return check_not_seen(tiny(data, tmp_path, weights=str(model)), split)

    edit(model, weights=f"{hospital.parents[1] / 'given'}#{'0' * 16}")  # another model lies there by now
    assert "began with given, which is not at hand, so what it was trained on cannot be told" in told()
    export.main(model, to=tmp_path / "passed on", onnx=False)
    given = json.loads((tmp_path / "passed on" / "config.json").read_text())
    assert given["begun_with"] == [{"name": "given", "databases": []}]
    edit(model, weights=f"{model}#{file_checksum(model / 'best.safetensors')}")  # in a circle
    assert "not at hand" not in told()
    (model / "config.json").write_text("{")
    assert f"whether {model} began with another model cannot be told" in told()
    shutil.rmtree(model)
    shutil.copytree(tmp_path / "passed on", model)
    older = {key: value for key, value in given.items() if key != "begun_with"}
    (model / "config.json").write_text(json.dumps(older))
    assert f"whether {model} began with another model cannot be told" in told()
    assert ancestors(INCLUDED / "chapman_ptbxl") == []


def edit(folder: Path, **settings: str) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
