import os
import shutil
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import wfdb
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ecgmatch_dist.data.annotations import Annotation, check_statements, parse_codes, read_annotations
from ecgmatch_dist.data.databases import LabelSource, Recipe, load_recipe
from ecgmatch_dist.data.labels import load_scheme
from ecgmatch_dist.data.recordings import RecordRef, Rejected, find_records, read_recording
from ecgmatch_dist.errors import UserError
from tests.support.recordings import LEADS, make_signal, write_record

OWN = Recipe("own")


def read(path: Path):  # type: ignore[no-untyped-def]
    return read_recording(RecordRef(path.name, path))


def rejection(path: Path) -> Rejected:
    with pytest.raises(Rejected) as caught:
        read(path)
    return caught.value


@pytest.mark.parametrize("old", [True, False])
def test_both_header_styles(tmp_path: Path, old: bool) -> None:
    x = make_signal(n=300)
    recording = read(write_record(tmp_path, "r1", x, codes="164889003,59118001", old=old))
    np.testing.assert_allclose(recording.signal, x, atol=6e-4)
    assert recording.signal.dtype == np.float32
    assert (recording.codes, recording.age, recording.sex) == (("164889003", "59118001"), "61", "Female")
    assert recording.rate == 100


def test_leads_in_any_case_and_order(tmp_path: Path) -> None:
    x, order = make_signal(n=100), np.random.default_rng(1).permutation(12)
    leads = tuple(LEADS[v].upper() if v % 2 else LEADS[v].lower() for v in order)
    path = write_record(tmp_path, "r1", x[order], leads=leads)
    np.testing.assert_allclose(read(path).signal, x, atol=6e-4)
    with_more = write_record(tmp_path, "r2", np.concatenate([x, x[:2]]), leads=(*LEADS, "vx", "vy"))
    np.testing.assert_allclose(read(with_more).signal, x, atol=6e-4)


@pytest.mark.parametrize(("gain", "baseline"), [(200.0, 100), (1000.0, -5)])
def test_gain_and_baseline(tmp_path: Path, gain: float, baseline: int) -> None:
    x = make_signal(n=100)
    path = write_record(tmp_path, "r1", x, gain=gain, baseline=baseline)
    np.testing.assert_allclose(read(path).signal, x, atol=0.51 / gain)
    np.testing.assert_allclose(read(path).signal, wfdb.rdrecord(str(path)).p_signal.T, atol=1e-6)


def test_units(tmp_path: Path) -> None:
    x = make_signal(n=100)
    microvolts = write_record(tmp_path, "r1", 1000 * x, gain=1.0, units="uV")
    np.testing.assert_allclose(read(microvolts).signal, x, atol=6e-4)
    assert str(rejection(write_record(tmp_path, "r2", x, units="mmHg"))) == "units: mmhg: not a voltage"


def test_equal_to_wfdb_on_real_recordings(shared_data: Path) -> None:
    headers = sorted((shared_data / "wfdb500").glob("*/g1/*.hea")) + sorted(
        (shared_data / "wfdb500/odd").glob("[JS]*.hea")
    )
    assert len(headers) > 40
    for header in headers:
        path = header.with_suffix("")
        reference = wfdb.rdrecord(str(path))
        recording = read(path)
        order = [[name.upper() for name in reference.sig_name].index(lead.upper()) for lead in LEADS]
        np.testing.assert_allclose(recording.signal, reference.p_signal.T[order], atol=1e-5, rtol=1e-6)
        assert recording.rate == reference.fs


@pytest.mark.parametrize("fmt", ["212", "24", "80"])
def test_other_formats_by_wfdb(tmp_path: Path, fmt: str) -> None:
    x = make_signal(n=100).clip(-1, 1)
    gain = 60.0 if fmt == "80" else 1000.0
    wfdb.wrsamp(
        "r1", 100, ["mV"] * 12, list(LEADS), p_signal=x.T, fmt=[fmt] * 12, adc_gain=[gain] * 12, baseline=[0] * 12,
        write_dir=str(tmp_path),
    )  # fmt: skip
    np.testing.assert_allclose(read(tmp_path / "r1").signal, x, atol=0.6 / gain)


def test_missing_values_are_nan(tmp_path: Path) -> None:
    x = make_signal(n=100)
    x[3, 10:20] = np.nan
    path = write_record(tmp_path, "r1", x)
    assert np.array_equal(np.isnan(read(path).signal), np.isnan(x))
    assert np.array_equal(np.isnan(wfdb.rdrecord(str(path)).p_signal.T), np.isnan(x))
    assert rejection(write_record(tmp_path, "r2", np.full((12, 50), np.nan))).kind == "no signal"


