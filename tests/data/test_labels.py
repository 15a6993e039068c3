import csv

import numpy as np
import pytest

from ecgmatch_dist.data.labels import load_scheme
from ecgmatch_dist.errors import UserError

SINUS, FIBRILLATION, MOBITZ = "426783006", "164889003", "426183003"


def test_normal_needs_to_be_the_only_code() -> None:
    scheme = load_scheme("ecgmatch5")
    assert scheme.short == ("CD", "Rhythm", "STT", "Other", "Normal")
    assert scheme.encode([SINUS]).tolist() == [0, 0, 0, 0, 1]
    assert scheme.encode([SINUS, SINUS]).tolist() == [0, 0, 0, 0, 1]
    assert scheme.encode([SINUS, FIBRILLATION]).tolist() == [0, 1, 0, 0, 0]
    assert scheme.encode([SINUS, "164865005"]).tolist() == [0, 0, 0, 0, 0], "a code of no class is still another code"
    assert scheme.encode([FIBRILLATION, MOBITZ]).tolist() == [1, 1, 0, 0, 0]
    assert scheme.encode([]).tolist() == [0, 0, 0, 0, 0]
    assert scheme.names(scheme.encode([FIBRILLATION, MOBITZ])) == ("CD", "Rhythm")


def test_encode_all_is_encode_of_each() -> None:
    scheme = load_scheme("ecgmatch5")
    joined = [SINUS, f"{SINUS} {MOBITZ}", "", "1 2 3"]
    assert np.array_equal(scheme.encode_all(joined), [scheme.encode(codes.split()) for codes in joined])
    assert scheme.encode_all([]).shape == (0, 5)
    assert {scheme.encode([]).dtype, scheme.encode_all([]).dtype, scheme.encode_all(joined).dtype} == {np.dtype("u1")}


@pytest.mark.parametrize(("name", "classes"), [("ecgmatch5", 5), ("cinc25", 25), ("ptbxl_super", 5)])
def test_schemes(name: str, classes: int) -> None:
    scheme = load_scheme(name)
    assert scheme.name == name
    assert len(scheme.classes) == len(scheme.short) == len(scheme.codes) == classes
    assert len(set().union(*scheme.codes)) == sum(map(len, scheme.codes)), "each code belongs to one class"


def test_sizes_of_the_papers_lists() -> None:
    assert [len(codes) for codes in load_scheme("ecgmatch5").codes] == [17, 7, 10, 11, 1]
    assert [len(codes) for codes in load_scheme("ptbxl_super").codes] == [1, 14, 11, 13, 5]
    assert not load_scheme("ptbxl_super").drop_unlabelled


def test_merged_codes_and_plain_sinus_rhythm_of_cinc25() -> None:
    scheme = load_scheme("cinc25")
    assert scheme.names(scheme.encode(["733534002"])) == scheme.names(scheme.encode(["164909002"])) == ("LBBB",)
    assert scheme.names(scheme.encode([SINUS, FIBRILLATION])) == ("AF", "NSR")


@pytest.mark.parametrize(
    ("database", "recordings", "kept", "counts"),
    [
        ("ptbxl", 21837, 19634, [4907, 4087, 4299, 7296, 6432]),
        ("chapman", 10247, 9717, [1198, 7682, 2951, 1445, 1366]),
        ("georgia", 10344, 9906, [2236, 3977, 4991, 2627, 1752]),
    ],
)
def test_the_papers_class_counts(shared_data, database, recordings, kept, counts) -> None:  # type: ignore[no-untyped-def]
    with (shared_data / "labels" / f"{database}.csv").open() as stream:
        codes = [row["dx"].replace(",", " ") for row in csv.DictReader(stream)]
    labels = load_scheme("ecgmatch5").encode_all(codes)
    assert len(labels) == recordings
    assert int(labels.any(axis=1).sum()) == kept
    assert labels.sum(axis=0).tolist() == counts


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nam = 'x'", "unknown key `nam`; known are name, unlabelled, ignored, annotates, class"),
        ("name = 'x'", "`class` is missing"),
        (
            "name = 'x'\nclass = [{name = 'A', short = 'A', code = []}]",
            "unknown key `class[0].code`; known are name, short, codes, only",
        ),
        ("name = 'x'\nclass = [{name = 'A', short = 'A b', codes = ['1']}]", "without spaces"),
        ("name = 'x'\nclass = [{name = 'A', short = 'A', codes = [1]}]", "class[0].codes[0] = 1: it takes a text"),
        ("name = 'x'\nunlabelled = 'maybe'\nclass = []", "unlabelled = 'maybe': it takes 'drop' or 'keep'"),
        (
            "name = 'x'\nclass = [{name = 'A', short = 'A', codes = []}, {name = 'B', short = 'A', codes = []}]",
            "same `short`",
        ),
        (
            "name = 'x'\nclass = [{name = 'A', short = 'A', codes = [], only = 1}]",
            "class[0].only = 1: it takes true or false",
        ),
        ("name = ", "not a TOML file"),
    ],
)
def test_a_bad_scheme_is_refused(tmp_path, text, message) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "own.toml").write_text(text)
    with pytest.raises(UserError, match=r"own\.toml") as error:
        load_scheme(str(tmp_path / "own.toml"))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_name_too_long_for_a_file() -> None:
    for name in ("9" * 5000, "9" * 5000 + ".toml"):
        with pytest.raises(UserError, match=r"no recipe|no such file"):
            load_scheme(name)
