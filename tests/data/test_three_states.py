"""Known, unknown, not annotated: from a folder of recordings and a table to a split. Unknown is never a negative."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ecgmatch_dist.data.build import build
from ecgmatch_dist.data.databases import LabelSource, Recipe
from ecgmatch_dist.data.labels import NONE, UNKNOWN, known, load_scheme
from ecgmatch_dist.data.make_split import make_split
from ecgmatch_dist.data.preprocess import PRESETS
from ecgmatch_dist.data.split_file import KNOWN_PARTS, PARTS, Split, digest, labels_of
from ecgmatch_dist.data.splits import split_shards
from ecgmatch_dist.data.store import ShardStore
from ecgmatch_dist.errors import UserError
from tests.support.recordings import make_signal, write_record
from tests.support.shard_factory import make_shards, random_codes

SCHEME = """
name = "own"
unlabelled = "keep"
class = [
  { name = "Atrial fibrillation", short = "AF", codes = ["AF"] },
  { name = "Right bundle branch block", short = "RBBB", codes = ["RBBB"] },
  { name = "ST changes", short = "ST", codes = ["ST depression", "ST elevation"] },
]
"""
WORDS = ("AF", "RBBB", "ST depression", "AF|RBBB", "none")


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """300 recordings: 100 have an empty cell, 50 are not in the table. The shards, the table and the scheme."""
    folder: Path = tmp_path_factory.mktemp("archive")
    signal = make_signal(0, n=100)
    rows = ["record,dx"]
    for i in range(300):
        write_record(folder / "raw", f"e{i:03d}", signal + 0.01 * i, codes="")
        if i % 6 < 3:
            rows.append(f"e{i:03d},{WORDS[i % 5]}")
        elif i % 6 < 5:
            rows.append(f"e{i:03d},")
    (folder / "labels.csv").write_text("\n".join(rows) + "\n")
    (folder / "own.toml").write_text(SCHEME)
    recipe = Recipe(
        "own",
        scheme=str(folder / "own.toml"),
        unlabelled="keep",
        labels=LabelSource("csv", file=str(folder / "labels.csv")),
    )
    settings = replace(PRESETS["cpu"], length=64)
    build(recipe, folder / "raw", folder / "shards", settings)
    build(replace(recipe, labels=LabelSource()), folder / "raw", folder / "bare", settings)
    return folder


def numbers(split: Split, store: ShardStore) -> dict[str, tuple[int, int]]:
    """Part -> recordings, and how many of them are unknown."""
    return {part: (len(ids), int((~known(split.labels(store, part))).sum())) for part, ids in split.parts.items()}


def test_the_archive_of_the_issue(archive: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (path,) = split_shards(str(archive / "shards"), "within", "own", ratio=0.5, to=tmp_path)
    split, store = Split.load(path), ShardStore(archive / "shards", ["own"])
    found = numbers(split, store)
    assert [found[part][1] for part in KNOWN_PARTS] == [0, 0, 0]
    assert found["unlabelled"][1] == 150
    assert sum(n for n, _ in found.values()) == 300
    assert len(store) == 300
    said = capsys.readouterr().out
    assert "150 without any label" in said
    assert "300 recordings in the shards" in said

    # The same numbers when the label file is given later, to shards that know of no label.
    (later,) = split_shards(
        str(archive / "bare"), "within", "own", ratio=0.5, to=tmp_path / "later", labels=archive / "labels.csv"
    )
    relabelled, bare = Split.load(later), ShardStore(archive / "bare", ["own"])
    assert numbers(relabelled, bare) == found
    assert relabelled.parts == split.parts
    assert relabelled.counts == split.counts
    for part in PARTS:
        assert np.array_equal(relabelled.labels(bare, part), split.labels(store, part))
    assert (relabelled.label_file, split.label_file) == ("labels.csv", "")
    assert len(relabelled.label_file_sha256) == 64


def test_a_partly_labelled_archive_is_no_error_under_strict(
    archive: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The scheme keeps recordings without a label, so they are as somebody meant them."""
    settings, source = replace(PRESETS["cpu"], length=64), LabelSource("csv", file=str(archive / "labels.csv"))
    recipe = Recipe("own", scheme=str(archive / "own.toml"), labels=source)
    build(recipe, archive / "raw", tmp_path / "kept", settings, strict=True)
    out = capsys.readouterr().out
    assert "note: 50 recordings are not in the table of labels and are unlabelled: e005, e011" in out
    assert "warning" not in out
    split_shards(
        str(archive / "bare"), "within", "own", ratio=0.5, to=tmp_path, labels=archive / "labels.csv", strict=True
    )
    assert "note: 150 recordings have no label in labels.csv and are unlabelled: own/e003" in capsys.readouterr().out
    build(replace(recipe, unlabelled="drop"), archive / "raw", tmp_path / "dropped", settings)
    assert "warning: 50 recordings are not in the table of labels: e005" in capsys.readouterr().out


