"""What comes from outside: recordings, label files, dataset.json, manifests, splits."""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecgmatch_dist.data.annotations import annotate
from ecgmatch_dist.data.databases import LabelSource
from ecgmatch_dist.data.header_limits import check_length
from ecgmatch_dist.data.index import read_dataset, write_index
from ecgmatch_dist.data.label_table import read_table
from ecgmatch_dist.data.labels import load_scheme
from ecgmatch_dist.data.manifest import parse_rows
from ecgmatch_dist.data.preprocess import PRESETS, preprocess
from ecgmatch_dist.data.recordings import RecordRef, Rejected, read_recording
from ecgmatch_dist.data.split_file import Split
from ecgmatch_dist.data.table import NAME, open_table
from ecgmatch_dist.errors import UserError
from tests.support.mutate import bounded_memory, fuzz, mutated, refused_at_most
from tests.support.recordings import make_signal, write_record
from tests.support.run_factory import split_of
from tests.support.shard_factory import make_shards


@pytest.fixture(autouse=True)
def bounded() -> Iterator[None]:
    with bounded_memory():
        yield


@cache
def header(old: bool, folder: Path) -> bytes:
    return write_record(folder, "r1", make_signal(n=40), old=old).with_suffix(".hea").read_bytes()


@fuzz
@given(data=st.data(), old=st.booleans(), fmt=st.sampled_from(("16", "212", "80", "24", "310", "8")))
def test_recordings(tmp_path: Path, data: st.DataObject, old: bool, fmt: str) -> None:
    folder = tmp_path / f"{old}"
    good = header(old, folder).replace(b".dat 16 ", f".dat {fmt} ".encode())
    (folder / "r1.hea").write_bytes(data.draw(mutated(good)))
    with refused_at_most(Rejected):
        recording = read_recording(RecordRef("r1", folder / "r1"))
        check_length(recording.signal.shape[1], recording.rate, 100)
        with np.errstate(all="ignore"):
            signal, _ = preprocess(recording.signal, recording.rate, PRESETS["cpu"])
        assert signal.shape == (12, 1024)
        assert not any(" " in code or "\0" in code for code in recording.codes)


TABLES = (
    b"record,dx,patient,age,sex\nr1,426783006,p1,61,F\nr2,\"164889003,59118001\",p2,nan,M\nr3,{'NORM': 100},,,\n",
    "record;CD;Rhythm;STT;Other;Normal\r\nr1;1;0;;0;0\r\nr2;x;;;;\r\n".encode("utf-16"),
)


@fuzz
@given(data=st.data(), table=st.sampled_from(TABLES))
def test_label_files(tmp_path: Path, data: st.DataObject, table: bytes) -> None:
    path = tmp_path / "labels.csv"
    path.write_bytes(data.draw(mutated(table)))
    with refused_at_most(UserError):
        annotate(read_table(path), LabelSource("csv", "labels.csv"), load_scheme("ecgmatch5"), lambda cell: cell)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    make_shards(folder, "own", 3, length=16)
    return folder / "own"


@fuzz
@given(data=st.data())
def test_dataset(tmp_path: Path, shards: Path, data: st.DataObject) -> None:
    (tmp_path / "dataset.json").write_bytes(data.draw(mutated((shards / "dataset.json").read_bytes())))
    with refused_at_most(UserError):
        read_dataset(tmp_path)


@fuzz
@given(data=st.data())
def test_manifest(shards: Path, data: st.DataObject) -> None:
    with refused_at_most(UserError):
        rows = parse_rows(data.draw(mutated((shards / "manifest.csv").read_bytes())), Path("manifest.csv"))
        assert (rows["rate"] >= 1).all()


@fuzz
@given(data=st.data())
def test_table(tmp_path: Path, shards: Path, data: st.DataObject) -> None:
    sha256 = read_dataset(shards).manifest_sha256
    if not (shards / NAME).exists():
        write_index(shards)
    (tmp_path / NAME).write_bytes(data.draw(mutated((shards / NAME).read_bytes())))
    with refused_at_most(UserError):
        open_table(tmp_path / NAME, sha256)


SPLIT = split_of("within", "chapman", 0.2, 20, {"chapman": 20})


@fuzz
@given(data=st.data())
def test_split(tmp_path: Path, data: st.DataObject) -> None:
    (tmp_path / "split.json").write_bytes(data.draw(mutated(json.dumps(SPLIT).encode())))
    with refused_at_most(UserError):
        Split.load(tmp_path / "split.json")
