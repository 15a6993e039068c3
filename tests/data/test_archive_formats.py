"""Shards from a folder of mixed formats, with labels in a workbook; long recordings in segments."""

from pathlib import Path
from typing import get_args, get_type_hints

import edfio
import pandas as pd
import pytest

from ecgmatch_dist.data.build import build
from ecgmatch_dist.data.databases import LabelSource, Recipe, Signals, load_recipe
from ecgmatch_dist.data.formats.read import NAMES
from ecgmatch_dist.data.index import read_manifest
from ecgmatch_dist.data.preprocess import LEADS, PRESETS
from ecgmatch_dist.data.split_file import PARTS, Split
from ecgmatch_dist.data.splits import split_shards
from ecgmatch_dist.data.verify import verify
from ecgmatch_dist.errors import UserError
from tests.support.archive import CODES, write_mixed
from tests.support.recordings import make_signal, write_record

FILES = ("**/*.hea", "**/*.csv", "**/*.npy", "**/*.h5", "**/*.edf")
SIGNALS = Signals(rate=100, unit="mV", leads=LEADS)


def recipe(signals: Signals = SIGNALS, files: tuple[str, ...] = FILES) -> Recipe:
    labels = LabelSource(source="csv", file="Befunde.xlsx", codes="Befund", patient="Patient")
    return Recipe("own", files=files, unlabelled="keep", signals=signals, labels=labels)


def test_every_format_of_a_mixed_folder_gives_the_same_shard_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_mixed(tmp_path / "raw")
    build(recipe(), tmp_path / "raw", tmp_path / "shards", PRESETS["cpu"])
    manifest = read_manifest(tmp_path / "shards/own").set_index("key")
    assert len(manifest) == 20
    assert set(manifest["flags"]) == {""}
    names = [{f"wfdb{i}", f"Station_{i}", f"array_{i}", f"edf{i}", f"{900 + i}"} for i in range(4)]
    assert {frozenset(some) for some in names} == {
        frozenset(n for n in manifest.index if n[-1] == str(i)) for i in range(4)
    }
    assert (manifest["codes"] != "").sum() == 15  # labels were found by every kind of name
    out = capsys.readouterr().out
    assert "20 recordings -> 20 kept" in out
    assert "5 unknown" in out
    assert verify(tmp_path / "shards/own").problems == []


def test_what_the_recipe_must_say(tmp_path: Path) -> None:
    write_mixed(tmp_path / "raw")
    with pytest.raises(UserError, match=r"array_0: leads: the file does not name its 12 leads.*rejects.csv"):
        build(recipe(Signals(), ("**/*.npy",)), tmp_path / "raw", tmp_path / "out", PRESETS["cpu"])
    path = tmp_path / "own.toml"
    path.write_text('database = "own"\n[signals]\nunit = "mmHg"\n')
    with pytest.raises(UserError, match=r'signals.unit = "mmHg"'):
        load_recipe(str(path))
    path.write_text('database = "own"\n[signals]\nlead_map = { a = "b" }\n')
    with pytest.raises(UserError, match=r"signals.lead_map"):
        load_recipe(str(path))
    assert get_args(get_type_hints(Signals)["format"]) == ("", *NAMES)


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """30 recordings, every third of 39 s, and one that cannot be read; in segments of 10.24 s."""
    root: Path = tmp_path_factory.mktemp("long")
    for i in range(30):
        x = make_signal(i, n=3900 if i % 3 == 0 else 1000)
        write_record(root / "raw", f"r{i:02d}", x, codes=CODES[i % 3] if i < 24 else "")
    (root / "raw" / "r01.dat").write_bytes(b"")
    signals = Signals(segments="all")
    build(
        Recipe("own", unlabelled="keep", signals=signals), root / "raw", root / "shards", PRESETS["cpu"], shard_size=7
    )
    return root


def test_long_recordings_in_segments(long: Path) -> None:
    manifest = read_manifest(long / "shards/own")
    of_first = manifest[manifest["key"].str.startswith("r00")]
    assert of_first["key"].tolist() == [f"r00-seg{i}" for i in (1, 2, 3, 4)]
    assert of_first["samples"].tolist() == [1024, 1024, 1024, 828]
    assert of_first["sha256"].nunique() == 4
    assert len(manifest) == 10 * 4 + 19
    assert verify(long / "shards/own").problems == []


def test_segments_never_straddle_and_every_recording_is_accounted_for(long: Path) -> None:
    rejects = pd.read_csv(long / "shards/own/rejects.csv")
    manifest = read_manifest(long / "shards/own")
    recordings = manifest["key"].str.replace(r"-seg\d+", "", regex=True)
    assert recordings.nunique() + len(rejects) == 30  # found = kept + rejected
    for seed in range(5):
        (path,) = split_shards(str(long / "shards"), "within", "own", seeds=[seed], to=long / "splits")
        split = Split.load(path)
        part_of = {name.partition("-seg")[0]: part for part in PARTS for name in split.parts[part]}
        for part in PARTS:
            assert all(part_of[name.partition("-seg")[0]] == part for name in split.parts[part])
        assert sum(map(len, split.parts.values())) + sum(split.left_out.values()) == len(manifest)
        known = dict(zip("own/" + manifest["key"], manifest["codes"], strict=True))
        assert all(known[name] for part in PARTS if part != "unlabelled" for name in split.parts[part])


def test_a_label_file_names_recordings_not_segments(long: Path) -> None:
    table = long / "later.csv"
    table.write_text("record,dx\n" + "\n".join(f"r{i:02d}.hea,{CODES[(i + i // 3) % 3]}" for i in range(30) if i != 1))
    (path,) = split_shards(str(long / "shards"), "within", "own", labels=table, to=long / "later", name="later")
    split = Split.load(path)
    assert {split.codes["own"][f"r27-seg{i}"] for i in (1, 2, 3, 4)} == {CODES[(27 + 9) % 3]}
    assert sum(map(len, split.parts.values())) == len(read_manifest(long / "shards/own"))


def test_the_files_patient_counts_where_the_table_names_none(tmp_path: Path) -> None:
    """Or two recordings of one patient could be in training and test."""
    (tmp_path / "raw").mkdir()
    for name in ("e1", "e2", "e3"):
        x = make_signal(1, n=1000)
        signals = [
            edfio.EdfSignal(row, 100, label=lead, physical_dimension="mV") for row, lead in zip(x, LEADS, strict=True)
        ]
        edfio.Edf(signals, patient=edfio.Patient(code="P-7")).write(tmp_path / "raw" / f"{name}.edf")
    (tmp_path / "raw" / "labels.csv").write_text("record,dx,patient\ne1,164889003,\ne2,164889003,P-8\n")
    labels = LabelSource(source="csv", file="labels.csv")
    own = Recipe("own", files=("*.edf",), unlabelled="keep", labels=labels)
    manifest = build(own, tmp_path / "raw", tmp_path / "shards", PRESETS["cpu"])
    assert manifest["patient"].tolist() == ["P-7", "P-8", "P-7"]