def test_a_recipe_finds_the_columns_and_the_header_says_age_and_sex(tmp_path: Path) -> None:
    for i in range(4):
        write_record(tmp_path / "raw", f"e{i}", make_signal(i, n=100), codes="")
    (tmp_path / "own.toml").write_text(SCHEME)
    table = tmp_path / "raw" / "labels.csv"
    recipe = Recipe(
        "own",
        scheme=str(tmp_path / "own.toml"),
        unlabelled="keep",
        labels=LabelSource("csv", file="labels.csv"),
    )
    settings = replace(PRESETS["cpu"], length=64)
    table.write_text("Nr;Befund der Station;Patient_ID;age\ne0;AF;7;\ne1;RBBB;7;70\ne2;none;8;\n")
    found = build(recipe, tmp_path / "raw", tmp_path / "shards", settings)
    assert found["codes"].tolist() == ["AF", "RBBB", "none", ""]
    assert found["patient"].tolist() == ["7", "7", "8", ""]
    assert found["age"].tolist() == ["61", "70", "61", "61"]
    assert set(found["sex"]) == {"Female"}
    named = replace(recipe, database="named", labels=LabelSource("csv", file="labels.csv", record="Number"))
    with pytest.raises(UserError, match=r"labels\.csv: no column `Number`; there are Nr, Befund"):
        build(named, tmp_path / "raw", tmp_path / "shards", settings)
    table.write_text("Nr;Befund\nx0;AF\n")
    with pytest.raises(
        UserError, match=r"no column names the recordings .* is x0, AF; if one does, name it in the recipe"
    ):
        build(replace(recipe, database="other"), tmp_path / "raw", tmp_path / "shards", settings)


def test_one_column_per_class_is_not_hidden_by_a_text_beside_it(tmp_path: Path) -> None:
    """Of a recipe that names no column of codes."""
    for i in range(3):
        write_record(tmp_path / "raw", f"e{i}", make_signal(i, n=100), codes="")
    (tmp_path / "raw" / "labels.csv").write_text(
        "record,diagnosis,CD,Rhythm\ne0,seen by A,1,0\ne1,other,0,1\ne2,,1,1\n"
    )
    recipe = Recipe("own", unlabelled="keep", labels=LabelSource("csv", file="labels.csv"))
    found = build(recipe, tmp_path / "raw", tmp_path / "shards", replace(PRESETS["cpu"], length=64))
    assert found["labels"].tolist() == ["CD", "Rhythm", "CD Rhythm"]


def test_what_has_a_label_is_labelled_by_default(archive: Path, tmp_path: Path) -> None:
    (path,) = split_shards(str(archive / "shards"), "within", "own", to=tmp_path)
    split = Split.load(path)
    assert split.ratio == 1
    assert len(split.parts["unlabelled"]) == 150


def test_certainly_none_is_known(archive: Path) -> None:
    store = ShardStore(archive / "shards", ["own"])
    y = labels_of(store, store.datasets["own"].scheme)
    codes = store.manifest["codes"].to_numpy(str)
    assert (y[codes == NONE] == 0).all()
    assert (codes == NONE).any()
    assert (y[codes == ""] == UNKNOWN).all()
    assert y[codes == "AF RBBB"][0].tolist() == [1, 1, 0]
    assert y[codes == "ST_depression"][0].tolist() == [0, 0, 1]


