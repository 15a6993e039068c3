"""manifest.safetensors says what manifest.csv says, is shared, and is believed no more than manifest.csv is."""

import contextlib
import hashlib
import json
import pickle
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from xxhash import xxh3_64_digest

from ecgmatch_dist.data import manifest, verify
from ecgmatch_dist.data.index import read_dataset, read_manifest, read_table, write_index
from ecgmatch_dist.data.store import ShardStore
from ecgmatch_dist.data.table import NAME, Table, collect, map_arrays, open_table, write_table
from ecgmatch_dist.errors import UserError
from tests.support.shard_factory import make_shards


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("shards")
    make_shards(root, "own", 30, length=16, patients=[f"é{i // 2}" if i % 3 else "" for i in range(30)])
    write_index(root / "own")
    return root


@pytest.fixture
def root(built: Path, tmp_path: Path) -> Path:
    shutil.copytree(built, tmp_path / "shards")
    return tmp_path / "shards"


def rewrite(folder: Path, **changed: Any) -> None:
    """Other arrays, with a right checksum; None: without that one."""
    arrays = {name: array.copy() for name, array in map_arrays(folder / NAME)[0].items()} | changed
    table = Table.__new__(Table)
    table.arrays = {name: array for name, array in arrays.items() if array is not None}
    write_table(folder / NAME, table, read_dataset(folder).manifest_sha256)


def test_it_says_what_the_csv_says(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mapped = read_table(root / "own")
    assert mapped.path is not None
    pd.testing.assert_frame_equal(mapped.frame(slice(None)), read_manifest(root / "own"))
    store = ShardStore(root, ["own"], check=True)
    x = store.read(np.arange(30))
    (root / "own" / NAME).unlink()
    monkeypatch.setattr(manifest, "CHUNK", 7)  # in pieces
    texts = ShardStore(root, ["own"], check=True)
    assert texts.tables[0].path is None
    pd.testing.assert_frame_equal(texts.manifest, store.manifest)
    for name, array in mapped.arrays.items():
        assert np.array_equal(array, texts.tables[0].arrays[name]), name
    assert np.array_equal(texts.read(np.arange(30)), x)


def test_the_same_rows_give_the_same_bytes(root: Path) -> None:
    before = (root / "own" / NAME).read_bytes()
    write_index(root / "own")
    assert (root / "own" / NAME).read_bytes() == before


def test_a_pickled_store_maps_the_file_again(root: Path) -> None:
    store = ShardStore(root, ["own"])
    data = pickle.dumps(store)
    assert store.tables[0].key.tobytes() not in data, "the columns are not sent along"
    assert np.array_equal(pickle.loads(data).read(np.array([3, 1])), store.read(np.array([3, 1])))


def test_quick_checksums_come_first(root: Path) -> None:
    """Of two databases one has them. They alone are looked at, unless `check` asks for more; `verify` looks at both kinds."""
    make_shards(root, "other", 5, length=16)
    x = ShardStore(root, ["own", "other"]).read(np.arange(35))
    quick = np.array([np.frombuffer(xxh3_64_digest(row.tobytes()), np.uint8) for row in x[:30]])
    rewrite(root / "own", xxh3=quick, sha256=np.zeros((30, 32), np.uint8))
    assert np.array_equal(ShardStore(root, ["other", "own"]).read(np.arange(5, 35)), x[:30])
    with pytest.raises(UserError, match="the checksum of own/own00000 is wrong"):
        ShardStore(root, ["own"], check=True).read(np.arange(30))
    quick[7, 7] ^= 1
    rewrite(root / "own", xxh3=quick, sha256=read_sha256(root / "own"))
    store = ShardStore(root, ["other", "own"])
    assert np.array_equal(store.read(np.arange(12)), np.concatenate((x[30:], x[:7])))
    with pytest.raises(UserError, match="the checksum of own/own00007 is wrong"):
        store.read(np.arange(35))
    assert any(
        f"own00007: its quick checksum is not the one in {NAME}" in p for p in verify.verify(root / "own").problems
    )


def read_sha256(folder: Path) -> np.ndarray:
    return np.array([list(bytes.fromhex(text)) for text in read_manifest(folder)["sha256"]], np.uint8)


def test_verify_compares_the_two(root: Path) -> None:
    assert not [p for p in verify.verify(root / "own").problems if NAME in p]
    age = map_arrays(root / "own" / NAME)[0]["age"].copy()
    age[7] = (age[7] + 1) % 2
    rewrite(root / "own", age=age)
    assert f"{NAME}: row 7 is not that of manifest.csv" in "".join(verify.verify(root / "own").problems)


def test_one_of_another_manifest_is_not_used(root: Path) -> None:
    text = (root / "own/manifest.csv").read_text().replace("own00004,own,", "other,own,")
    (root / "own/manifest.csv").write_text(text)
    dataset = json.loads((root / "own/dataset.json").read_text())
    dataset["manifest_sha256"] = hashlib.sha256(text.encode()).hexdigest()
    (root / "own/dataset.json").write_text(json.dumps(dataset))
    store = ShardStore(root, ["own"])
    assert store.tables[0].path is None
    assert store.ids(np.array([4])) == ["own/other"]
    assert any(NAME in doubt for doubt in verify.verify(root / "own").doubts)


@pytest.mark.parametrize("distinct", [3, 200, 300])
def test_codes_of_several_databases_are_those_of_their_rows(tmp_path: Path, distinct: int) -> None:
    """A table numbers few values by bytes; together they are more than a byte holds."""
    for database, first in (("chapman", 10**6), ("ptbxl", 2 * 10**6), ("ningbo", 3 * 10**6)):
        make_shards(
            tmp_path, database, 310, 16, [f"426783006 {first + i % distinct}" for i in range(310)], per_shard=310
        )
    store = ShardStore(tmp_path, ["chapman", "ptbxl", "ningbo"])
    values, numbers = store.coded("codes")
    assert [values[number] for number in numbers] == store.manifest["codes"].tolist()


def test_names_that_are_not_in_order_are_found(tmp_path: Path) -> None:
    rows = read_manifest(_small(tmp_path)).assign(key=["b", "a-seg2", "a-b", "c"])
    table = collect([rows.iloc[:3], rows.iloc[3:]])
    assert not table.is_sorted
    assert table.order().tolist() == [2, 1, 0, 3]
    assert table.find(["c", "b", "a", "a-b", "zz", ""]).tolist() == [3, 0, -1, 2, -1, -1]
    assert table.repeated() == ""
    assert collect([rows.assign(key=["b", "a", "b", "c"])]).repeated() == "b"
    assert table.recordings() == 4
    assert collect([rows.assign(key=["a-seg1", "a-seg2", "b", "c"])]).recordings() == 3


def _small(folder: Path) -> Path:
    make_shards(folder, "own", 4, length=16)
    return folder / "own"


HOSTILE: tuple[tuple[str, Any, str], ...] = (
    ("key", b"../x", "row 3: key is not a name"),
    ("key", b"", "row 3: key is not a name"),
    ("key", b"a\0b", "row 3: key is not a name"),
    ("offset", -1, "row 3: offset is out of range"),
    ("rate", 0, "row 3: rate is out of range"),
    ("samples", 2**60, "row 3: samples is out of range"),
    ("codes", 200, "row 3: codes is none of its"),
)


@pytest.mark.parametrize(("column", "value", "message"), HOSTILE)
def test_a_bad_cell_is_named(root: Path, column: str, value: Any, message: str) -> None:
    array = map_arrays(root / "own" / NAME)[0][column].copy()
    array[3] = np.frombuffer(value.ljust(array.shape[1], b"\0"), np.uint8) if isinstance(value, bytes) else value
    rewrite(root / "own", **{column: array})
    with pytest.raises(UserError, match=message):
        ShardStore(root, ["own"])


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("shard", [b"../../secret.tar"], "shard is '../../secret.tar', not the name of a file"),
        ("sex", [b"F", b"\x1b[31m"], "not in order"),
        ("sex", [b"\x1b[31m", b"F"], "sex is '.x1b.31m', not a text without control"),
        ("sex", [b"F", b"\xff"], "not UTF-8"),
        ("database", [b"a b"], "database is 'a b', not a name"),
    ],
)
def test_a_bad_value_is_named(root: Path, column: str, values: list[bytes], message: str) -> None:
    texts = np.array(values, "S")
    rewrite(root / "own", **{f"{column}.values": texts.view(np.uint8).reshape(len(values), -1)})
    with pytest.raises(UserError, match=message):
        ShardStore(root, ["own"])


