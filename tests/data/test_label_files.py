"""Label files as people have them, and what is told when they do not fit."""

from pathlib import Path

import pytest

from ecgmatch_dist.data.annotations import read_annotations
from ecgmatch_dist.data.databases import LabelSource, Recipe
from ecgmatch_dist.data.label_file import read_label_file, read_names
from ecgmatch_dist.data.label_table import read_table
from ecgmatch_dist.data.labels import LabelScheme, load_scheme
from ecgmatch_dist.data.split_file import Split
from ecgmatch_dist.data.splits import split_shards
from ecgmatch_dist.errors import UserError
from tests.support.shard_factory import CODES, make_shards, random_codes

IDS = ("own/e1", "own/e2", "own/e3", "own/e4")
SCHEME = """
name = "own"
class = [
  { name = "Atrial fibrillation", short = "AF", codes = ["164889003", "I48.9"] },
  { name = "Right bundle branch block", short = "RBBB", codes = ["59118001"] },
  { name = "ST changes", short = "ST", codes = ["ST depression"] },
]
"""


@pytest.fixture
def scheme(tmp_path: Path) -> LabelScheme:
    (tmp_path / "own.toml").write_text(SCHEME)
    return load_scheme(str(tmp_path / "own.toml"))


EXPECTED = {"e1": "AF RBBB", "e2": "ST_depression", "e3": "none"}


@pytest.mark.parametrize(
    "content",
    [
        "record,dx\ne1,AF|RBBB\ne2,ST depression\ne3,none\ne4,\n",
        "Recording;Diagnosis\ne1;AF, RBBB\ne2;ST depression\ne3;none\ne4;\n",
        "file\tdiagnosis\nx/e1.hea\tAF;RBBB\nx/e2.hea\tST  depression\ny/e3.dat\tnone\n",
        "sep=;\nrecord;dx\ne1;AF|RBBB\ne2;ST depression\ne3;none\n",
        "record,dx\ne1,AF\ne2,ST depression\ne1,RBBB\ne3,none\ne3,\n",
        "id,age,what the reader wrote\nown/e1,61,AF RBBB\nown/e2,62,ST depression\nown/e3,63,none\n",
        'record|dx\ne1|"AF,RBBB"\ne2|ST depression\ne3|none\n',
        "\n".join(["record,dx", 'e1,"AF\nRBBB"', "e2,ST depression", "e3,none"]),
    ],
    ids=["comma", "semicolon", "tab", "excel's hint", "rows", "by content", "bar", "line break"],
)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "cp1252"])
def test_separators_and_encodings(tmp_path: Path, scheme: LabelScheme, content: str, encoding: str) -> None:
    file = tmp_path / "labels.csv"
    file.write_bytes(content.replace("\n", "\r\n").encode(encoding))
    found = read_label_file(file, IDS, scheme)
    assert found.codes == {"own": EXPECTED}
    assert found.strangers == ()


NUMBERS = tuple(f"own/{number}" for number in range(1, 21))


def test_a_number_of_a_patient_is_no_recording(tmp_path: Path, scheme: LabelScheme) -> None:
    """Files 1 to 20 of ten patients: both columns hold numbers that are names of files."""
    file = tmp_path / "labels.csv"
    file.write_text("patient_id,filename,dx\n" + "".join(f"{i // 2 + 1},{i},AF\n" for i in range(1, 21)))
    found = read_label_file(file, NUMBERS, scheme)
    assert len(found.codes["own"]) == 20
    assert found.patients["own/20"] == "11"
    assert found.columns == "labels.csv: recordings in the column filename, labels in dx, patients in patient_id"


def test_a_column_that_names_few_recordings_many_times_is_none(tmp_path: Path, scheme: LabelScheme) -> None:
    file = tmp_path / "labels.csv"
    file.write_text("beats,filename,dx\n" + "".join(f"{i % 3 + 1},{i},AF\n" for i in range(1, 21)))
    assert len(read_label_file(file, NUMBERS, scheme).codes["own"]) == 20