def test_bad_recordings_are_rejected_with_the_reason(tmp_path: Path) -> None:
    x = make_signal(n=100)
    assert str(rejection(write_record(tmp_path, "eleven", x[:11], leads=LEADS[:11]))).startswith(
        "leads: V6 missing; there are 11"
    )
    unknown = rejection(write_record(tmp_path, "unknown", x, leads=("MLII", *LEADS[1:])))
    assert str(unknown).startswith("leads: I missing; there are 12: MLII II")
    thirteen = write_record(tmp_path, "twice", make_signal(n=100, leads=13), leads=(*LEADS, "v1"))
    assert str(rejection(thirteen)) == "leads: V1 more than once"

    path = write_record(tmp_path, "cut", x, old=True)
    whole = path.with_suffix(".mat").read_bytes()
    path.with_suffix(".mat").write_bytes(whole[: 24 + 24 * 60 + 5])
    assert str(rejection(path)) == "cut short: cut.mat holds 60 of 100 samples"
    path.with_suffix(".mat").write_bytes(b"")
    assert rejection(path).kind == "cut short"
    path.with_suffix(".mat").unlink()
    assert str(rejection(path)) == f"unreadable: No such file or directory: {path}.mat"
    path.with_suffix(".mat").mkdir()
    assert rejection(path).kind == "unreadable"

    for text in (
        "",
        "# only a comment\n",
        "nonsense\n",
        "r 12 100 10\n",
        "r 0 100 10\n",
        "r/2 12 100 10\nr_1 5\nr_2 5\n",
    ):
        (tmp_path / "header.hea").write_text(text)
        assert rejection(tmp_path / "header").kind == "header", text
    path = write_record(tmp_path, "still", x, rate=0)
    assert str(rejection(path)) == "header: sampling rate 0, 1 to 50,000 Hz are read"
    path = write_record(tmp_path, "two.dots", x)
    with pytest.raises(Rejected, match="letters, digits"):
        read_recording(RecordRef("two.dots", path))


def test_the_cut_file_of_the_real_recordings(shared_data: Path) -> None:
    assert str(rejection(shared_data / "wfdb500/odd/A5383")) == "cut short: A5383.mat holds 4079 of 9500 samples"


def test_headers_of_one_kind_do_not_mix(tmp_path: Path) -> None:
    """Headers are parsed once for each kind: those that differ in gain, order or format are of another kind."""
    x = make_signal(n=100)
    paths = [
        write_record(tmp_path, "a", x),
        write_record(tmp_path, "b", x, gain=500.0),
        write_record(tmp_path, "c", x[::-1], leads=LEADS[::-1]),
        write_record(tmp_path, "d", x, old=True),
        write_record(tmp_path, "e", x, baseline=50),
    ]
    for path in paths + paths:
        np.testing.assert_allclose(read(path).signal, x, atol=2e-3)
    renamed = tmp_path / "renamed"
    shutil.copy(tmp_path / "a.hea", renamed.with_suffix(".hea"))
    np.testing.assert_allclose(read(renamed).signal, x, atol=2e-3)


@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_header_is_read_or_rejected(tmp_path: Path, data: st.DataObject) -> None:
    path = write_record(tmp_path, "r1", make_signal(n=20), old=data.draw(st.booleans()))
    header = bytearray(path.with_suffix(".hea").read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(header) - 1))
        header[start : start + data.draw(st.integers(0, 6))] = data.draw(st.binary(max_size=4) | st.just(b"0"))
    path.with_suffix(".hea").write_bytes(header)
    with suppress(Rejected):
        assert read(path).signal.shape[0] == 12


@pytest.mark.parametrize("folder", ["", "training/georgia/g1", "georgia/g2", "WFDB_Ga", "training/georgia"])
def test_finding_recordings(tmp_path: Path, folder: str) -> None:
    for name in ("E2", "E1"):
        write_record(tmp_path / folder, name, make_signal(n=10))
    refs = find_records(load_recipe("g12ec"), tmp_path)
    assert refs == [RecordRef(name, tmp_path / folder / f"{name}.hea") for name in ("E1", "E2")]


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        find_records(OWN, tmp_path / "nowhere")
    with pytest.raises(UserError, match="no recordings"):
        find_records(OWN, tmp_path)
    write_record(tmp_path / "training/georgia", "E1", make_signal(n=10))
    with pytest.raises(UserError, match="training/chapman_shaoxing"):
        find_records(load_recipe("chapman"), tmp_path)


