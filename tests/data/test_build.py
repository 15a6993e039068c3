import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import webdataset as wds
from threadpoolctl import threadpool_limits
from xxhash import xxh3_64_digest

from ecgmatch_dist import cli
from ecgmatch_dist.data import build, recordings, shard
from ecgmatch_dist.data.databases import Recipe, load_recipe
from ecgmatch_dist.data.index import read_dataset, read_manifest
from ecgmatch_dist.data.preprocess import PRESETS, preprocess
from ecgmatch_dist.data.store import ShardStore
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.files.lock import locked
from tests.support.recordings import LEADS, make_signal, write_record

CPU = PRESETS["cpu"]
OWN = Recipe("own")
FIBRILLATION, SINUS = "164889003", "426783006"


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    """Seven recordings: r2 with a flat lead, r4 cut short, r5 without a class."""
    folder = tmp_path / "raw"
    for i in range(7):
        x = make_signal(i, n=1000)
        if i == 2:
            x[0] = 0.3
        codes = {1: f"{FIBRILLATION},{SINUS}", 5: "164865005"}.get(i, SINUS)
        path = write_record(folder, f"r{i}", x, codes=codes, old=i % 2 == 0)
    cut = folder / "r4.mat"
    cut.write_bytes(cut.read_bytes()[:2000])
    assert path.name == "r6"
    return folder


def contents(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir()) if p.name != ".lock"}