def test_numbers_of_rows_are_no_recordings(tmp_path: Path, scheme: LabelScheme) -> None:
    """pandas writes its index first. Three findings of each of the files 11 to 20: the index names more recordings."""
    file = tmp_path / "labels.csv"
    rows = [(i // 3 + 11, code) for i, code in enumerate(["AF", "RBBB", "ST depression"] * 10)]
    file.write_text(",filename,dx\n" + "".join(f"{i},{name},{code}\n" for i, (name, code) in enumerate(rows)))
    found = read_label_file(file, NUMBERS, scheme)
    assert set(found.codes["own"]) == {str(number) for number in range(11, 21)}
    file.write_text(file.read_text().replace("filename", "what"))
    with pytest.raises(UserError, match="both name recordings, and not the same ones"):
        read_label_file(file, NUMBERS, scheme)


@pytest.mark.parametrize("column", ["patient_id", "Subject", "patient"])
def test_recordings_may_have_the_names_of_their_patients(tmp_path: Path, scheme: LabelScheme, column: str) -> None:
    file = tmp_path / "labels.csv"
    file.write_text(f"{column},dx\n" + "".join(f"{i},AF\n" for i in range(1, 21)))
    found = read_label_file(file, NUMBERS, scheme)
    assert len(found.codes["own"]) == 20
    assert found.columns == f"labels.csv: recordings in the column {column}, labels in dx"


def test_a_column_that_is_described_as_something_else_names_no_recording(tmp_path: Path, scheme: LabelScheme) -> None:
    (tmp_path / "labels.csv").write_text("nr,what,dx\n" + "".join(f"{i},{21 - i},AF\n" for i in range(1, 21)))
    (tmp_path / "labels.toml").write_text('source = "csv"\nfile = "labels.csv"\nrecord = ""\npatient = "nr"\n')
    found = read_label_file(tmp_path / "labels.toml", NUMBERS, scheme)
    assert found.columns == "labels.csv: recordings in the column what, labels in dx, patients in nr"
    for file in ("labels.csv", "labels.toml"):  # also if its name is that of recordings elsewhere
        (tmp_path / file).write_text((tmp_path / file).read_text().replace("nr", "file_name"))
    found = read_label_file(tmp_path / "labels.toml", NUMBERS, scheme)
    assert found.columns == "labels.csv: recordings in the column what, labels in dx, patients in file_name"


def test_where_classes_have_columns_the_note_says_so(tmp_path: Path, scheme: LabelScheme) -> None:
    (tmp_path / "labels.csv").write_text("filename,AF,RBBB\n1,1,0\n2,0,1\n")
    (tmp_path / "labels.toml").write_text('source = "csv"\nfile = "labels.csv"\nrecord = "filename"\n')
    found = read_label_file(tmp_path / "labels.toml", NUMBERS, scheme)
    assert found.columns == "labels.csv: recordings in the column filename, labels in a column per class: AF, RBBB"


def test_two_columns_that_name_recordings_must_agree(tmp_path: Path, scheme: LabelScheme) -> None:
    file = tmp_path / "labels.csv"
    file.write_text("row,what,dx\n" + "".join(f"{i},{21 - i},AF\n" for i in range(1, 21)))
    with pytest.raises(UserError, match="its columns row and what both name recordings, and not the same ones"):
        read_label_file(file, NUMBERS, scheme)
    file.write_text("low,high,dx\n" + "".join(f"a/{i}.hea,b/{i}.hea,AF\n" for i in range(1, 21)))
    assert len(read_label_file(file, NUMBERS, scheme).codes["own"]) == 20
    file.write_text("file,path,dx\n1,a/1.hea,AF\n1,,RBBB\n2,a/2.hea,AF\n")  # a blank contradicts nothing
    assert read_label_file(file, NUMBERS, scheme).codes == {"own": {"1": "AF RBBB", "2": "AF"}}


def test_one_column_per_class(tmp_path: Path, scheme: LabelScheme) -> None:
    file = tmp_path / "labels.csv"
    file.write_text("record;AF;ST changes;RBBB;Alter\ne1;1;0;1,0;61,5\ne2;0;;0;\ne3;0;0;0;\ne4;;;;\n")
    codes = read_label_file(file, IDS, scheme).codes["own"]
    assert codes == {"e1": "AF RBBB", "e2": "none ?ST_changes", "e3": "none"}
    states = scheme.states_all([codes.get(f"e{i}", "") for i in (1, 2, 3, 4)])
    assert states.tolist() == [[1, 1, 0], [0, 0, 255], [0, 0, 0], [255, 255, 255]]
    file.write_text("record,AF,RBBB,ST\ne1,x,x,\ne2,,,x\ne3,,,\n")  # crosses alone: a blank beside a cross is a no
    assert read_label_file(file, IDS, scheme).codes["own"] == {"e1": "AF RBBB", "e2": "ST"}
    file.write_text("record,AF,RBBB,ST\ne1,0.7,0,0\n")
    with pytest.raises(UserError, match=r"line 2: column AF holds `0.7`; write 1, 0, or nothing"):
        read_label_file(file, IDS, scheme)


def test_a_table_described_in_toml(tmp_path: Path, scheme: LabelScheme) -> None:
    (tmp_path / "words.csv").write_text(
        "Nr;Befund;Pat\ne1;Vorhofflimmern, Rechtsschenkelblock;7\ne2;ST-Senkung;8\ne3;;9\n"
    )
    described = tmp_path / "labels.toml"
    described.write_text("""
source = "csv"
file = "words.csv"
record = "Nr"
codes = "Befund"
patient = "Pat"
empty = "none"
map = { Vorhofflimmern = "I48.9", Rechtsschenkelblock = "RBBB", "ST-Senkung" = "ST depression" }
""")
    found = read_label_file(described, IDS, scheme)
    assert found.codes["own"] == {"e1": "I48.9 RBBB", "e2": "ST_depression", "e3": "none"}
    assert found.patients == {"own/e1": "7", "own/e2": "8", "own/e3": "9"}
    assert scheme.states(["I48.9", "RBBB"]).tolist() == [1, 1, 0]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"PK\x03\x04rest", "the workbook cannot be read"),
        (b"record,dx\nx1,AF\n", "no column names the recordings of these shards; its first row is x1, AF"),
        (b"record,dx\ne1,AF,RBBB\n", "line 2 has 3 cells, the header 2; put cells that hold the separator in quotes"),
        (b"record,note\ne1,hello\n", "no column holds labels of the scheme own"),
        (b"record,dx,dx\ne1,AF,AF\n", "two columns are called `dx`"),
        (b"", "no column names the recordings"),
    ],
)
def test_files_that_cannot_be_used(tmp_path: Path, scheme: LabelScheme, content: bytes, message: str) -> None:
    (tmp_path / "labels.csv").write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        read_label_file(tmp_path / "labels.csv", IDS, scheme)
    assert "\n" not in str(error.value)


