"""`ecgmatch split given`: the lists that a person has; very few labels; whole databases without labels."""

from pathlib import Path

import numpy as np
import pytest

from ecgmatch_dist.data.split_file import PARTS, Split
from ecgmatch_dist.data.split_summary import wilson
from ecgmatch_dist.data.splits import main, split_shards
from ecgmatch_dist.errors import UserError
from tests.support.commands import check_command
from tests.support.shard_factory import make_shards, random_codes


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """own: two recordings a patient, the last 40 of 200 without labels; bare: 50 without any."""
    folder: Path = tmp_path_factory.mktemp("shards")
    codes = [*random_codes(160, 1), *[""] * 40]
    make_shards(folder, "own", 200, 4, codes, patients=[f"p{i // 2}" for i in range(200)], per_shard=500)
    make_shards(folder, "bare", 50, 4, [""] * 50, per_shard=500)
    return folder


def write_list(path: Path, numbers: range) -> Path:
    path.write_text("\n".join(["record", *(f"own{i:05d}" for i in numbers)]))
    return path


def numbers(split: Split, part: str, database: str = "own") -> list[int]:
    return [int(name[-5:]) for name in split.parts[part] if name.startswith(f"{database}/")]


def test_three_lists(shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(
        "given",
        shards=str(shards),
        database="own",
        labelled=write_list(tmp_path / "labelled.csv", range(60)),
        validation=write_list(tmp_path / "validation.csv", range(60, 80)),
        test=str(write_list(tmp_path / "test.csv", range(80, 110))),
        unlabelled_database=("bare",),
        to=tmp_path,
    )
    split = Split.load(tmp_path / "given-own+bare@1.s20.json")
    assert numbers(split, "labelled") == list(range(60))
    assert numbers(split, "validation") == list(range(60, 80))
    assert numbers(split, "test") == list(range(80, 110))
    assert numbers(split, "unlabelled") == list(range(110, 200))
    assert numbers(split, "unlabelled", "bare") == list(range(50))
    out = capsys.readouterr().out
    assert "250 recordings in the shards = 60 labelled + 140 unlabelled + 20 validation + 30 test + 0 left out" in out
    assert "140 recordings: 90 without any label, 50 whose labels the split hides" in out


def test_rest_of_a_listed_patient(shards: Path, tmp_path: Path) -> None:
    """Recordings 60, 61 and 80, 81 are of one patient each."""
    (path,) = split_shards(
        str(shards),
        "given",
        "own",
        labelled=write_list(tmp_path / "labelled.csv", range(41)),
        validation=write_list(tmp_path / "validation.csv", range(60, 79)),
        test=str(write_list(tmp_path / "test.csv", range(80, 109))),
        to=tmp_path,
    )
    split = Split.load(path)
    assert 41 in numbers(split, "unlabelled"), "a labelled patient's other recording is unlabelled"
    assert split.left_out == {"of a patient in the validation or test list": 2}
    assert sum(len(split.parts[part]) for part in PARTS) == 198


def test_parts_without_a_list_are_drawn_from_the_labelled_list(shards: Path, tmp_path: Path) -> None:
    labelled = write_list(tmp_path / "labelled.csv", range(160))
    (path,) = split_shards(str(shards), "given", "own", labelled=labelled, to=tmp_path)
    split = Split.load(path)
    assert {*numbers(split, "unlabelled")} == set(range(160, 200))
    assert abs(len(split.parts["validation"]) - 16) <= 6
    assert abs(len(split.parts["test"]) - 16) <= 6
    patients = [{i // 2 for i in numbers(split, part)} for part in PARTS]
    assert sum(map(len, patients)) == len(set().union(*patients))


@pytest.mark.parametrize("seed", range(5))
def test_twenty_labels_still_give_a_validation_part(
    tmp_path: Path, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    make_shards(tmp_path / "shards", "own", 120, 4, [*random_codes(20, seed), *[""] * 100], per_shard=500)
    (path,) = split_shards(str(tmp_path / "shards"), "within", "own", seeds=(seed,), to=tmp_path)
    split = Split.load(path)
    sizes = {part: len(split.parts[part]) for part in PARTS}
    assert sizes["unlabelled"] == 100
    assert sizes["labelled"] + sizes["validation"] + sizes["test"] == 20
    assert min(sizes.values()) >= 1
    assert "a share of 80 % on them may in truth be" in capsys.readouterr().out


def test_wilson_interval_by_hand() -> None:
    low, high = wilson(0.8, 10)
    z = 1.96
    for edge in (low, high):  # Wilson's limits solve |0.8 - p| = z sqrt(p (1 - p) / n)
        assert abs(0.8 - edge) == pytest.approx(z * np.sqrt(edge * (1 - edge) / 10))


def test_lists_that_cannot_be(shards: Path, tmp_path: Path) -> None:
    def given(first: range, second: range) -> None:
        split_shards(
            str(shards),
            "given",
            "own",
            labelled=write_list(tmp_path / "labelled.csv", first),
            test=str(write_list(tmp_path / "test.csv", second)),
            to=tmp_path / "splits",
        )

    with pytest.raises(UserError, match="own/own00040 is in the lists labelled and test"):
        given(range(41), range(40, 60))
    with pytest.raises(UserError, match="a patient of the labelled list is in another list"):
        given(range(41), range(41, 60))
    with pytest.raises(UserError, match=r"10 recordings of the test list have no label \(own/own00160, ...\)"):
        given(range(40), range(150, 170))
    with pytest.raises(UserError, match="--labelled LIST belongs to the protocol given"):
        split_shards(str(shards), "given", "own", to=tmp_path)
    with pytest.raises(UserError, match="--labelled LIST belongs to the protocol given"):
        split_shards(str(shards), "within", "own", labelled=tmp_path / "labelled.csv", to=tmp_path)
    assert not (tmp_path / "splits").exists()


def test_no_label_at_all_names_the_command_that_makes_some(shards: Path, tmp_path: Path) -> None:
    listed = tmp_path / "listed.csv"
    listed.write_text("record\nbare00001\n")
    for more in ({}, {"labelled": listed}):
        with pytest.raises(UserError, match=r"^0 of 50 recordings have a label; label some: ecgmatch label") as error:
            split_shards(str(shards), "given" if more else "within", "bare", to=tmp_path, **more)
        check_command(str(error.value).partition("label some: ")[2])
    table = tmp_path / "labels.csv"
    table.write_text("record,dx\nbare00001,\n")
    with pytest.raises(UserError, match=r"0 of 50 recordings have a label in labels\.csv; label some"):
        split_shards(str(shards), "within", "bare", labels=table, to=tmp_path)


def test_too_few_labels_are_counted(shards: Path, tmp_path: Path) -> None:
    table = tmp_path / "labels.csv"
    three = tmp_path / "three.csv"
    three.write_text("record,dx\nbare00001,rhythm\nbare00002,CD\nbare00003,STT\n")
    few = "too few to share among labelled, validation and test parts"
    table.write_text("record,dx\nbare00001,rhythm\n")
    with pytest.raises(UserError, match=f"the validation part is empty: 1 of 50 recordings have a label: {few}"):
        split_shards(str(shards), "within", "bare", labels=table, to=tmp_path)
    with pytest.raises(UserError, match=f"1 of 250 recordings have a label: {few}"):
        split_shards(
            str(shards), "within", "bare", labels=table, unlabelled_databases=["own"], scheme="ecgmatch5", to=tmp_path
        )
    with pytest.raises(UserError, match=f"the test part is empty: 3 of 50 recordings have a label: {few}"):
        split_shards(str(shards), "within", "bare", labels=three, to=tmp_path)
    lists = write_list(tmp_path / "labelled.csv", range(2))
    with pytest.raises(UserError, match=f"the lists name 2 recordings with a label: {few}"):
        split_shards(str(shards), "given", "own", labelled=lists, to=tmp_path)
    table.write_text("record,dx\nbare00001,strange\nbare00002,strange\nbare00003,strange\n")
    with pytest.raises(UserError, match="3 recordings have a label, none of them a class of ecgmatch5"):
        split_shards(str(shards), "within", "bare", labels=table, to=tmp_path)


def test_labels_of_one_patient_alone_or_of_the_test_database_alone(tmp_path: Path) -> None:
    """Files without names may have the same patient, such as ANON, in all headers."""
    make_shards(tmp_path, "same", 60, 4, random_codes(60), patients=["ANON"] * 60)
    make_shards(tmp_path, "bare", 60, 4, [""] * 60)
    few = "too few to share among labelled, validation and test parts"
    with pytest.raises(UserError, match=rf"60 of 60 recordings have a label \(they are of 1 patient\): {few}"):
        split_shards(str(tmp_path), "within", "same", ratio=1, to=tmp_path)
    with pytest.raises(UserError, match=r"no recording has a label but those of same, the database to test on"):
        split_shards(str(tmp_path), "cross", test="same", to=tmp_path)


def test_twenty_labels_take_turns_to_validate(tmp_path: Path) -> None:
    """Five splits: one test part, and each of the other labelled recordings validates once."""
    codes = [*random_codes(20), *[""] * 60]
    make_shards(tmp_path, "own", 80, codes=codes)
    paths = split_shards(str(tmp_path), "within", "own", folds=5, to=tmp_path / "splits")
    splits = [Split.load(path) for path in paths]
    assert [split.name for split in splits] == [f"within-own-5fold@1.s{seed}" for seed in range(20, 25)]
    assert len({tuple(split.parts["test"]) for split in splits}) == 1
    turns = [name for split in splits for name in split.parts["validation"]]
    assert len(turns) == len(set(turns)) == 20 - len(splits[0].parts["test"])
    for split in splits:
        assert set(split.parts["labelled"]) == set(turns) - set(split.parts["validation"])
        assert len(split.parts["validation"]) >= 3
        assert len(split.parts["unlabelled"]) == 60
    with pytest.raises(UserError, match="too few"):
        split_shards(str(tmp_path), "within", "own", folds=15, to=tmp_path / "more")
    with pytest.raises(UserError, match="at least 2"):
        split_shards(str(tmp_path), "within", "own", folds=1, to=tmp_path / "more")
