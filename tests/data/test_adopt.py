"""`ecgmatch adopt`: the recipe and the scheme that it writes build the archive."""

import os
from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from ecgmatch_dist.data import splits
from ecgmatch_dist.data.adopt.command import adopt
from ecgmatch_dist.data.adopt.labels import Class, fitting_scheme, near_misses
from ecgmatch_dist.data.adopt.survey import is_signal_table
from ecgmatch_dist.data.build import build
from ecgmatch_dist.data.databases import load_recipe
from ecgmatch_dist.data.index import read_manifest
from ecgmatch_dist.data.labels import load_scheme
from ecgmatch_dist.data.preprocess import LEADS, PRESETS
from ecgmatch_dist.data.splits import split_shards
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.launch import build_shards
from tests.support.archive import write_mixed
from tests.support.commands import check_command
from tests.support.recordings import make_signal, write_record


def test_a_mixed_folder_needs_three_looks_and_a_build(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw = tmp_path / "Station 3"
    write_mixed(raw, words=("Vorhofflimmern", "Normalbefund, gedreht"))
    (raw / "readme.txt").write_text("From the archive of ward 3\n")
    path = adopt(raw, tmp_path, "", look=100)
    out = capsys.readouterr().out
    for line in (
        "recordings  20 in 17 files: .csv 4, .edf 4, .h5 4, .hea 4, .npy 4",
        "rates       not said 12, 100 Hz 8",
        "leads       all twelve 12, twelve without names 8",
        "labels      Befunde.xlsx: column `record` names 15 of 20 recordings, column `Befund` holds 3 different labels",
        "patients    column `Patient`",
        "doubt       5 recordings are in no row: they are unlabelled",
        "next        look at the 7 lines marked EDIT in",
    ):
        assert line in out, line
    recipe = load_recipe(str(path))
    assert (recipe.database, recipe.signals.rate, recipe.signals.unit) == ("station_3", 100, "mV")
    assert recipe.signals.leads == LEADS
    manifest = build(recipe, raw, tmp_path / "shards", PRESETS["cpu"])
    assert len(manifest) == 20
    assert (manifest["codes"] != "").sum() == 15
    assert manifest["labels"].str.contains("Vorhof").sum() == 8
    page = (tmp_path / "station_3_preview.html").read_text()
    assert page.count("<figure>") == 5
    with pytest.raises(UserError, match="exists already"):
        adopt(raw, tmp_path, "", look=100)


def test_labels_in_headers_and_a_known_scheme(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for i in range(3):
        write_record(tmp_path / "raw", f"r{i}", make_signal(i), codes="426783006,164889003")
    (tmp_path / "raw/r2.dat").write_bytes(b"")
    recipe = load_recipe(str(adopt(tmp_path / "raw", tmp_path, "mine", look=2)))
    assert (recipe.scheme, recipe.labels.source, recipe.files) == ("ecgmatch5", "header", ("*.hea",))
    out = capsys.readouterr().out
    assert "classes     scheme ecgmatch5" in out
    assert "look at the preview, then" in out
    adopt(tmp_path / "raw", tmp_path, "again", look=9)
    assert "doubt       1 recording cannot be read: cut short: r2.dat holds 0" in capsys.readouterr().out


def test_a_known_scheme_is_not_taken_for_a_few_of_its_classes() -> None:
    """cinc25 knows all four words, and 21 of its 25 classes would be empty."""
    words = Counter({"Atrial fibrillation": 30, "Sinus bradycardia": 70, "Sinus rhythm": 40, "T wave abnormal": 30})
    assert fitting_scheme(words) == ""
    names = load_scheme("cinc25").classes
    assert fitting_scheme(Counter(dict.fromkeys(names[:9], 20))) == "cinc25"


def test_marks_and_the_unit_of_an_array(tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    for i in range(12):
        np.save(tmp_path / f"raw/e{i}.npy", (1000 * make_signal(i, n=5000)).astype(np.int16))
    table = pd.DataFrame({"id": [f"e{i}" for i in range(12)], "AF": [1] * 10 + [0] * 2, "Age": 60, "LVH": [0, 1] * 6})
    table.to_csv(tmp_path / "raw/labels.csv", index=False, sep=";")
    recipe = load_recipe(str(adopt(tmp_path / "raw", tmp_path, "marks", look=50)))
    assert (recipe.signals.rate, recipe.signals.unit) == (500, "uV")
    manifest = build(recipe, tmp_path / "raw", tmp_path / "shards", PRESETS["cpu"])
    assert manifest["labels"].str.contains("AF").sum() == 10
    assert set(read_manifest(tmp_path / "shards/marks")["age"]) == {"60"}


def test_what_is_a_table_of_samples(tmp_path: Path) -> None:
    for text, samples in (
        ("I,II,V1\n0.1,0.2,0.3\n", True),
        ("0.1;0.2;0.3\n", True),
        ("record,dx\n1,2\n", False),
        ("Lead I [mV]\tLead II [mV]\n", True),
        ("Dear colleague,\n", False),
        ("", False),
    ):
        (tmp_path / "a.csv").write_text(text)
        assert is_signal_table(tmp_path / "a.csv") is samples, text


def test_folders_whose_names_are_patterns_escapes_or_not_utf8(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The recordings of `[2019]*` were left out of the recipe without a word."""
    raw = tmp_path / "raw $(x)"
    for i, name in enumerate((b"[2019]*", b"a b", b'it\'s "q"', b"\x1b[31m\n", b"M\xfcller", b"")):
        write_record(raw / os.fsdecode(name), f"r{i}", make_signal(i))
    (raw / "\x1b[31mbad.hea").write_text("x")
    path = adopt(raw, tmp_path, "mine", look=100)
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert f"--raw '{raw}'" in out
    assert len(build(load_recipe(str(path)), raw, tmp_path / "shards", PRESETS["cpu"])) == 6


def test_a_folder_without_labels_names_the_command_that_makes_some(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for i in range(3):
        write_record(tmp_path / "raw", f"r{i}", make_signal(i), codes="")
    adopt(tmp_path / "raw", tmp_path, "mine", look=9)
    out = capsys.readouterr().out
    assert "or label some with `ecgmatch label`" in out
    assert out.splitlines()[-1].strip() == "ecgmatch label --shards data/shards --scheme ecgmatch5 --to labels.csv"
    check_command(out.splitlines()[-1].strip())


def test_each_command_ends_with_the_next_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for i in range(60):
        write_record(tmp_path / "raw", f"r{i}", make_signal(i, n=100), codes=("426783006", "164889003")[i % 2])
        write_record(tmp_path / "bare", f"b{i}", make_signal(i, n=100), codes="")
    told = []
    for name in ("raw", "bare"):
        recipe = adopt(tmp_path / name, tmp_path, name, look=100)
        build_shards.main(str(recipe), raw=tmp_path / name, out=tmp_path / "my shards", workers=1, preset="few_labels")
        told.append(capsys.readouterr().out.splitlines()[-1])
    splits.main("within", shards=str(tmp_path / "my shards"), database="raw", to=tmp_path)
    told.append(capsys.readouterr().out.splitlines()[-1])
    shards = f"--shards '{tmp_path / 'my shards'}'"
    assert told == [
        f"next        ecgmatch split within --database raw {shards}",
        f"next        ecgmatch label {shards} --databases bare --scheme ecgmatch5 --to labels.csv",
        f"next        ecgmatch train --preset few_labels --split {tmp_path}/within-raw@0.05.s20.json {shards}",
    ]
    for line in told:
        check_command(line.removeprefix("next        "))


def test_guesses_about_labels_are_marked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["Normal"] * 5 + ["Normal, AF"] * 5 + ["AF"] * 6 + [""] * 2
    for i in range(len(words)):
        write_record(tmp_path / "raw", f"r{i}", make_signal(i), codes="")
    rows = [f'r{i},"{word}",{50 + i}' for i, word in enumerate(words)]
    (tmp_path / "raw" / "labels.csv").write_text("\n".join(["Nr,Befund,Alter", *rows]))
    path = adopt(tmp_path / "raw", tmp_path, "mine", look=2)
    text = path.read_text()
    assert 'record = "Nr"   # EDIT: names recordings\ncodes = "Befund"   # EDIT: looks like labels\n' in text
    assert 'age = "Alter"   # EDIT: by its name\n' in text
    assert 'empty = "unknown"   # EDIT: 2 rows without a label, guessed: nobody has looked; "none": somebody' in text
    scheme = (tmp_path / "mine_classes.toml").read_text()
    assert (
        "only = true   # EDIT: guessed from its name; beside another label it does not count; 10 recordings" in scheme
    )
    out = capsys.readouterr().out
    assert f"look at the 5 lines marked EDIT in {path} and {tmp_path / 'mine_classes.toml'} and at the preview" in out
    build(load_recipe(str(path)), tmp_path / "raw", tmp_path / "shards", PRESETS["cpu"])
    told = "note: Normal: 5 of 10 stand beside other labels and do not count (only = true)"
    assert told in capsys.readouterr().out
    split_shards(str(tmp_path / "shards"), "within", "mine", labels=tmp_path / "raw" / "labels.csv", to=tmp_path)
    assert told in capsys.readouterr().out


def test_rare_labels_and_typos_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = ["Vorhofflimmern"] * 10 + ["LVH"] * 10 + ["AF"] * 10 + ["Vorhofflimern", "LVHH", "AFL", "lvh", *"abcdefg"]
    for i in range(len(rows)):
        write_record(tmp_path / "raw", f"r{i}", make_signal(i, n=100), codes="")
    table = "\n".join(["record,dx", *(f"r{i},{word}" for i, word in enumerate(rows))])
    (tmp_path / "raw" / "labels.csv").write_text(table)
    adopt(tmp_path / "raw", tmp_path, "mine", look=2)
    out = capsys.readouterr().out
    assert "doubt       ignored, or typos of a class: LVHH 1: LVH?, Vorhofflimern 1: Vorhofflimmern?; correct" in out
    assert "AFL 1, LVHH 1, Vorhofflimern 1, a 1, b 1, 5 more (the preview has all); a recording with no other" in out
    page = (tmp_path / "mine_preview.html").read_text()
    assert (
        "<h2>10 ignored labels</h2>\n<p>AFL 1, LVHH 1, Vorhofflimern 1, a 1, b 1, c 1, d 1, e 1, f 1, g 1</p>" in page
    )
    assert near_misses(Counter({"164889004": 3}), [Class("164889003", "a", 10, only=False)]) == []


def test_folders_without_recordings(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        adopt(tmp_path / "nowhere", tmp_path, "", 10)
    with pytest.raises(UserError, match=r"no recordings in it; known are files with \.hea"):
        adopt(tmp_path, tmp_path, "", 10)