def test_a_name_of_two_databases(tmp_path: Path, scheme: LabelScheme) -> None:
    file = tmp_path / "labels.csv"
    file.write_text("record,dx\ne1,AF\n")
    with pytest.raises(UserError, match="several databases have this name; write two/e1"):
        read_label_file(file, ["one/e1", "two/e1"], scheme)
    file.write_text("record,dx\none/e1,AF\n")
    assert read_label_file(file, ["one/e1", "two/e1"], scheme).codes == {"one": {"e1": "AF"}}


def test_a_recipe_reads_the_same_tables(tmp_path: Path, scheme: LabelScheme) -> None:
    (tmp_path / "labels.csv").write_text("record;dx;age\ne1;AF|RBBB;61,5\ne2;ST depression;\n")
    recipe = Recipe("own", scheme=str(tmp_path / "own.toml"))
    found = read_annotations(recipe, LabelSource("csv"), tmp_path / "labels.csv")
    assert {key: a.codes for key, a in found.items()} == {"e1": ("AF", "RBBB"), "e2": ("ST_depression",)}
    assert found["e1"].age == "61.5"


def test_lists_with_and_without_a_header(tmp_path: Path) -> None:
    file = tmp_path / "list.csv"
    for content in ("record\ne1\ne3\n", "e1\ne3\n", "nr,record\n1,own/e1\n2,e3.hea\n"):
        file.write_text(content)
        assert read_names(file, IDS) == (["own/e1", "own/e3"], [])
    file.write_text("record\ne1\nx9\n")
    assert read_names(file, IDS) == (["own/e1"], ["x9"])
    file.write_text("record\nx9\n")
    with pytest.raises(UserError, match="names no recording of these shards"):
        read_names(file, IDS)


