"""Tars and servers of somebody who means harm (docs/security.md): each attack ends in a sentence, quickly."""

import gzip
import http.server
import io
import json
import lzma
import os
import pickle
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ecgmatch_dist.data import http as fetching
from ecgmatch_dist.data import remote, verify
from ecgmatch_dist.data.http import Fetcher, FetchError
from ecgmatch_dist.data.index import file_sha256
from ecgmatch_dist.data.store import ShardStore
from ecgmatch_dist.data.web_shards import plain_webdataset
from ecgmatch_dist.errors import UserError
from tests.support.shard_factory import make_shards


class Bomb:
    """Unpickling it makes a folder."""

    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.mkdir, (self.marker,)


def member(name: str, data: bytes = b"", kind: bytes = tarfile.REGTYPE, **fields: Any) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size, info.type = len(data), kind
    for field, value in fields.items():
        setattr(info, field, value)
    return info, data


def tar_of(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for info, data in members:
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def sparse_bomb() -> bytes:
    """1 TiB of zeros in 1,024 bytes: an old GNU sparse member without data."""
    info = tarfile.TarInfo("a.ecg.npy")
    info.type = tarfile.GNUTYPE_SPARSE
    header = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    header[156:157] = b"S"
    header[483:495] = b"\x80" + (2**40).to_bytes(11, "big")  # the real size
    header[148:156] = b" " * 8
    header[148:156] = f"{sum(header[:512]):06o}\0 ".encode()
    return bytes(header[:512]) + bytes(1024)


def bad_tars(marker: str) -> dict[str, bytes]:
    array = io.BytesIO()
    np.save(array, np.array([Bomb(marker)], dtype=object), allow_pickle=True)
    huge = (
        b"\x93NUMPY\x01\x00v\x00"
        + b"{'descr': '<f2', 'fortran_order': False, 'shape': (12, 99999999999), }".ljust(117)
        + b"\n"
    )
    zeros = bytes(2**20)
    return {
        "pickle": tar_of(member("a.ecg.npy", array.getvalue())),
        "pickle-member": tar_of(member("a.ecg.npy", pickle.dumps(Bomb(marker)))),
        "pyd": tar_of(member("a.ecg.npy", b""), member("a.pyd", pickle.dumps(Bomb(marker)))),
        "array-length": tar_of(member("a.ecg.npy", huge)),
        "deep-json": tar_of(member("a.json", b"[" * 100_000), member("a.ecg.npy", b"")),
        "list-json": tar_of(member("a.json", b"[1]"), member("a.ecg.npy", b"x")),
        "absolute": tar_of(member("/etc/a.ecg.npy", b"x")),
        "dots": tar_of(member("../../a.ecg.npy", b"x")),
        "symlink": tar_of(member("a.ecg.npy", kind=tarfile.SYMTYPE, linkname="/etc/passwd")),
        "hardlink": tar_of(member("a.ecg.npy", kind=tarfile.LNKTYPE, linkname="/etc/passwd")),
        "device": tar_of(member("a.ecg.npy", kind=tarfile.CHRTYPE, devmajor=1, devminor=5)),
        "fifo": tar_of(member("a.ecg.npy", kind=tarfile.FIFOTYPE)),
        "sparse": sparse_bomb(),
        "claimed-size": tar_of(member("a.ecg.npy", b"x"))[:124] + b"\x80" + (2**60).to_bytes(11, "big") + bytes(10_000),
        "xz": lzma.compress(tar_of(member("a.ecg.npy", zeros))),
        "gz": gzip.compress(tar_of(member("a.ecg.npy", zeros))),
        "zip": b"PK\x03\x04" + bytes(2000),
        "cut": tar_of(member("a.ecg.npy", zeros))[:5000],
    }


@pytest.mark.parametrize("kind", sorted(bad_tars("")))
def test_a_hostile_tar_is_refused(tmp_path: Path, kind: str) -> None:
    marker = tmp_path / "ran"
    path = tmp_path / "bad.tar"
    path.write_bytes(bad_tars(str(marker))[kind])
    with pytest.raises(UserError, match=r"bad\.tar"):
        list(plain_webdataset(str(path)))
    assert not marker.exists()


@pytest.mark.parametrize("kind", sorted(bad_tars("")))
def test_verify_names_a_hostile_tar(tmp_path: Path, kind: str) -> None:
    """With the right checksum and length in dataset.json, as whoever made the tar would write them."""
    marker = tmp_path / "ran"
    make_shards(tmp_path, "own", 2, length=16)
    folder, (path,) = tmp_path / "own", (tmp_path / "own").glob("*.tar")
    path.write_bytes(bad_tars(str(marker))[kind])
    dataset = json.loads((folder / "dataset.json").read_text())
    dataset["shards"][0] |= {"sha256": file_sha256(path), "bytes": path.stat().st_size}
    (folder / "dataset.json").write_text(json.dumps(dataset))
    assert any(path.name in problem for problem in verify.verify(folder).problems)
    with pytest.raises(UserError):
        ShardStore(tmp_path, ["own"]).read(np.arange(2))
    assert not marker.exists()


class Hostile(http.server.ThreadingHTTPServer):
    """Serves a folder; tars as its `trick` says."""

    daemon_threads = True

    def __init__(self, root: Path) -> None:
        self.root, self.trick, self.ended = root, "", threading.Event()
        super().__init__(("127.0.0.1", 0), HostileHandler)
        self.url = f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that go away are what the tests want."""


class HostileHandler(http.server.BaseHTTPRequestHandler):
    server: Hostile

    def log_message(self, *args: object) -> None: ...

    def do_GET(self) -> None:
        path, trick = self.server.root / self.path.lstrip("/"), self.server.trick
        data = path.read_bytes() if path.is_file() else b""
        if not self.path.endswith((".tar", ".txt")):
            trick = ""
        if trick == "redirect":
            self.send_response(302)
            self.send_header("Location", "file:///etc/passwd")
            return self.end_headers()
        if trick == "circle":
            self.send_response(302)
            self.send_header("Location", self.path)
            return self.end_headers()
        self.send_response(200)
        if trick in ("", "long", "short"):
            self.send_header("Content-Length", str(len(data) + {"long": 1000, "short": -1000}.get(trick, 0)))
        self.end_headers()
        if trick == "drip":
            while not self.server.ended.wait(0.02):
                self.wfile.write(b"x")
        while trick == "endless" and not self.server.ended.is_set():
            self.wfile.write(bytes(2**16))
        self.wfile.write(data)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hostile]:
    monkeypatch.setattr(remote, "PAUSE", 0.0)
    monkeypatch.setattr(fetching, "PAUSE", 0.0)
    make_shards(tmp_path / "shards", "own", 5, length=64)
    with Hostile(tmp_path / "shards") as found:
        threading.Thread(target=found.serve_forever, args=(0.02,), daemon=True).start()
        yield found
        found.ended.set()
        found.shutdown()


@pytest.mark.parametrize(
    ("trick", "message"),
    [
        ("endless", "sends more than the"),
        ("drip", "too slow"),
        ("redirect", "3 attempts"),
        ("circle", "3 attempts"),
        ("long", "3 attempts|checksum"),
        ("short", "3 attempts|checksum"),
    ],
)
def test_a_hostile_server_of_shards(
    server: Hostile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trick: str, message: str
) -> None:
    monkeypatch.setattr(remote, "PATIENCE", 0.3)
    store = ShardStore(server.url, ["own"], cache=tmp_path / "cache")
    server.trick = trick
    began = time.monotonic()
    with pytest.raises(UserError, match=message):
        store.read(np.arange(5))
    assert time.monotonic() - began < 60
    assert not [path for path in (tmp_path / "cache/shards").iterdir() if path.suffix != ".lock"], "nothing is left"


def test_a_list_that_never_ends(server: Hostile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "LARGEST_TEXT", 2**20)
    server.trick = "endless"
    with pytest.raises(FetchError, match="more than 1,048,576 bytes"):
        Fetcher((f"{server.url}/",)).text("sums.txt")


def test_a_file_that_never_ends(server: Hostile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "LARGEST_FILE", 2**20)
    server.trick = "endless"
    with pytest.raises(FetchError, match="more than 1,048,576 bytes"):
        Fetcher((f"{server.url}/",)).fetch("a.txt", "0" * 64, tmp_path / "a.txt")
