"""dataset.json and manifest.csv are texts that anybody can write: whatever is in them, the answer is a sentence."""

import hashlib
import json
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ecgmatch_dist.data import verify
from ecgmatch_dist.data.index import read_dataset, read_manifest
from ecgmatch_dist.data.manifest import COLUMNS, read_rejects, read_rows
from ecgmatch_dist.data.store import ShardStore
from ecgmatch_dist.errors import UserError
from tests.support.shard_factory import make_shards

VALUES: tuple[Any, ...] = (
    None, True, 0, -1, 1.5, 10**30, float("nan"), float("inf"), "", "x", "\0", "\x1b[31m", "../x", "=1+1", [], [None], {},
    {"x": 1},
)  # fmt: skip
CELLS = (
    "", "x", "-1", "1.5", "1e3", "9" * 30, "nan", "inf", "\0", "\x1b[31m", "../x", "=1+1", '"', "a,b", "é", "\ud800", " ",
    "0x10",
)  # fmt: skip
SHARE = 1_000_000 if os.environ.get("FUZZ") else 80
"""How many of the variations are tried: a few are quick, `make fuzz` tries them all."""


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    make_shards(folder, "own", 5, length=16, per_shard=3)
    return folder / "own"


def seal(folder: Path) -> None:
    """Put the manifest's checksum into dataset.json: only its meaning is wrong then."""
    dataset = json.loads((folder / "dataset.json").read_text())
    dataset["manifest_sha256"] = hashlib.sha256((folder / "manifest.csv").read_bytes()).hexdigest()
    (folder / "dataset.json").write_text(json.dumps(dataset))


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every entry of a JSON value."""
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        yield (*path, key)
        if isinstance(item, dict | list):
            yield from places(item, (*path, key))


def datasets(good: dict[str, Any]) -> Iterator[str]:
    """Every entry removed, and replaced by each value; then text that is cut or damaged."""
    for path in places(good):
        for value in (*VALUES, "removed"):
            bad = json.loads(json.dumps(good))
            inner = bad
            for key in path[:-1]:
                inner = inner[key]
            if value == "removed":
                del inner[path[-1]]
            else:
                inner[path[-1]] = value
            yield json.dumps(bad)
    text, rng = json.dumps(good), random.Random(0)
    yield from ("", "{", "[]", "null", "[" * 100_000, '{"format": ' + "9" * 5000 + "}", text + "x")
    for _ in range(50):
        at = rng.randrange(len(text))
        yield text[:at] + rng.choice('"{}[],:0-x\0\x7f') + text[at + rng.randrange(3) :]


def manifests(good: str) -> Iterator[bytes]:
    lines = good.splitlines()
    for column in range(len(COLUMNS)):
        for cell in CELLS:
            cells = lines[2].split(",")
            cells[column] = cell
            yield "\n".join([*lines[:2], ",".join(cells), *lines[3:], ""]).encode("utf-8", "surrogatepass")
    yield from (b"", b"\n", good.encode("utf-16"), good.encode() + b"\xff", good.replace(",", ";").encode())
    yield from (
        good.replace("\n", "\r\n").encode(),
        lines[0].encode(),
        f"{good}{lines[1]}\n".encode(),
        f"{good},,\n".encode(),
    )
    yield from (("\n".join(lines[:-1]) + "\n").encode(), good.replace("sha256", "sha").encode(), b"a" * 100_000)


def answers(folder: Path) -> list[str]:
    """What `verify` and the reader say; "" where they find nothing wrong. Anything but a UserError ends the test."""
    said = []
    for read in (lambda: verify.main(folder), lambda: ShardStore(folder.parent, ["own"]).read([0, 4])):  # type: ignore[arg-type]
        try:
            read()
            said.append("")
        except UserError as error:
            said.append(str(error))
    assert not any("\n" in text for text in said), said
    return said


def test_no_dataset_is_a_traceback(shards: Path, tmp_path: Path) -> None:
    folder = tmp_path / "own"
    shutil.copytree(shards, folder)
    good = json.loads((shards / "dataset.json").read_text())
    tried = list(dict.fromkeys(datasets(good)))
    assert len(tried) > 500
    for text in tried[:: max(1, len(tried) // SHARE)]:
        (folder / "dataset.json").write_text(text)
        answers(folder)


def test_no_manifest_is_a_traceback(shards: Path, tmp_path: Path) -> None:
    folder = tmp_path / "own"
    shutil.copytree(shards, folder)
    tried = list(manifests((shards / "manifest.csv").read_text()))
    assert len(tried) > 250
    for content in tried[:: max(1, len(tried) // SHARE)]:
        (folder / "manifest.csv").write_bytes(content)
        seal(folder)
        answers(folder)


@pytest.mark.parametrize(
    ("column", "cell", "message"),
    [
        ("offset", "x", "row 1: offset is `x`, not a whole number"),
        ("offset", "9" * 30, f"row 1: offset is `{'9' * 30}`, not a whole number"),
        ("rate", "0", "row 1: rate is `0`, not from 1 to"),
        ("row", "-1", "row 1: row is `-1`, not from 0 to"),
        ("key", "../x", "row 1: key is `../x`, not a name of letters, digits, _ and -"),
        ("shard", "/etc/passwd", "row 1: shard is `/etc/passwd`, not the name of a file in this folder"),
        ("sha256", "../x", "row 1: sha256 is `../x`, not 64 hexadecimal digits"),
        ("sex", "\x1b[31m", r"line 3 holds the control character '\x1b'"),
    ],
)
def test_a_cell_is_named_with_its_row_and_column(
    shards: Path, tmp_path: Path, column: str, cell: str, message: str
) -> None:
    lines = (shards / "manifest.csv").read_text().splitlines()
    cells = lines[2].split(",")
    cells[COLUMNS.index(column)] = cell
    path = tmp_path / "manifest.csv"
    path.write_text("\n".join([*lines[:2], ",".join(cells), *lines[3:], ""]))
    with pytest.raises(UserError) as caught:
        read_rows(path)
    assert str(caught.value).startswith(f"{path}: {message}")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"database": "a\x1b"}, "database = "),
        ({"title": "a\x1b[31m"}, "title holds a control character"),
        (
            {"shards": [{"name": "../x.tar", "sha256": "0" * 64, "bytes": 1, "recordings": 5}]},
            "shards[0].name = '../x.tar'",
        ),
        (
            {"shards": [{"name": "x.tar", "sha256": "../../x", "bytes": 1, "recordings": 5}]},
            "shards[0].sha256 = '../../x'",
        ),
        ({"shards": [{"name": "x.tar", "sha256": "0" * 64, "bytes": -1, "recordings": 5}]}, "shards[0].bytes = -1"),
        ({"length": 10**12}, "length = 1000000000000: 1 to 2,000,000"),
        ({"recordings": -1}, "recordings = -1: 0 or more"),
        ({"leads": ["I"]}, "leads are 'I', not I II"),
        ({"preprocess": {"rate": 0}}, "rate 0, length 6144, order 3: each must be at least 1"),
    ],
)
def test_a_field_of_the_dataset_is_named(shards: Path, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    value = json.loads((shards / "dataset.json").read_text()) | change
    (tmp_path / "dataset.json").write_text(json.dumps(value))
    with pytest.raises(UserError) as caught:
        read_dataset(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / 'dataset.json'}: {message}")


def test_one_bad_database_does_not_hide_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        make_shards(tmp_path, name, 3, length=16)
    (tmp_path / "a/dataset.json").write_text("{")
    with pytest.raises(UserError, match="problems"):
        verify.main(tmp_path)
    printed = capsys.readouterr()
    assert "a/dataset.json: not JSON" in printed.err
    assert "/b: 3 recordings" in printed.out


def test_cells_beyond_the_header_are_not_lost(shards: Path, tmp_path: Path) -> None:
    """Found by the fuzzer: pandas drops them with a warning."""
    first, *rows = (shards / "manifest.csv").read_text().splitlines()
    (tmp_path / "manifest.csv").write_text("\n".join([first, *(f"{row},more" for row in rows), ""]))
    with pytest.raises(UserError, match="not a table of 15 columns"):
        read_rows(tmp_path / "manifest.csv")


def test_good_ones_are_read_as_they_were(shards: Path) -> None:
    manifest = read_manifest(shards)
    assert tuple(manifest.columns) == COLUMNS
    assert manifest["row"].tolist() == [0, 1, 2, 3, 4]
    assert manifest.dtypes[["row", "rate", "samples", "offset"]].tolist() == ["int64"] * 4
    assert read_rejects(shards / "rejects.csv").empty