@pytest.mark.parametrize(
    "changed",
    [
        {"sex": None},
        {"more": np.zeros(3, np.uint8)},
        {"rate": np.zeros(29, np.int64)},
        {"rate": np.zeros(30, np.int32)},
        {"key": np.zeros((30, 0), np.uint8)},
        {"key": np.zeros(30, np.uint8)},
        {"sha256": np.zeros((30, 31), np.uint8)},
        {"xxh3": np.zeros((30, 7), np.uint8)},
        {"xxh3": np.zeros((29, 8), np.uint8)},
        {"xxh3": np.zeros((30, 8), np.int32)},
        {"sex.values": np.zeros((0, 1), np.uint8)},
    ],
)
def test_other_columns_are_refused(root: Path, changed: dict[str, Any]) -> None:
    rewrite(root / "own", **changed)
    with pytest.raises(UserError, match=NAME):
        ShardStore(root, ["own"])


def test_damage_is_a_sentence(root: Path) -> None:
    """A byte anywhere, a cut, nothing, something else: refused, or not taken for a table of this manifest; never other rows."""
    path, rng = root / "own" / NAME, random.Random(0)
    good, expected = path.read_bytes(), read_dataset(root / "own").manifest_sha256
    tried = [good[:-1], good[:100], b"", b"\xff" * 8, good + b"x"]
    for at in [*range(40), *(rng.randrange(len(good)) for _ in range(200))]:
        tried.append(good[:at] + bytes([good[at] ^ (1 << rng.randrange(8))]) + good[at + 1 :])
    for content in tried:
        path.write_bytes(content)
        with contextlib.suppress(UserError):
            assert open_table(path, expected) is None