def test_two_recordings_of_one_name(tmp_path: Path) -> None:
    for folder in ("g1", "g2"):
        write_record(tmp_path / folder, "E1", make_signal(n=10))
    with pytest.raises(UserError) as error:
        find_records(OWN, tmp_path)
    assert f"{tmp_path}/g1/E1.hea and {tmp_path}/g2/E1.hea" in str(error.value)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("12 100 20", "12 100 1000000000000", "header: 1000000000000 samples per lead, at most 2,000,000 are read"),
        ("12 100 20", "12 100 " + "9" * 5000, "samples per lead"),
        ("12 100 20", "9" * 5000 + " 100 20", "leads, at most"),
        ("12 100 20", "12 1000000000000 20", "header: sampling rate 1e+12"),
        ("12 100 20", "12 . 20", "header: sampling rate"),
        ("1000.0(0)", f"1000.0({'9' * 400})", "header: a gain or baseline that is not a finite number"),
        ("r1.dat 16 ", "r1.dat 16x1000000000 ", "header: frames and skews of 20000000000 samples"),
        ("r1.dat 16 ", "r1.dat 16:1000000000 ", "header: frames and skews of 1000000020 samples"),
        ("r1.dat 16 ", f"r1.dat 16+{10**30} ", "cut short"),
        ("r1.dat", "/etc/passwd", "header: invalid syntax in signal line"),
        ("r1.dat", "../r1.dat", "header: invalid syntax in signal line"),
        ("Dx: 426783006", "Dx: {1}", "label: codes `{1}`: give codes separated by commas"),
        ("Dx: 426783006", "Dx: {", "label: codes `{`"),
        ("Dx: 426783006", "Dx: {'a': 1", "label: codes `{'a': 1`"),
        ("Dx: 426783006", 'Dx: {"a":' + "[" * 100_000, "label: codes"),
        ("Dx: 426783006", "x" * 2**21, "header: 2,097"),
    ],
)
def test_a_header_that_claims_too_much_is_rejected_before_memory_is_asked_for(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    header = write_record(tmp_path, "r1", make_signal(n=20)).with_suffix(".hea")
    text = header.read_text()
    assert old in text
    header.write_text(text.replace(old, new))
    assert message in str(rejection(tmp_path / "r1"))


def test_pipes_and_devices_are_not_read(tmp_path: Path) -> None:
    path = write_record(tmp_path, "r1", make_signal(n=20))
    for suffix in (".dat", ".hea"):
        path.with_suffix(suffix).unlink()
        os.mkfifo(path.with_suffix(suffix))
        assert f"unreadable: r1{suffix} is not a regular file" in str(rejection(path))


def test_codes_never_hold_what_would_break_a_table() -> None:
    assert parse_codes("1\x00,2\x1b[31m") == ("1\\x00", "2\\x1b[31m")
    assert parse_codes("{'left bundle': 1, '': 2, 'a\\u0000b': 3}") == ("left_bundle", "a\\x00b")
    assert parse_codes("=1+1 @x -2 -cmd") == ("'=1+1", "'@x", "-2", "'-cmd"), "no formula for a spreadsheet"


def test_codes() -> None:
    assert parse_codes(" 1,2 3;4 ") == ("1", "2", "3", "4")
    assert parse_codes("Unknown") == parse_codes("") == ()
    assert parse_codes("{'NORM': 100.0, 'LAO/LAE': 0.0}") == ("NORM", "LAO/LAE")
    with pytest.raises(UserError, match="likelihood"):
        parse_codes("{'NORM': open('x')}")


def test_table_of_labels(tmp_path: Path) -> None:
    table = tmp_path / "labels.csv"
    table.write_text('name,dx,who,age,sex\nx/00431_hr.hea,"1,2",17.0,56.0,0\n00432_hr,,18,nan,1\n')
    source = LabelSource("csv", record="name", patient="who", sex_values={"0": "Male", "1": "Female"})
    notes = read_annotations(load_recipe("ptbxl"), source, table)
    assert list(notes) == ["HR00431", "HR00432"]
    assert (notes["HR00431"].codes, notes["HR00431"].patient, notes["HR00431"].age) == (("1", "2"), "17", "56")
    assert (notes["HR00432"].codes, notes["HR00432"].age, notes["HR00432"].sex) == ((), "", "Female")

    path = write_record(tmp_path, "HR00431", make_signal(n=10), codes="9")
    assert read_recording(RecordRef("HR00431", path), notes).codes == ("1", "2"), "the table, not the header"
    with pytest.raises(Rejected, match="no label"):
        read_recording(RecordRef("HR1", path), notes)

    table.write_text("record,dx,age\na,1,50\na,2,\n")
    assert read_annotations(OWN, LabelSource("csv"), table) == {"a": Annotation(("1", "2"), age="50")}
    table.write_text("record,dx,age\na,1,50\na,2,51\n")
    with pytest.raises(UserError, match="line 3: a has rows with age 50 and 51"):
        read_annotations(OWN, LabelSource("csv"), table)
    table.write_text("record,codes\na,1\n")
    with pytest.raises(UserError, match="no column `dx`; there are record, codes"):
        read_annotations(OWN, LabelSource("csv"), table)
    with pytest.raises(UserError, match="cannot be read"):
        read_annotations(OWN, LabelSource("csv"), tmp_path / "nowhere.csv")


def test_statements_of_ptbxl(tmp_path: Path) -> None:
    file, scheme = tmp_path / "scp_statements.csv", load_scheme("ptbxl_super")
    file.write_text(",description,diagnostic_class\nNDT,x,STTC\nLAO/LAE,x,HYP\nSR,sinus rhythm,\n")
    check_statements(scheme, file)
    file.write_text(",description,diagnostic_class\nNDT,x,STTC\n\nSR\nOTHER,\xdf,\n", encoding="latin-1")
    check_statements(scheme, file)  # an empty line, a short one, another encoding: edited and saved
    file.write_text(",description,diagnostic_class\nNDT,x,MI\n")
    with pytest.raises(UserError, match="NDT is of class MI"):
        check_statements(scheme, file)