def test_states_of_codes() -> None:
    scheme = load_scheme("ecgmatch5")
    assert scheme.states([]).tolist() == [UNKNOWN] * 5
    assert scheme.states(["?STT"]).tolist() == [UNKNOWN] * 5
    assert scheme.states(["none"]).tolist() == [0] * 5
    assert scheme.states(["164889003", "?STT"]).tolist() == [0, 1, UNKNOWN, 0, 0]
    assert scheme.states(["164889003", "164934002", "?STT"]).tolist() == [0, 1, 1, 0, 0]
    assert scheme.states(["rhythm"]).tolist() == scheme.states(["Abnormal_Rhythms"]).tolist() == [0, 1, 0, 0, 0]


def test_an_unknown_recording_cannot_be_smuggled_in(archive: Path, tmp_path: Path) -> None:
    """A split that was edited by hand, with a right hash, or made by a version that knew no better."""
    (path,) = split_shards(str(archive / "shards"), "within", "own", to=tmp_path)
    store = ShardStore(archive / "shards", ["own"])
    for part in KNOWN_PARTS:
        value = json.loads(path.read_text())
        value["parts"][part] = sorted([*value["parts"][part], value["parts"]["unlabelled"].pop()])
        value.pop("labels_sha256")
        value["sha256"] = digest(value)
        (tmp_path / "edited.json").write_text(json.dumps(value))
        with pytest.raises(UserError, match=f"1 recordings of the {part} part have no diagnosis"):
            Split.load(tmp_path / "edited.json").all_labels(store)


def test_another_scheme_of_the_same_name_is_noticed(archive: Path, tmp_path: Path) -> None:
    own = tmp_path / "scheme.toml"
    own.write_text(SCHEME)
    (path,) = split_shards(str(archive / "shards"), "within", "own", scheme=str(own), to=tmp_path)
    store = ShardStore(archive / "shards", ["own"])
    Split.load(path).all_labels(store)
    own.write_text(SCHEME.replace('codes = ["RBBB"]', 'codes = ["RBBB", "none"]'))
    with pytest.raises(UserError, match="gives other labels than when the split was made"):
        Split.load(path).all_labels(store)


def two_databases(tmp_path: Path) -> ShardStore:
    """`other` annotates three of five classes."""
    make_shards(tmp_path, "full", 120, 4, random_codes(120, 1))
    make_shards(tmp_path, "other", 120, 4, random_codes(120, 2))
    file = tmp_path / "other" / "dataset.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "annotates": ["CD", "Rhythm", "Normal"]}))
    return ShardStore(tmp_path, ["full", "other"])


def test_classes_that_a_database_does_not_annotate(tmp_path: Path) -> None:
    store = two_databases(tmp_path)
    y = labels_of(store, "ecgmatch5")
    assert (y[120:, [2, 3]] == UNKNOWN).all()
    assert (y[120:, [0, 1, 4]] != UNKNOWN).all()
    assert (y[:120] != UNKNOWN).all()
    split = make_split(store, "mix", 0.5, 20, "ecgmatch5")
    for part in PARTS:
        labels = split.labels(store, part)
        others = sum(name.startswith("other/") for name in split.parts[part])
        assert split.counts[part]["STT"] == int((labels[:, 2] == 1).sum())
        assert split.unannotated[part] == {"STT": others, "Other": others}
    with pytest.raises(UserError, match="no labelled recording says anything about STT, Other"):
        make_split(ShardStore(tmp_path, ["other"]), "within", 0.5, 20, "ecgmatch5")
    with pytest.raises(UserError, match=r"`annotates.other` of the scheme cinc25"):
        labels_of(store, "cinc25")