def test_what_does_not_fit_is_told_and_strict_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_shards(tmp_path / "shards", "own", 100, 4, random_codes(100, 1), per_shard=200)
    codes = [CODES[i % 2] for i in range(100)]
    rows = [f"own{i:05d},{code}" for i, code in enumerate(codes[:90])]
    rows += ["own00090,ST depresion", "own00091,ST depresion", "x1,AF", "x2,AF"]
    file = tmp_path / "labels.csv"
    file.write_text("\n".join(["record,dx", *rows]))
    split_shards(str(tmp_path / "shards"), "within", "own", labels=file, to=tmp_path)
    out = capsys.readouterr().out
    assert "codes that match no class: ST_depresion 2;" in out
    assert "or to `ignored`; until then, 2 recordings are left out, being of no class\n" in out
    assert "no recording is STT, Other, Normal" in out
    assert "2 rows of labels.csv have no recording: x1, x2" in out
    assert "note: 8 recordings have no label in labels.csv and are unlabelled: own/own00092, own/own00093" in out
    assert "100 recordings in the shards = " in out
    assert "2 no class of the scheme" in out
    with pytest.raises(UserError, match=r"ST_depresion 2.*no recording is STT.*\(--strict\)"):
        split_shards(str(tmp_path / "shards"), "within", "own", labels=file, to=tmp_path / "strict", strict=True)
    assert not (tmp_path / "strict").exists()


def test_a_code_of_no_class_makes_negatives_where_these_are_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_shards(tmp_path / "shards", "own", 40, 4, per_shard=200)
    (tmp_path / "own.toml").write_text(SCHEME.replace('name = "own"\n', 'name = "own"\nunlabelled = "keep"\n'))
    rows = [f"own{i:05d},{('AF', 'RBBB', 'ST', 'AF|LVHH')[i % 4] if i else 'LVHH'}" for i in range(40)]
    (tmp_path / "labels.csv").write_text("\n".join(["record,dx", *rows]))
    scheme = str(tmp_path / "own.toml")
    split_shards(
        str(tmp_path / "shards"), "within", "own", labels=tmp_path / "labels.csv", scheme=scheme, to=tmp_path, ratio=1
    )
    out = capsys.readouterr().out
    assert "codes that match no class: LVHH 11; add them" in out
    assert "until then, 1 recordings count as having none of the classes\n" in out


def test_a_corrected_file_gives_another_split_of_the_same_shards(tmp_path: Path) -> None:
    make_shards(tmp_path / "shards", "own", 100, 4, random_codes(100, 1), per_shard=200)
    file = tmp_path / "labels.csv"
    rows = [f"own{i:05d},{code}" for i, code in enumerate(random_codes(100, 2))]
    file.write_text("\n".join(["record,dx", *rows]))
    (first,) = split_shards(str(tmp_path / "shards"), "within", "own", ratio=0.2, labels=file, to=tmp_path / "a")
    rows[0] = f"own00000,{CODES[3]}|{CODES[2]}"
    file.write_text("\n".join(["record,dx", *rows]))
    with pytest.raises(UserError, match="another split of this name"):
        split_shards(str(tmp_path / "shards"), "within", "own", ratio=0.2, labels=file, to=tmp_path / "a")
    (second,) = split_shards(
        str(tmp_path / "shards"), "within", "own", ratio=0.2, labels=file, to=tmp_path / "a", name="corrected"
    )
    old, new = Split.load(first), Split.load(second)
    assert second.name == "corrected.json"
    assert old.label_file_sha256 != new.label_file_sha256
    assert old.labels_sha256 != new.labels_sha256
    assert new.codes["own"]["own00000"] == f"{CODES[3]} {CODES[2]}"


@pytest.mark.parametrize("content", [b"record,dx\rr1,1\rr2,2\r", b"a\rb,c\nr1,1\n", b"sep=ab\nrecord,dx\n"])
def test_a_table_that_no_reader_takes_is_named(tmp_path: Path, content: bytes) -> None:
    """Found by the fuzzer: carriage returns in the header, and a hint at a separator of two characters."""
    path = tmp_path / "labels.csv"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"labels\.csv: the table of labels cannot be read"):
        read_table(path)
