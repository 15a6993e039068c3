"""Recordings of every format give the same twelve leads. Files are written by other libraries where there are any."""

import bz2
import gzip
import lzma
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import edfio
import numpy as np
import pandas as pd
import pydicom
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydicom.data import get_testdata_file

from ecgmatch_dist.data.formats.leads import LEADS, lead_of, millivolts
from ecgmatch_dist.data.formats.read import find, format_of, from_array, read
from ecgmatch_dist.data.formats.recording import Recording, RecordRef, Rejected, known_patient
from ecgmatch_dist.errors import UserError
from tests.support.formats import ALL, OTHER, RATE, WRITERS, as_edf, as_hdf5, as_npy, as_scp, related
from tests.support.recordings import write_record


@pytest.fixture(scope="module")
def x() -> np.ndarray:
    return related()


biosig = pytest.mark.skipif(shutil.which("save2aecg") is None, reason="BioSig is not installed (Debian: biosig-tools)")


@pytest.mark.parametrize("name", WRITERS)
def test_every_format_gives_the_same_leads(tmp_path: Path, x: np.ndarray, name: str) -> None:
    write, named = WRITERS[name]
    write(tmp_path / name, x)
    recording = read(tmp_path / name, **named)  # type: ignore[arg-type]
    assert (recording.key, recording.rate, recording.signal.dtype) == (name[:-4], RATE, np.float32)
    np.testing.assert_allclose(recording.signal, x, atol=3e-3)
    derived = ("derived:III", "derived:aVR", "derived:aVL", "derived:aVF")
    assert recording.flags == (derived if name == "muse.xml" else ())
    assert recording.patient == ("P-7" if name in ("ecg.edf", "muse.xml", "ecg.scp") else "")


@pytest.mark.parametrize(
    "text",
    ["", "X", "0", "00000", "***", "ANON", "Anonymous", "Anonymized Patient", "Anonymisé", "DE-IDENTIFIED", "N/A"],
)
def test_a_patient_that_was_made_anonymous_is_nobody(text: str) -> None:
    assert known_patient(text) == ""


def test_an_archive_of_anonymous_files_is_not_of_one_patient(tmp_path: Path, x: np.ndarray) -> None:
    """Else it could not be split."""
    as_edf(tmp_path / "ecg.edf", x, patient="ANON")
    assert read(tmp_path / "ecg.edf").patient == ""


@pytest.mark.parametrize(
    "text", ["P-7", "007", "x12", "10", "Nonenmacher", "na-12", "A0", "ANONYM001", "anonymous_0042"]
)
def test_a_patients_number_is_kept(text: str) -> None:
    assert known_patient(text) == text


@biosig
def test_another_library_reads_our_scp_file_alike(tmp_path: Path, x: np.ndarray) -> None:
    as_scp(tmp_path / "ecg.scp", x)
    subprocess.run(["save2gdf", "-f=EDF", "ecg.scp", "ecg.edf"], cwd=tmp_path, check=True, capture_output=True)
    signals = edfio.read_edf(tmp_path / "ecg.edf").signals
    assert tuple(signal.label for signal in signals) == LEADS
    np.testing.assert_allclose([signal.data / 1000 for signal in signals], read(tmp_path / "ecg.scp").signal, atol=1e-4)


@biosig
def test_aecg_of_another_library(tmp_path: Path, x: np.ndarray) -> None:
    rows = zip(1000 * x, LEADS, strict=True)
    edfio.Edf([edfio.EdfSignal(row, RATE, label=lead, physical_dimension="uV") for row, lead in rows]).write(
        tmp_path / "ecg.edf"
    )
    subprocess.run(["save2aecg", "ecg.edf", "ecg.xml"], cwd=tmp_path, check=True, capture_output=True)
    recording = read(tmp_path / "ecg.xml")
    assert recording.rate == RATE
    np.testing.assert_allclose(recording.signal, x, atol=2e-3)


def test_hdf5_as_in_code15(tmp_path: Path, x: np.ndarray) -> None:
    as_hdf5(tmp_path / "part0.hdf5", x)
    refs = list(find(tmp_path))
    assert [ref.key for ref in refs] == ["77", "88"]
    np.testing.assert_allclose(read(refs[0], **ALL).signal, x, rtol=1e-6)  # type: ignore[arg-type]
    np.testing.assert_allclose(read(refs[1], rate=400, unit="1e-4 V", leads=LEADS).signal, 0.2 * x, rtol=1e-5)
    empty = RecordRef("0", refs[0].path, 2)
    assert refused(lambda: read(empty, **ALL)) == "no signal: all samples are zero"  # type: ignore[arg-type]