def test_a_scheme_can_say_what_a_database_annotates(tmp_path: Path) -> None:
    make_shards(tmp_path, "full", 60, 4, random_codes(60, 1))
    own = tmp_path / "own.toml"
    own.write_text("name = 'own'\nannotates = {full = ['A']}\nclass = [{name='A', short='A', codes=['59118001']}, "
                   "{name='B', short='B', codes=['164889003']}]")  # fmt: skip
    y = labels_of(ShardStore(tmp_path, ["full"]), str(own))
    assert (y[:, 1] == UNKNOWN).all()
    assert set(y[:, 0].tolist()) == {0, 1}
    every = tmp_path / "every.toml"
    every.write_text(own.read_text().replace("['A']", "['A', 'B']"))
    assert set(labels_of(ShardStore(tmp_path, ["full"]), str(every))[:, 1].tolist()) == {0, 1}
    own.write_text(own.read_text().replace("['A']", "['C']"))
    with pytest.raises(UserError, match=r"annotates.full: `C` is no class of the scheme; known are A, B"):
        load_scheme(str(own))


def test_patients_of_unknown_recordings_do_not_straddle(tmp_path: Path) -> None:
    """Every patient has a known and two unknown recordings."""
    codes = [code if i % 3 == 0 else "" for i, code in enumerate(random_codes(300, 1))]
    make_shards(tmp_path, "own", 300, 4, codes, patients=[f"p{i // 3}" for i in range(300)], per_shard=500)
    store = ShardStore(tmp_path, ["own"])
    split = make_split(store, "within", 0.5, 20, "ecgmatch5")
    patient = dict(zip(store.manifest["id"], store.manifest["patient"], strict=True))
    seen = {part: {patient[name] for name in split.parts[part]} for part in PARTS}
    assert not seen["validation"] & (seen["labelled"] | seen["unlabelled"] | seen["test"])
    assert not seen["test"] & (seen["labelled"] | seen["unlabelled"])
    held_out = len(split.parts["validation"]) + len(split.parts["test"])
    assert split.left_out == {"unknown, of a patient in validation or test": 2 * held_out}
    assert sum(map(len, split.parts.values())) + 2 * held_out == 300


def test_a_wholly_unlabelled_database(tmp_path: Path) -> None:
    make_shards(tmp_path, "full", 120, 4, random_codes(120, 1))
    make_shards(tmp_path, "bare", 80, 4, [""] * 80)
    make_shards(tmp_path, "third", 60, 4, random_codes(60, 3))
    store = ShardStore(tmp_path, ["bare", "full"])
    split = make_split(store, "mix", 0.2, 20, "ecgmatch5")
    assert sum(name.startswith("bare/") for name in split.parts["unlabelled"]) == 80
    alone = make_split(ShardStore(tmp_path, ["full"]), "within", 0.2, 20, "ecgmatch5")
    for part in KNOWN_PARTS:
        assert split.parts[part] == alone.parts[part], "unknown recordings change no draw"
    cross = make_split(ShardStore(tmp_path, ["bare", "full", "third"]), "cross", 0.2, 20, "ecgmatch5", "third")
    assert not [name for part in KNOWN_PARTS for name in cross.parts[part] if name.startswith("bare/")]
    with pytest.raises(UserError, match="test part is empty"):
        make_split(store, "cross", 0.2, 20, "ecgmatch5", "bare")
    whole = make_split(
        ShardStore(tmp_path, ["full", "third"]), "within", 0.2, 20, "ecgmatch5", unlabelled_databases=["third"]
    )
    assert whole.name == "within-full+third@0.2.s20"
    for part in KNOWN_PARTS:
        assert whole.parts[part] == alone.parts[part]
    assert sum(name.startswith("third/") for name in whole.parts["unlabelled"]) == 60


def test_folds_with_unknown_recordings(tmp_path: Path) -> None:
    codes = [code if i % 4 else "" for i, code in enumerate(random_codes(200, 1))]
    folds = [str(1 + i % 10) if i % 8 else "" for i in range(200)]
    make_shards(tmp_path, "own", 200, 4, codes, folds=folds, per_shard=500)
    store = ShardStore(tmp_path, ["own"])
    split = make_split(store, "folds", 0.5, 20, "ecgmatch5")
    for part in KNOWN_PARTS:
        assert known(split.labels(store, part)).all()
    unknown_in_folds = sum(codes[i] == "" and folds[i] in ("9", "10") for i in range(200))
    assert split.left_out == {"unknown, of a patient in validation or test": unknown_in_folds}