def test_what_is_written(raw: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build.build(OWN, raw, tmp_path / "out", CPU, shard_size=3)
    folder = tmp_path / "out" / "own"
    manifest, dataset = read_manifest(folder), read_dataset(folder)
    assert manifest["row"].tolist() == [0, 1, 2, 3, 4]
    assert manifest["key"].tolist() == ["r0", "r1", "r2", "r3", "r6"]
    assert manifest["labels"].tolist() == ["Normal", "Rhythm", "Normal", "Normal", "Normal"]
    assert manifest["codes"][1] == f"{FIBRILLATION} {SINUS}"
    assert manifest["flags"].tolist() == ["", "", "flat:I", "", ""]
    assert manifest["shard"].tolist() == ["own-000000.tar"] * 3 + ["own-000001.tar", "own-000002.tar"]
    assert set(zip(manifest["rate"], manifest["samples"], manifest["age"], manifest["sex"], strict=True)) == {
        (100, 1000, "61", "Female")
    }
    assert (folder / "rejects.csv").read_text() == (
        "key,reason\nr4,cut short: r4.mat holds 82 of 1000 samples\nr5,no class: of ecgmatch5 in 164865005\n"
    )
    for row in manifest.to_dict("records"):
        with (folder / row["shard"]).open("rb") as stream:
            data = os.pread(stream.fileno(), 12 * 1024 * 2, row["offset"])
        recording = recordings.read_recording(recordings.RecordRef(row["key"], raw / row["key"]))
        expected = preprocess(recording.signal, recording.rate, CPU)[0].astype(np.float16)
        assert np.array_equal(np.frombuffer(data, "<f2").reshape(12, 1024), expected)
        assert row["sha256"] == hashlib.sha256(data).hexdigest()
    assert dataset.recordings == 5
    assert dataset.rejected == 2
    assert dataset.leads == LEADS
    assert [entry.recordings for entry in dataset.shards] == [3, 1, 1]
    for entry in dataset.shards:
        content = (folder / entry.name).read_bytes()
        assert (entry.sha256, entry.bytes) == (hashlib.sha256(content).hexdigest(), len(content))
    out = capsys.readouterr().out
    assert "7 recordings -> 5 kept" in out
    assert "CD 0 (0.0%), Rhythm 1 (20.0%), STT 0 (0.0%), Other 0 (0.0%), Normal 4 (80.0%)" in out
    assert "rejected  cut short 1, no class 1" in out
    assert "flagged   flat 1" in out


@pytest.mark.parametrize("sequence", [("pad",), ("filter", "pad"), ("pad", "filter"), ("zscore", "pad")])
def test_steps_can_be_left_out(raw: Path, tmp_path: Path, sequence: tuple[str, ...]) -> None:
    assert len(build.build(OWN, raw, tmp_path / "out", replace(CPU, sequence=sequence))) == 5


def test_any_webdataset_reader_reads_them(raw: Path, tmp_path: Path) -> None:
    build.build(OWN, raw, tmp_path / "out", CPU)
    tar = tmp_path / "out/own/own-000000.tar"
    samples = list(wds.WebDataset(str(tar), shardshuffle=False).decode())
    assert [sample["__key__"] for sample in samples] == ["r0", "r1", "r2", "r3", "r6"]
    assert samples[1]["ecg.npy"].shape == (12, 1024)
    assert samples[1]["ecg.npy"].dtype == np.float16
    assert samples[2]["json"] == {
        "key": "r2", "database": "own", "labels": ["Normal"], "codes": [SINUS], "patient": "", "age": "61",
        "sex": "Female", "fold": "", "rate": 100.0, "samples": 1000, "flags": ["flat:I"],
    }  # fmt: skip
    with tarfile.open(tar) as archive:
        assert {(m.mtime, m.uid, m.uname, m.mode) for m in archive} == {(0, 0, "", 0o444)}


def test_same_bytes_whatever_the_workers(raw: Path, tmp_path: Path) -> None:
    build.build(OWN, raw, tmp_path / "a", CPU, workers=1, shard_size=2)
    build.build(OWN, raw, tmp_path / "b", CPU, workers=2, shard_size=2)
    with threadpool_limits(2):
        build.build(OWN, raw, tmp_path / "c", CPU, workers=1, shard_size=2)
    assert contents(tmp_path / "a/own") == contents(tmp_path / "b/own") == contents(tmp_path / "c/own")


def test_finished_shards_are_not_written_again(raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build.build(OWN, raw, tmp_path / "out", CPU, shard_size=2)
    folder = tmp_path / "out/own"
    before = contents(folder)
    (folder / "own-000001.csv").unlink()
    (folder / ".own-000001.tar.99.partial").write_bytes(b"half")
    written = []
    monkeypatch.setattr(
        shard, "read_recording", lambda ref, *more: written.append(ref.key) or recordings.read_recording(ref, *more)
    )
    build.build(OWN, raw, tmp_path / "out", CPU, shard_size=2)
    assert written == ["r2", "r3"]
    assert contents(folder) == before
    (folder / "own-000000.tar").unlink()
    build.build(OWN, raw, tmp_path / "out", CPU, shard_size=2)
    assert contents(folder) == before


def test_a_build_reads_back_what_it_wrote(raw: Path, tmp_path: Path) -> None:
    """Quick checksums are made of the bytes on the disk, and never of others than those that the manifest promises."""
    out = tmp_path / "out"
    build.build(OWN, raw, out, CPU, shard_size=3)
    store = ShardStore(out, ["own"])
    x = store.read(np.arange(5))
    assert store.tables[0].xxh3 is not None
    assert [digest.tobytes() for digest in store.tables[0].xxh3] == [xxh3_64_digest(row.tobytes()) for row in x]
    row = store.manifest.iloc[1]
    with (out / "own" / row["shard"]).open("r+b") as file:
        file.seek(row["offset"] + 5)
        file.write(b"x")
    with pytest.raises(
        UserError, match=r"own-000000\.tar: r1 is not what was written; remove own-000000\.csv and build"
    ):
        build.build(OWN, raw, out, CPU, shard_size=3)
    (out / "own" / "own-000000.csv").unlink()
    build.build(OWN, raw, out, CPU, shard_size=3)
    assert np.array_equal(ShardStore(out, ["own"], check=True).read(np.arange(5)), x)


def test_killed_build_goes_on(raw: Path, tmp_path: Path) -> None:
    for i in range(7, 400):
        write_record(raw, f"r{i}", make_signal(i, n=1000))
    recipe, out = tmp_path / "own.toml", tmp_path / "killed"
    recipe.write_text("database = 'own'\n")
    command = [
        sys.executable,
        "-m",
        "ecgmatch_dist",
        "shards",
        "build",
        str(recipe),
        "--raw",
        str(raw),
        "--out",
        str(out),
    ]
    command += ["--preset", "cpu", "--shard-size", "20", "--workers", "2"]
    root = Path(build.__file__).parents[2]
    with subprocess.Popen(command, cwd=root, stderr=subprocess.DEVNULL) as process:
        while not (out / "own/own-000001.csv").exists():
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    folder = out / "own"
    assert not (folder / "dataset.json").exists(), "killed too late for this test"
    before: list[str] = []
    while (now := sorted(os.listdir(folder))) != before:  # the workers notice and end, after the shard that they are at
        before = now
        time.sleep(1)
    assert len(list(folder.glob("own-*.csv"))) < 20, "a worker was left behind, and has built everything"
    finished = {path: path.stat().st_mtime_ns for path in folder.glob("own-*.tar") if path.with_suffix(".csv").exists()}
    for unlucky in (".own-000004.tar.1.partial", ".own-000004.csv.1.tmp"):  # a kill just before either rename
        (folder / unlucky).write_text("half")
    build.build(OWN, raw, out, CPU, shard_size=20)
    assert finished
    assert {path: path.stat().st_mtime_ns for path in finished} == finished
    build.build(OWN, raw, tmp_path / "whole", CPU, shard_size=20)
    assert contents(folder) == contents(tmp_path / "whole/own")


def test_other_settings_or_recordings_are_noticed(raw: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    build.build(OWN, raw, out, CPU, shard_size=2)
    before = contents(out / "own")
    for changes, message in [
        ({"settings": replace(CPU, length=512)}, "length (1024, now 512)"),
        ({"shard_size": 3}, "shard_size (2, now 3)"),
        ({"recipe": replace(OWN, scheme="cinc25")}, "scheme (ecgmatch5, now cinc25)"),
        ({"recipe": replace(OWN, unlabelled="keep")}, "unlabelled (drop, now keep)"),
    ]:
        arguments = {"recipe": OWN, "settings": CPU, "shard_size": 2, **changes}
        with pytest.raises(UserError) as error:
            build.build(raw=raw, out=out, **arguments)  # type: ignore[arg-type]
        assert message in str(error.value)
        assert "another --out, or remove that folder" in str(error.value)
    write_record(raw, "r9", make_signal(9, n=1000))
    with pytest.raises(UserError, match=r"recordings \(7, now 8\)"):
        build.build(OWN, raw, out, CPU, shard_size=2)
    assert contents(out / "own") == before


def test_no_recording_stops_a_build(raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = [("Dx: 426783006", f"Dx: {what}") for what in ("{1}", "{", "{'a': 1", '{"a":' + "[" * 100_000)]
    changes += [("12 100 1000", "12 100 1000000000000"), ("12 100 1000", "12 1000000000000 1000")]
    for number, (old, new) in enumerate(changes):
        header = write_record(raw, f"hostile{number}", make_signal(number, n=1000)).with_suffix(".hea")
        assert old in header.read_text()
        header.write_text(header.read_text().replace(old, new))
    build.build(OWN, raw, tmp_path / "out", CPU, shard_size=20)
    rejects = pd.read_csv(tmp_path / "out/own/rejects.csv", index_col="key")["reason"]
    kinds = [rejects[f"hostile{number}"].partition(":")[0] for number in range(len(changes))]
    assert kinds == ["label", "label", "label", "label", "header", "header"]

    def fault(*_: object) -> None:
        raise ZeroDivisionError("a fault\nthat nobody thought of")

    monkeypatch.setattr(shard, "preprocess", fault)
    with pytest.raises(UserError, match="not one recording could be kept"):
        build.build(OWN, raw, tmp_path / "faults", CPU)
    assert "r0,unexpected: ZeroDivisionError: a fault that nobody" in (tmp_path / "faults/own/rejects.csv").read_text()


def test_strict_stops_at_the_first_bad_recording(raw: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"r4\.hea: cut short: r4\.mat holds 82 of 1000 samples"):
        build.build(OWN, raw, tmp_path / "out", CPU, strict=True)
    assert not list((tmp_path / "out/own").glob("*.tar"))
    assert not list((tmp_path / "out/own").glob(".*.partial"))
    (raw / "r4.hea").unlink()
    with pytest.raises(UserError, match=r"^no recording is CD, STT, Other \(--strict\)"):  # no class is no fault
        build.build(OWN, raw, tmp_path / "other", CPU, strict=True)
    assert len(read_manifest(tmp_path / "other/own")) == 5


def test_no_space_left(raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = 0

    class Full(wds.TarWriter):  # type: ignore[misc]
        def write(self, sample: dict[str, object]) -> int:
            nonlocal written
            written += 1
            if written > 6:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return int(super().write(sample))

    monkeypatch.setattr(shard.wds, "TarWriter", Full)
    with pytest.raises(UserError, match="no space left") as error:
        build.build(OWN, raw, tmp_path / "out", CPU, shard_size=2)
    assert "\n" not in str(error.value)
    folder = tmp_path / "out/own"
    assert sorted(p.name for p in folder.iterdir() if p.name != ".lock") == [
        "build.json",
        "own-000000.csv",
        "own-000000.tar",
    ]
    monkeypatch.undo()
    build.build(OWN, raw, tmp_path / "out", CPU, shard_size=2)
    build.build(OWN, raw, tmp_path / "whole", CPU, shard_size=2)
    assert contents(folder) == contents(tmp_path / "whole/own")


def test_labels_from_a_table(raw: Path, tmp_path: Path) -> None:
    table = tmp_path / "labels.csv"
    table.write_text(f'record,dx,patient\nr0,{FIBRILLATION},p1\nr1,"{SINUS}",p1\nr5,{SINUS},p2\n')
    manifest = build.build(OWN, raw, tmp_path / "out", CPU, labels=table)
    assert manifest[["key", "labels", "patient"]].to_numpy().tolist() == [
        ["r0", "Rhythm", "p1"], ["r1", "Normal", "p1"], ["r5", "Normal", "p2"],
    ]  # fmt: skip
    assert "no label: not in the table of labels" in (tmp_path / "out/own/rejects.csv").read_text()
    table.write_text("record,dx\nHR1,1\n")
    with pytest.raises(UserError, match="none of the 7 recordings: it names HR1, the recordings are named r0"):
        build.build(OWN, raw, tmp_path / "other", CPU, labels=table)


def test_unlabelled_recordings_can_be_kept(raw: Path, tmp_path: Path) -> None:
    manifest = build.build(replace(OWN, unlabelled="keep"), raw, tmp_path / "out", CPU)
    assert manifest["labels"][manifest["key"] == "r5"].tolist() == [""]


def test_release_of_ptbxl(tmp_path: Path) -> None:
    raw = tmp_path / "ptb-xl"
    for i in (1, 2, 3):
        write_record(raw / "records500/00000", f"{i:05}_hr", make_signal(i, n=1000), codes="")
        write_record(raw / "records100/00000", f"{i:05}_lr", make_signal(i, n=200), codes="")
    (raw / "scp_statements.csv").write_text(",description,diagnostic_class\nIMI,x,MI\nNORM,x,NORM\nSR,x,\n")
    (raw / "ptbxl_database.csv").write_text(
        "ecg_id,patient_id,age,sex,scp_codes,strat_fold,filename_lr,filename_hr\n"
        "1,15709.0,56.0,1,\"{'NORM': 100.0, 'SR': 0.0}\",3,records100/00000/00001_lr,records500/00000/00001_hr\n"
        "2,13243.0,300.0,0,\"{'IMI': 50.0, 'CLBBB': 100.0}\",2,records100/00000/00002_lr,records500/00000/00002_hr\n"
        "3,20372.0,37.0,1,\"{'SR': 0.0}\",5,records100/00000/00003_lr,records500/00000/00003_hr\n"
    )
    manifest = build.build(load_recipe("ptbxl_release"), tmp_path, tmp_path / "out", CPU)
    assert manifest[["key", "labels", "patient", "age", "sex"]].to_numpy().tolist() == [
        ["00001_hr", "NORM", "15709", "56", "Female"],
        ["00002_hr", "MI CD", "13243", "300", "Male"],
        ["00003_hr", "", "20372", "37", "Female"],
    ]
    with tarfile.open(tmp_path / "out/ptbxl_release/ptbxl_release-000000.tar") as archive:
        assert json.load(archive.extractfile("00002_hr.json"))["fold"] == "2"  # type: ignore[arg-type]


def test_nothing_kept(tmp_path: Path) -> None:
    write_record(tmp_path / "raw", "a", make_signal(n=100), codes="1")
    with pytest.raises(UserError, match=r"not one recording could be kept.*rejects\.csv"):
        build.build(OWN, tmp_path / "raw", tmp_path / "out", CPU)
    assert "no class" in (tmp_path / "out/own/rejects.csv").read_text()


def test_shard_of_which_nothing_is_kept(raw: Path, tmp_path: Path) -> None:
    build.build(OWN, raw, tmp_path / "out", CPU, shard_size=1)
    names = [entry.name for entry in read_dataset(tmp_path / "out/own").shards]
    assert names == [f"own-00000{i}.tar" for i in (0, 1, 2, 3, 6)]
    assert len(list((tmp_path / "out/own").glob("*.tar"))) == 5


def test_two_builds_of_one_folder(raw: Path, tmp_path: Path) -> None:
    with locked(tmp_path / "out/own" / build.LOCK), pytest.raises(UserError, match="another build is running"):
        build.build(OWN, raw, tmp_path / "out", CPU)
    assert len(build.build(OWN, raw, tmp_path / "out", CPU)) == 5


def test_folder_that_cannot_be_written(raw: Path, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    with pytest.raises(UserError, match="out/own: Not a directory"):
        build.build(OWN, raw, tmp_path / "out", CPU)


def test_real_odd_recordings(shared_data: Path, tmp_path: Path) -> None:
    odd = Recipe("odd", unlabelled="keep")  # S0001 has no code of the five classes
    manifest = build.build(odd, shared_data / "wfdb500/odd", tmp_path, PRESETS["paper"]).set_index("key")
    assert list(manifest.index) == ["JS11476", "JS11477", "S0001"]
    assert manifest["flags"]["JS11476"] == "flat:V3"
    assert manifest["flags"]["JS11477"] == " ".join(f"flat:V{i}" for i in range(1, 7))
    assert manifest["flags"]["S0001"] == "resampled cropped"
    assert (tmp_path / "odd/rejects.csv").read_text().splitlines()[1:] == [
        "A5383,cut short: A5383.mat holds 4079 of 9500 samples"
    ]


@pytest.mark.parametrize(("name", "kept"), [("g12ec", None), ("chapman", None), ("ningbo", None), ("ptbxl", 12)])
def test_real_originals(shared_data: Path, tmp_path: Path, name: str, kept: int | None) -> None:
    labels = shared_data / "labels/ptbxl.csv" if name == "ptbxl" else None
    manifest = build.build(load_recipe(name), shared_data / "wfdb500", tmp_path, PRESETS["paper"], labels=labels)
    rejected = (tmp_path / name / "rejects.csv").read_text().splitlines()[1:]
    assert len(manifest) + len(rejected) == 12
    assert all("no class" in line for line in rejected)
    assert set(manifest["rate"]) == {500}
    if name == "ptbxl":
        assert manifest["key"].str.fullmatch("HR[0-9]{5}").all()


def test_command_line(raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*arguments: str) -> None:
        monkeypatch.setattr(sys, "argv", ["ecgmatch", "shards", "build", *arguments])
        cli.main()

    with pytest.raises(SystemExit) as error:
        run("chapman", "--raw", str(tmp_path / "nowhere"), "--out", str(tmp_path / "out"))
    assert error.value.code == (
        f"ecgmatch: {tmp_path}/nowhere: no such folder; --raw is the folder of the recordings of chapman"
    )
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit, match="no recordings"):
        run("chapman", "--raw", str(tmp_path / "empty"), "--out", str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()
    with pytest.raises(SystemExit, match="rate 0, length 6144"):
        run("chapman", "--raw", str(raw), "--out", str(tmp_path / "out"), "--rate", "0")
    with pytest.raises(SystemExit, match="at least 1 and 0"):
        run("chapman", "--raw", str(raw), "--out", str(tmp_path / "out"), "--shard-size", "0")
    run(
        "chapman",
        "--raw",
        str(raw),
        "--out",
        str(tmp_path / "out"),
        "--preset",
        "cpu",
        "--rate",
        "125",
        "--workers",
        "1",
    )
    assert read_dataset(tmp_path / "out/chapman").rate == 125
