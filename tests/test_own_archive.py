"""Runs on an archive of which only some recordings have labels, and what is checked before they begin."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ecgmatch_dist.config import Config
from ecgmatch_dist.data.labels import UNKNOWN, known
from ecgmatch_dist.data.make_split import make_split
from ecgmatch_dist.data.split_file import PARTS, Split
from ecgmatch_dist.data.splits import split_shards
from ecgmatch_dist.data.store import ShardStore
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.methods.supervised import FullySupervisedSettings
from ecgmatch_dist.presets import PRESETS, fitting
from ecgmatch_dist.record.hub import INCLUDED
from ecgmatch_dist.record.predictions import predictions_file, read_predictions
from tests.support.shard_factory import make_shards, random_codes
from tests.support.training import assert_same_bits, final_state, learnable, run, tiny


@pytest.fixture(scope="module")
def archive(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recordings of `data`. Only those that its split labels, validates and tests have labels, in lists and a table."""
    folder: Path = tmp_path_factory.mktemp("archive")
    split, codes = Split.load(data / "split.json"), random_codes(200)
    index = {f"chapman/chapman{i:05d}": i for i in range(200)}
    hidden = {index[name] for name in split.parts["unlabelled"]}
    bare = ["" if i in hidden else code for i, code in enumerate(codes)]
    make_shards(folder / "shards", "chapman", 200, 128, bare, signals=learnable(codes, 128), per_shard=64)
    for part in PARTS:
        (folder / f"{part}.csv").write_text("\n".join(["record", *split.parts[part]]))
    (path,) = split_shards(
        str(folder / "shards"),
        "given",
        "chapman",
        labelled=folder / "labelled.csv",
        validation=folder / "validation.csv",
        test=str(folder / "test.csv"),
        to=folder,
        name="split",
    )
    assert Split.load(path).parts == split.parts
    return folder


