"""`ecgmatch predict`: folders, lists, bad files, tables that can be continued, pages."""

import csv
import json
import re
import warnings
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from ecgmatch_dist.data.preprocess import LEADS
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.predict import command, table
from ecgmatch_dist.predict.model import Predictor
from ecgmatch_dist.predict.read import Reader, RecordRef, lead_names
from ecgmatch_dist.predict.result import Failure
from tests.support.formats import as_dicom
from tests.support.prediction import CLASSES, ecg, write_model, write_record


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "run")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Six records, one of them damaged, one of zeros, names with a blank and a dot; and files that are no ECGs."""
    folder = tmp_path / "new"
    for seed, name in enumerate(("a", "b c", "d.e", "sub/f")):
        write_record((folder / name).parent, Path(name).name, ecg(seed=seed))
    header = write_record(folder, "cut", ecg())
    header.with_suffix(".dat").write_bytes(header.with_suffix(".dat").read_bytes()[:1000])
    write_record(folder, "zeros", np.zeros((12, 5000)))
    (folder / "labels.csv").write_text("record,code\na,1\n")
    (folder / "README").write_text("hello")
    return folder


def read_csv(path: Path) -> dict[str, dict[str, str]]:
    return {Path(row["path"]).name: row for row in csv.DictReader(path.open())}


def test_a_folder_with_bad_files(run: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "predictions.csv"
    with pytest.raises(
        UserError, match=r"2 of 6 recordings could not be predicted; the reasons are in .*predictions\.csv"
    ):
        command.main(run, (str(folder),), out=out)
    rows = read_csv(out)
    assert set(rows) == {"a.hea", "b c.hea", "d.e.hea", "f.hea", "cut.hea", "zeros.hea"}
    assert "cut short" in rows["cut.hea"]["error"]
    assert "no signal" in rows["zeros.hea"]["error"]
    good = rows["d.e.hea"]
    assert good["record"] == "d.e"
    assert good["error"] == ""
    expected = Predictor(run, "cpu").predict(ecg(seed=2), rate=500)
    for name in CLASSES:
        assert float(good[name]) == pytest.approx(expected.probabilities[name], abs=1e-3)  # WFDB has 16 bits
        assert float(good[f"{name}_threshold"]) == expected.thresholds[name]
        assert float(good[f"{name}_calibrated"]) == pytest.approx(expected.calibrated[name], abs=1e-3)
    assert len(capsys.readouterr().out.splitlines()) < 5
    with pytest.raises(UserError, match="exists already"):
        command.main(run, (str(folder),), out=out)


def test_the_table_is_continued(run: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """After a kill in the middle of a line, with the rows that were there; and the same in every format."""
    out = tmp_path / "p.jsonl"
    names = [str(folder / name) for name in ("a.hea", "b c.hea", "d.e.hea")]
    command.main(run, tuple(names), out=out)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["path"] for row in rows] == names
    assert rows[0]["classes"]["CD"].keys() == {"probability", "calibrated", "threshold", "predicted", "likely"}
    about = {"weights": command.checksum(run / "best.safetensors"), "only": True, "nearest": 3}
    about |= {"rate": None, "unit": "", "leads": []}
    marked = rows[0] | {"record": "was there"}
    part = tmp_path / "q.csv.part"
    part.write_text(json.dumps(about) + "\n" + json.dumps(marked) + "\n" + json.dumps(rows[1])[:50])
    command.main(run, tuple(names), out=tmp_path / "q.csv")
    assert "continues after 1 recordings" in capsys.readouterr().out
    found = read_csv(tmp_path / "q.csv")
    assert [row["record"] for row in found.values()] == ["was there", "b c", "d.e"]
    assert not part.exists()
    part.write_text(json.dumps(about | {"weights": "other"}) + "\n")
    (tmp_path / "q.csv").unlink()
    with pytest.raises(UserError, match="another model"):
        command.main(run, tuple(names), out=tmp_path / "q.csv")


def test_two_commands_do_not_write_one_table(run: Path, folder: Path, tmp_path: Path) -> None:
    """Rows were there twice, and the second command ended with an error of the program."""
    out, again = tmp_path / "p.csv", []

    def meanwhile(path: Path) -> str:
        with pytest.raises(UserError, match=r"p\.csv: another command is writing this table; wait for it"):
            command.main(run, (str(folder / "a.hea"),), out=out)
        again.append(path)
        return "0"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table.Table, "flush", meanwhile)
        command.main(run, (str(folder / "a.hea"), str(folder / "b c.hea")), out=out, batch=1)
    assert again
    assert len(read_csv(out)) == 2
    assert not [path for path in tmp_path.iterdir() if path.suffix == ".part"]


def test_nothing_but_the_table_stays(run: Path, folder: Path, tmp_path: Path) -> None:
    out, record = tmp_path / "out" / "p.csv", (str(folder / "a.hea"),)
    with pytest.raises(UserError, match=r"p\.xlsx: a name that ends with"):
        command.main(tmp_path / "no run", record, out=out.with_suffix(".xlsx"))  # said before anything else
    assert not out.parent.exists()
    for words in ("", "exists already"):
        with pytest.raises(UserError, match=words) if words else nullcontext():
            command.main(run, record, out=out)
        assert [path.name for path in out.parent.iterdir()] == ["p.csv"]
    out.unlink()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table.Table, "add", interrupted)
        with pytest.raises(KeyboardInterrupt):
            command.main(run, record, out=out)
    assert sorted(path.name for path in out.parent.iterdir()) == [".p.csv.lock", "p.csv.part"]  # to go on with
    command.main(run, record, out=out)
    assert [path.name for path in out.parent.iterdir()] == ["p.csv"]


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def test_parquet(run: Path, folder: Path, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    with pytest.raises(UserError, match="1 of 2"):
        command.main(run, (str(folder / "cut.hea"), str(folder / "a.hea")), out=tmp_path / "p.parquet")
    rows = parquet.read_table(tmp_path / "p.parquet").to_pylist()
    assert rows[0]["CD"] is None
    assert "cut short" in rows[0]["error"]
    assert 0 < rows[1]["CD"] < 1


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_table_of_failures_has_the_same_columns(run: Path, folder: Path, tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("pyarrow")
    found = []
    for name in ("cut.hea", "a.hea"):
        out = tmp_path / f"{name}{suffix}"
        with suppress(UserError):
            command.main(run, (str(folder / name),), out=out)
        table = pd.read_csv(out) if suffix == ".csv" else pd.read_parquet(out)
        found.append(list(table.columns))
    assert found[0] == found[1]
    assert {"CD", "Normal_calibrated", "Other_threshold", "nearest"} < set(found[0])


def test_processes_read_the_same(run: Path, tmp_path: Path) -> None:
    """More recordings than one process reads alone."""
    signal = ecg(seconds=2)
    for number in range(80):
        write_record(tmp_path / "many", f"r{number:03}", signal / (1 + number))
    model = Predictor(run, "cpu", nearest=0)
    one = [p.record for p in model.predict_files(tmp_path / "many")]  # type: ignore[union-attr]
    two = [p.record for p in model.predict_files(tmp_path / "many", workers=2)]  # type: ignore[union-attr]
    assert one == two == [f"r{number:03}" for number in range(80)]


def test_a_list(run: Path, folder: Path, tmp_path: Path) -> None:
    (folder / "some.txt").write_text("\ufeffa.hea\n\nsub\nnot here.hea\n")  # saved by Notepad
    with pytest.raises(UserError, match="1 of 3"):
        command.main(run, (f"@{folder / 'some.txt'}",), out=tmp_path / "p.csv")
    assert "No such file" in read_csv(tmp_path / "p.csv")["not here.hea"]["error"]


def test_a_folder_of_files_that_do_not_say_their_rate(run: Path, tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    np.savetxt(tmp_path / "new" / "a.csv", ecg().T, delimiter=",")
    with pytest.raises(
        UserError, match=r"no recordings in .*new.*CSV and NPY files in a folder count if .* --rate 500"
    ):
        command.main(run, (str(tmp_path / "new"),))
    (answer,) = Predictor(run, "cpu").predict_files(tmp_path / "new", rate=500, unit="mV", leads=LEADS)
    assert answer.error == ""


def test_what_is_printed(run: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command.main(run, (str(folder / "a.hea"),))
    out = capsys.readouterr().out
    assert "Conduction" in out
    assert re.search("F2 threshold +┃ answer", out)
    assert "most like chapman/" in out
    assert out.endswith("few cases are missed. For research; not a medical device.\n")
    with pytest.raises(UserError, match="1 of 1"):
        command.main(run, (str(folder / "cut.hea"),))
    assert "likely:" not in capsys.readouterr().out  # nothing was predicted, there is nothing to explain
    with pytest.raises(UserError, match="1 of 2"):
        command.main(run, (str(folder / "cut.hea"), str(folder / "a")))  # the bad one first, the other without suffix
    assert "Conduction" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"--out predictions\.csv"):
        command.main(run, tuple(f"r{i}.hea" for i in range(11)))
    with pytest.raises(UserError, match=r"\.csv, \.jsonl, \.parquet; pages with pictures: --pages"):
        table.writer_of(Path("prediction"))


def test_arrays_in_files(run: Path, tmp_path: Path) -> None:
    """CSV and NPY ask for what they do not say."""
    np.save(tmp_path / "x.npy", ecg())
    with pytest.raises(
        UserError, match=r"^1 of 1 .*asked.csv; what CSV, NPY and HDF5 files do not say: --rate 500 --unit mV"
    ):
        command.main(run, (str(tmp_path / "x.npy"),), out=tmp_path / "asked.csv")
    assert "does not name its 12 leads" in read_csv(tmp_path / "asked.csv")["x.npy"]["error"]
    leads = "I,II,III,aVR,aVL,aVF,V1,V2,V3,V4,V5,V6"
    command.main(run, (str(tmp_path / "x.npy"),), out=tmp_path / "p.csv", rate=500, unit="mV", leads=leads)
    found = read_csv(tmp_path / "p.csv")["x.npy"]
    assert float(found["CD"]) == pytest.approx(
        Predictor(run, "cpu").predict(ecg(), rate=500).probabilities["CD"], abs=1e-6
    )


def test_remedies_are_options_of_the_command(run: Path, tmp_path: Path) -> None:
    np.savetxt(tmp_path / "x.csv", ecg().T, delimiter=",")

    def told(**options: Any) -> str:
        (tmp_path / "p.csv").unlink(missing_ok=True)
        with pytest.raises(UserError):
            command.main(run, (str(tmp_path / "x.csv"),), out=tmp_path / "p.csv", **options)
        return str(read_csv(tmp_path / "p.csv")["x.csv"]["error"])

    assert told() == (
        "leads: the file does not name its 12 leads or say its sampling rate or its unit; name them "
        "(--leads 'I II III aVR aVL aVF V1 V2 V3 V4 V5 V6', --rate 500, --unit mV or --unit uV)"
    )
    names = " ".join(LEADS)
    assert told(leads=names) == (
        "rate: the file does not say its sampling rate or its unit; name them (--rate 500, --unit mV or --unit uV)"
    )
    assert "does not say its sampling rate; name " in told(leads=names, unit="mV")
    (answer,) = Predictor(run, "cpu").predict_files(tmp_path / "x.csv", leads=LEADS)
    assert answer.error.endswith('say its sampling rate or its unit; name them (rate = 500, unit = "mV" or "uV")')


def test_a_file_that_is_not_there_is_told_as_missing(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match=r"^1 of 1 recordings could not be predicted$"):
        command.main(run, (str(tmp_path / "nowhere.csv"),))
    assert "".join(capsys.readouterr().out.split("\n")) == f"{tmp_path}/nowhere.csv: No such file"


def test_a_path_that_cannot_even_be_looked_for_is_a_row(run: Path, tmp_path: Path) -> None:
    """A name that is too long; a disk that is gone raises alike."""
    answer = Reader(Predictor(run, "cpu").inputs)(RecordRef("x", tmp_path / f"{'a' * 300}.hea"))
    assert isinstance(answer, Failure)
    assert answer.error == "No such file"


def test_a_name_that_is_no_lead_is_refused(run: Path, tmp_path: Path) -> None:
    """That lead would be a flat line. A column of something else has a mark."""
    np.save(tmp_path / "x.npy", np.concatenate([ecg(), ecg()[:1]]))
    says = {"rate": 500.0, "unit": "mV"}
    names = " ".join(LEADS)
    with pytest.raises(UserError, match=r"^leads: W6 is none of I II .* V6, nor - for .*; did you mean V6\?$"):
        command.main(run, (str(tmp_path / "x.npy"),), leads=f"{names} -".replace("V6", "W6"), **says)  # type: ignore[arg-type]
    command.main(run, (str(tmp_path / "x.npy"),), out=tmp_path / "p.csv", leads=f"{names}, -", **says)  # type: ignore[arg-type]
    found = read_csv(tmp_path / "p.csv")["x.npy"]
    expected = Predictor(run, "cpu").predict(ecg(), rate=500).probabilities["CD"]
    assert float(found["CD"]) == pytest.approx(expected, abs=1e-6)
    assert lead_names("DI,avr  LEAD_V6") == ("DI", "avr", "LEAD_V6")


def test_a_damaged_file_is_a_row_and_nothing_on_the_screen(run: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.dcm"
    as_dicom(path, ecg())
    path.write_bytes(path.read_bytes().replace(b"1.2.840.10008.1.2.1", b"1.2.840.10008.1.2.\xd7"))  # pydicom warns
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        answer = Reader(Predictor(run, "cpu").inputs)(RecordRef("x", path))
    assert answer.path == str(path)
    assert not told