def test_dicom_against_pydicom() -> None:
    path = get_testdata_file("waveform_ecg.dcm")
    recording = read(path)
    group = pydicom.dcmread(path).waveform_array(0)  # in uV
    assert (recording.rate, recording.sex, recording.flags) == (1000, "Female", ())
    np.testing.assert_allclose(recording.signal, group.T / 1000, atol=1e-4)


def test_wfdb_by_any_of_its_names(tmp_path: Path, x: np.ndarray) -> None:
    write_record(tmp_path, "r1", x, rate=RATE)
    shutil.copy(tmp_path / "r1.hea", tmp_path / "Ward 3.1.hea")  # WFDB forbids such names, people's disks do not
    for name in ("r1.hea", "r1.dat", "r1", "Ward 3.1.hea", "Ward 3.1"):
        recording = read(tmp_path / name)
        assert (recording.key, recording.codes) == ("Ward 3.1" if "W" in name else "r1", ("426783006",))
        np.testing.assert_allclose(recording.signal, x, atol=6e-4)


def test_an_edf_file_that_is_cut_short(tmp_path: Path, x: np.ndarray) -> None:
    as_edf(tmp_path / "a.edf", x)
    (tmp_path / "a.edf").write_bytes((tmp_path / "a.edf").read_bytes()[:-500])
    assert refused(lambda: read(tmp_path / "a.edf")).startswith("cut short: ")
    whole = (tmp_path / "a.edf").read_bytes()
    for size in (0, 8, 100, 256, 300, 2000, 3500):  # inside the header
        (tmp_path / "a.edf").write_bytes(whole[:size])
        reason = refused(lambda: read(tmp_path / "a.edf"))
        known = (
            rf"cut short: the file ends before .*|unreadable: not an EDF file, or damaged, or cut after {size:,} bytes"
        )
        assert re.fullmatch(known, reason), reason  # and no words of the library