def test_labels_that_are_not_there_are_labels_that_are_hidden(data: Path, archive: Path, tmp_path: Path) -> None:
    """To the bit; only the diagnostics against the hidden labels are gone."""
    hidden, absent = run(tiny(data, tmp_path / "a")), run(tiny(archive, tmp_path / "b"))
    assert_same_bits(final_state(hidden), final_state(absent))
    records = [
        [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in (hidden, absent)
    ]
    names = [{name for record in some for name in record} for some in records]
    gone = names[0] - names[1]
    assert gone
    assert all(name.startswith("hidden/") for name in gone)
    assert not names[1] - names[0]
    for one, other in zip(*records, strict=True):
        for name in other.keys() - {"time"}:
            if not name.startswith(("time/", "throughput", "memory", "bank/")):
                assert one[name] == other[name], name
    results = [json.loads((folder / "result.json").read_text()) for folder in (hidden, absent)]
    assert results[0]["test"] == results[1]["test"]


def test_the_upper_bound_gets_no_label_that_nobody_has_given(archive: Path, tmp_path: Path) -> None:
    folder = run(tiny(archive, tmp_path, FullySupervisedSettings()))
    found = read_predictions(predictions_file(folder, "labelled"))
    assert sorted(found.ids.tolist()) == Split.load(archive / "split.json").parts["labelled"]
    assert known(found.labels).all()


def test_a_run_on_two_databases_of_which_one_annotates_three_classes(tmp_path: Path) -> None:
    codes = random_codes(240, 5)
    x = learnable(codes, 128)
    make_shards(tmp_path / "shards", "full", 120, 128, codes[:120], signals=x[:120], per_shard=64)
    make_shards(tmp_path / "shards", "other", 120, 128, codes[120:], signals=x[120:], per_shard=64)
    file = tmp_path / "shards" / "other" / "dataset.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "annotates": ["CD", "Rhythm", "Normal"]}))
    store = ShardStore(tmp_path / "shards", ["full", "other"])
    make_split(store, "mix", 0.3, 20, "ecgmatch5").save(tmp_path / "split.json")
    folder = run(tiny(tmp_path, tmp_path / "runs"))
    found = read_predictions(predictions_file(folder, "test"))
    others = np.array([name.startswith("other/") for name in found.ids])
    assert others.any()
    assert (found.labels[others][:, [2, 3]] == UNKNOWN).all()
    result = json.loads((folder / "result.json").read_text())
    stt = found.labels[~others, 2]
    assert result["test"]["per_class"]["STT"]["prevalence"] == pytest.approx(stt.mean())


def test_shards_that_the_preset_is_not_meant_for_are_refused(data: Path, tmp_path: Path) -> None:
    config = replace(PRESETS["paper"](), split=data / "split.json", shards=str(data / "shards"), runs=tmp_path)
    with pytest.raises(
        UserError, match=r"the shards are 100 Hz, 12 x 128, the settings are meant for 500 Hz, 12 x 6144"
    ):
        run(config)
    assert not list(tmp_path.iterdir()), "no folder that another preset would collide with"
    make_shards(tmp_path / "large", "chapman", 60, 6144, random_codes(60), rate=500, per_shard=200)
    make_split(ShardStore(tmp_path / "large", ["chapman"]), "within", 0.2, 20, "ecgmatch5").save(
        tmp_path / "large.json"
    )
    config = replace(PRESETS["few_labels"](), split=tmp_path / "large.json", shards=str(tmp_path / "large"))
    with pytest.raises(
        UserError,
        match=r"build them anew with `ecgmatch shards build --preset cpu`, or give --preset paper or --preset ",
    ):
        run(replace(config, runs=tmp_path / "runs"))
    assert {"cpu", "few_labels", "demo"} <= {*fitting(100, 1024)}
    assert not {"paper", "official_code"} & {*fitting(100, 1024)}
    assert fitting(500, 6144) == ["paper", "official_code"]
    assert PRESETS["paper"]().fingerprint() == Config().fingerprint(), "a check decides no result"


def test_all_that_keeps_weights_from_a_run_is_told_at_once(data: Path, tmp_path: Path) -> None:
    config = replace(tiny(data, tmp_path), weights="chapman_ptbxl")  # another network, and shards of another length
    network = r"its network is another: give --model\.backbone resnet1d --model\.first-width 32 .*; or begin with another model"
    signals = (
        r"another preprocessing \(100 Hz, 12 x 1024\) than the shards have \(100 Hz, 12 x 128\): build shards as it needs "
        r"them \(`shards build --preset cpu`\); "
    )
    marked = shutil.copytree(INCLUDED / "chapman_ptbxl", tmp_path / "of #3")  # the mark before a checksum, in a name
    for weights in ("chapman_ptbxl", str(marked)):
        with pytest.raises(UserError, match=signals + network):
            run(replace(config, weights=weights))
    make_shards(tmp_path / "shards", "chapman", 60, 1024, random_codes(60), per_shard=60)
    make_split(ShardStore(tmp_path / "shards", ["chapman"]), "within", 0.2, 20, "ecgmatch5").save(tmp_path / "a.json")
    with pytest.raises(UserError, match=r"the model does not fit this run; " + network):
        run(replace(config, split=tmp_path / "a.json", shards=str(tmp_path / "shards")))


def test_a_split_that_is_not_there_names_those_that_are(tmp_path: Path) -> None:
    config = replace(PRESETS["few_labels"](), split=tmp_path / "within-own@1.s21.json", runs=tmp_path / "runs")
    with pytest.raises(UserError, match=r"s21\.json: not found; make it with `ecgmatch split`$"):
        run(config)
    for name in ("within-own@1.s20", "within-own@1.s19", "mix@1.s20", "mix@1.s19", "labelled", "other"):
        (tmp_path / f"{name}.json").write_text("{}")
    with pytest.raises(
        UserError, match=r"has within-own@1\.s20\.json, within-own@1\.s19.* and 1 more: give one with --split"
    ):
        run(config)


def test_the_check_before_training(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tiny(data, tmp_path))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:5]] == ["labelled", "unlabelled", "unknown", "few", "signals"]
    assert lines[4] == "signals     100 Hz, 12 x 128"
    assert sum(line.startswith("labelled ") for line in lines) == 1, "not again for the run that it starts from"