@pytest.mark.parametrize("name", ["letter.xml", "letter.dcm", "letter.scp"])
def test_a_file_that_only_has_the_suffix_of_an_ecg(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("<letter>Dear colleague</letter>")
    assert refused(lambda: read(tmp_path / name)).startswith("format: no ECG in it, or one of a kind that is not read")


def test_content_decides_where_the_suffix_does_not(tmp_path: Path, x: np.ndarray) -> None:
    for name, (write, named) in WRITERS.items():
        write(tmp_path / name, x)
        if name.endswith("csv"):
            continue
        plain = (tmp_path / name).rename(tmp_path / name.replace(".", "_"))
        np.testing.assert_allclose(read(plain, **named).signal, x, atol=3e-3)  # type: ignore[arg-type]
    (tmp_path / "letter").write_text("Dear colleague,")
    assert refused(lambda: read(tmp_path / "letter")).startswith("format: not one of wfdb, csv")


@pytest.mark.parametrize("kind", ["zip", "gzip", "bzip2", "xz", "tar", "PDF"])
def test_what_people_have_instead_of_a_recording_gets_a_remedy(tmp_path: Path, kind: str) -> None:
    path, content = tmp_path / "ecg.packed", tmp_path / "ecg.csv"
    content.write_text("1,2,3")
    packers = {"gzip": gzip.compress, "bzip2": bz2.compress, "xz": lzma.compress}
    if kind in ("zip", "tar"):
        Path(shutil.make_archive(str(tmp_path / "ecg"), kind, tmp_path, content.name)).rename(path)
    else:
        path.write_bytes(packers[kind](content.read_bytes()) if kind in packers else b"%PDF-1.7")
    remedy = "is a picture; export the signal itself" if kind == "PDF" else "is packed; unpack it first"
    assert refused(lambda: read(path)).startswith(f"format: a {kind} file, which {remedy}")


@pytest.mark.parametrize(
    ("name", "lead"),
    [
        ("Lead I", "I"), ("MDC_ECG_LEAD_AVR", "aVR"), ("AVL", "aVL"), ("LEAD_II", "II"), ("ECG V1", "V1"), ("ekg-iii", "III"),
        ("DII", "II"), ("C4", "V4"), ("Lead I (Einthoven)", "I"), ("v6", "V6"), ("Ableitung aVF", "aVF"),
        ("-aVR", None), ("ECG -aVR", None), ("MLII", None), ("V7", None), ("V4R", None), ("Resp", None), ("IV", None),
        ("", None),
    ],
)  # fmt: skip
def test_names_of_leads(name: str, lead: str | None) -> None:
    assert lead_of(name) == lead


@pytest.mark.parametrize(
    ("unit", "factor"), [("mV", 1), ("uV", 1e-3), ("µV", 1e-3), ("V", 1e3), ("1e-4V", 0.1), ("4.88 uV", 4.88e-3)]
)
def test_units(unit: str, factor: float) -> None:
    assert millivolts(unit) == pytest.approx(factor)


def test_leads_that_are_missing(x: np.ndarray) -> None:
    eight = [0, 1, 6, 7, 8, 9, 10, 11]
    full = from_array(x[eight], rate=RATE, unit="mV", leads=[LEADS[v] for v in eight])
    np.testing.assert_allclose(full.signal, x, atol=1e-6)
    some = from_array(x[[1, 6, 7]].T, rate=RATE, unit="mV", leads=["II", "V1", "V2"])
    assert some.flags == tuple(f"missing:{lead}" for lead in LEADS if lead not in ("II", "V1", "V2"))
    np.testing.assert_allclose(some.signal[1], x[1], atol=1e-6)
    assert not some.signal[0].any()
    assert refused(lambda: from_array(x[:1], rate=RATE, unit="mV", leads=["I"])).startswith("leads: II III")
    dead = np.concatenate([x[:1], np.zeros((11, 500))])
    assert refused(lambda: from_array(dead, rate=RATE, unit="mV", leads=LEADS)).startswith("no signal: 1 of 12")


def test_a_wrong_unit_is_told(x: np.ndarray) -> None:
    assert from_array(1000 * x, rate=RATE, unit="mV", leads=LEADS).flags == ("unit?",)
    assert from_array(x, rate=RATE, unit="uV", leads=LEADS).flags == ("unit?",)
    damaged = x.copy()
    damaged[3, 7] = 1e37
    assert refused(lambda: from_array(damaged, rate=RATE, unit="mV", leads=LEADS)) == (
        "no signal: values up to 1e+37 mV: the file is damaged"
    )


def test_lead_map(tmp_path: Path, x: np.ndarray) -> None:
    names = [f"Kanal {v}" for v in range(1, 13)]
    pd.DataFrame(x.T, columns=names).to_csv(tmp_path / "k.csv", index=False)
    mapped = read(tmp_path / "k.csv", rate=RATE, unit="mV", lead_map=dict(zip(names, LEADS, strict=True)))
    np.testing.assert_allclose(mapped.signal, x, atol=1e-6)
    assert "(Kanal 1, Kanal 2" in refused(lambda: read(tmp_path / "k.csv", rate=RATE, unit="mV"))
    with pytest.raises(UserError, match='lead_map: "a" -> "VX"'):
        read(tmp_path / "k.csv", lead_map={"a": "VX"})


def test_what_a_file_does_not_say_is_asked_for(tmp_path: Path, x: np.ndarray) -> None:
    as_npy(tmp_path / "a.npy", x)
    path = tmp_path / "a.npy"
    everything = refused(lambda: read(path))
    assert everything.startswith(
        "leads: the file does not name its 12 leads or say its sampling rate or say its unit; name them ("
    )
    assert everything.endswith('"V6"], rate = 500, unit = "mV" or "uV")')
    (tmp_path / "b.csv").write_text("\n".join(["time,I,II", *(f"{i / 100},{i},{-i}" for i in range(9))]))
    assert refused(lambda: read(tmp_path / "b.csv")) == (
        'units: the file does not say its unit; name it (unit = "mV" or "uV")'
    )
    assert 'unit = "mV"' in refused(lambda: read(path, leads=LEADS))
    assert "rate = 500" in refused(lambda: read(path, leads=LEADS, unit="uV"))
    assert "`leads` names 8" in refused(lambda: read(path, leads=LEADS[:8], unit="uV", rate=500))
    with pytest.raises(UserError, match="mmHg"):
        read(path, unit="mmHg")


def refused(call: Callable[[], Recording]) -> str:
    with pytest.raises(Rejected) as caught:
        call()
    return str(caught.value)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_broken_files_are_refused_without_a_traceback(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory, x: np.ndarray
) -> None:
    name = data.draw(st.sampled_from([*WRITERS, *OTHER]))
    folder = tmp_path_factory.mktemp("broken")
    path = folder / name
    (OTHER[name] if name in OTHER else WRITERS[name][0])(path, x)
    content = bytearray(path.read_bytes())
    for place in data.draw(st.lists(st.integers(0, min(len(content), 4000) - 1), max_size=20)):
        content[place] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    for ref in find(path):
        try:
            recording = read(ref, **ALL)  # type: ignore[arg-type]
        except Rejected:
            continue
        assert recording.signal.shape[0] == 12
    assert format_of(path).name
