"""The downloader against a real HTTP server on loopback that breaks, truncates, refuses and lies."""

import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecgmatch_dist.data import download as downloader
from ecgmatch_dist.data import http
from ecgmatch_dist.data.databases import load_recipe
from ecgmatch_dist.data.download import SUMS, choose, download, find_source, read_sums
from ecgmatch_dist.data.http import Fetcher, FetchError
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.files.lock import locked

GEORGIA = "training/georgia/"


class Release(ThreadingHTTPServer):
    """A release with per-path misbehaviour: each request takes the path's next trick, then all is well."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.lies: dict[str, str] = {}  # path -> checksum given instead of the right one
        self.tricks: dict[str, list[str]] = defaultdict(list)
        self.log: list[tuple[str, str | None]] = []
        self.ranges = True
        self.slow = 0.0  # seconds per chunk
        self.extra = ""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/release/"

    def sums(self) -> bytes:
        right = {path: hashlib.sha256(data).hexdigest() for path, data in self.files.items()}
        return ("".join(f"{sha} {path}\n" for path, sha in (right | self.lies).items()) + self.extra).encode()

    def asked(self, path: str) -> list[str | None]:
        return [ranged for asked, ranged in self.log if asked == path]

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that was killed is part of the test."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Release

    def log_message(self, *args: object) -> None:
        pass

    def answer(self, status: int, body: bytes, length: int | None = None, **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        for start in range(0, len(body), 4096):
            self.wfile.write(body[start : start + 4096])
            time.sleep(self.server.slow)
        if length is not None:
            self.close_connection = True

    def do_GET(self) -> None:
        release = self.server
        path = self.path.removeprefix("/release/")
        ranged = self.headers["Range"]
        release.log.append((path, ranged))
        assert self.headers["Accept-Encoding"] == "identity"
        body = release.sums() if path == SUMS else release.files.get(path)
        trick = release.tricks[path].pop(0) if release.tricks[path] else ""
        if body is None:
            return self.answer(404, b"no such file")
        if trick == "busy":
            return self.answer(503, b"come again", Retry_After="0")
        if trick == "garbage":
            return self.answer(200, bytes(len(body)))
        if trick == "truncate":  # a proxy's complete answer with half of the bytes
            return self.answer(200, body[: len(body) // 2])
        status, headers, start = 200, {}, 0
        if ranged and release.ranges:
            start = int(ranged.removeprefix("bytes=").removesuffix("-"))
            if start >= len(body):
                return self.answer(416, b"")
            status, headers = 206, {"Content_Range": f"bytes {start}-{len(body) - 1}/{len(body)}"}
        if trick == "wrong range":
            return self.answer(206, body, Content_Range=f"bytes 0-{len(body) - 1}/{len(body)}")
        rest = body[start:]
        if trick == "break":
            return self.answer(status, rest[: min(len(rest) // 2, 20_000)], length=len(rest), **headers)
        return self.answer(status, rest, **headers)


@pytest.fixture
def release() -> Iterator[Release]:
    rng = np.random.default_rng(0)
    with Release() as server:
        for key in ("E00001", "E00002", "E00003"):
            server.files[f"{GEORGIA}g1/{key}.hea"] = f"{key} 12 500 5000\n".encode()
            server.files[f"{GEORGIA}g1/{key}.mat"] = rng.bytes(60_000)
        server.files[f"{GEORGIA}g1/RECORDS"] = b"E00001\nE00002\nE00003\n"
        server.files["training/ningbo/g1/JS10647.hea"] = b"not asked for"
        server.files["LICENSE.txt"] = b"CC BY 4.0"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "PAUSE", 0.005)


def here(to: Path) -> dict[str, bytes]:
    """Everything under `to` but the lock."""
    return {
        str(path.relative_to(to)): path.read_bytes()
        for path in to.rglob("*")
        if path.is_file() and path.name != ".download.lock"
    }


def wanted(release: Release) -> dict[str, bytes]:
    return {path: data for path, data in release.files.items() if path.startswith(GEORGIA)}


def test_a_database_arrives_where_its_recipe_looks(release: Release, tmp_path: Path) -> None:
    summary = download("g12ec", tmp_path, release.url)
    assert here(tmp_path) == wanted(release)
    assert "7 files (3 recordings)" in summary
    assert "the recipe expects 10344 recordings, the release lists 3" in summary


def test_every_misbehaviour_is_survived(release: Release, tmp_path: Path) -> None:
    mats = [f"{GEORGIA}g1/E0000{i}.mat" for i in (1, 2, 3)]
    release.tricks[SUMS] = ["busy", "break"]
    release.tricks[mats[0]] = ["busy", "busy", "break", "break", "busy"]
    release.tricks[mats[1]] = ["truncate"]
    release.tricks[mats[2]] = ["break", "wrong range"]
    release.tricks[f"{GEORGIA}g1/RECORDS"] = ["garbage"]
    download("g12ec", tmp_path, release.url)
    assert here(tmp_path) == wanted(release)
    offsets = [int(ranged[6:-1]) for ranged in release.asked(mats[0]) if ranged]
    assert len(offsets) == 3
    assert 10_000 < offsets[0] < offsets[1] == offsets[2]  # each attempt goes on where the one before broke off


def test_a_server_without_ranges(release: Release, tmp_path: Path) -> None:
    release.ranges = False
    release.tricks[f"{GEORGIA}g1/E00001.mat"] = ["break", "break"]
    download("g12ec", tmp_path, release.url)
    assert here(tmp_path) == wanted(release)


def test_new_bytes_renew_the_patience(release: Release, tmp_path: Path) -> None:
    path = f"{GEORGIA}g1/E00001.mat"
    release.files[path] = bytes(400_000)
    release.tricks[path] = ["break"] * (2 * http.ATTEMPTS)
    download("g12ec", tmp_path, release.url)
    assert here(tmp_path) == wanted(release)
    release.ranges = False  # now each attempt starts from nothing: no progress, and the patience ends
    release.tricks[path] = ["break"] * (2 * http.ATTEMPTS)
    with pytest.raises(UserError, match=r"1 of 7 files.*E00001.mat: 127.0.0.1:.*the connection breaks off"):
        download("g12ec", tmp_path / "b", release.url)
    assert len(release.tricks[path]) == http.ATTEMPTS - 1  # the first one brought new bytes


def test_a_wrong_checksum_is_named_and_loses_nothing(release: Release, tmp_path: Path, capsys) -> None:
    bad = f"{GEORGIA}g1/E00002.mat"
    release.lies[bad] = "0" * 64
    mine = tmp_path / bad
    mine.parent.mkdir(parents=True)
    mine.write_bytes(b"an older copy")
    with pytest.raises(UserError, match=r"1 of 7 files.*E00002\.mat.*checksum is wrong.*tries again"):
        download("g12ec", tmp_path, release.url)
    assert f"{bad}: 127.0.0.1" in capsys.readouterr().err
    assert mine.read_bytes() == b"an older copy"
    assert here(tmp_path) == wanted(release) | {bad: b"an older copy"}
    assert len(release.asked(bad)) == 2

    release.lies.clear()
    release.log.clear()
    summary = download("g12ec", tmp_path, release.url)
    assert "6 were there" in summary
    assert "1 files differed from the release" in summary
    assert here(tmp_path) == wanted(release) | {f"{bad}.before": b"an older copy"}
    assert sorted(path for path, _ in release.log) == sorted([SUMS, bad])


def test_the_next_source_helps_out(release: Release, tmp_path: Path) -> None:
    path = f"{GEORGIA}g1/E00001.mat"
    sha = hashlib.sha256(release.files[path]).hexdigest()
    target = tmp_path / "E00001.mat"
    dead = "http://127.0.0.1:9/"
    elsewhere = release.url.replace("release", "elsewhere")  # answers 404
    assert Fetcher((dead, elsewhere, release.url)).fetch(path, sha, target) == "fetched"
    assert target.read_bytes() == release.files[path]
    assert Fetcher((dead,)).fetch(path, sha, target) == "kept"
    with pytest.raises(FetchError, match=r"127.0.0.1:9: no connection, .*: HTTP 404"):
        Fetcher((dead, elsewhere)).fetch(path, sha, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_parts_from_before(release: Release, tmp_path: Path) -> None:
    """A complete part needs no request; a part that is too long or of another file starts again."""
    path = f"{GEORGIA}g1/E00001.mat"
    data, sha = release.files[path], hashlib.sha256(release.files[path]).hexdigest()
    for name, part, requests in (("a", data, 0), ("b", data + b"!", 2), ("c", b"?" * 100, 2), ("d", data[:1000], 1)):
        release.log.clear()
        (tmp_path / f"{name}.part").write_bytes(part)
        assert Fetcher((release.url,)).fetch(path, sha, tmp_path / name) == "fetched"
        assert (tmp_path / name).read_bytes() == data
        assert len(release.log) == requests, name
    assert release.log == [(path, "bytes=1000-")]
    empty = hashlib.sha256(b"").hexdigest()
    release.files["empty"] = b""
    assert Fetcher((release.url,)).fetch("empty", empty, tmp_path / "empty") == "fetched"


def cli(to: Path, url: str, *more: str) -> list[str]:
    return [sys.executable, "-m", "ecgmatch_dist", "download", "g12ec", "--to", str(to), "--from", url, *more]


def test_killed_and_resumed(release: Release, tmp_path: Path) -> None:
    release.slow = 0.03
    process = subprocess.Popen(cli(tmp_path, release.url, "--connections", "1"), start_new_session=True)
    mats = [f"{GEORGIA}g1/E0000{i}.mat" for i in (1, 2, 3)]
    deadline = time.monotonic() + 120
    # Half-way: one recording is complete, another has begun.
    while not (
        any((tmp_path / mat).exists() for mat in mats)
        and any(http.size_of(part) for part in tmp_path.rglob("*.mat.part"))
    ):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    before = here(tmp_path)
    assert all(release.files[path] == data for path, data in before.items() if not path.endswith(".part"))
    begun = [path.removesuffix(".part") for path, data in before.items() if path.endswith(".mat.part") and data]
    assert begun
    release.slow = 0.0
    release.log.clear()
    again = subprocess.run(cli(tmp_path, release.url), capture_output=True, text=True, timeout=60)
    assert again.returncode == 0, again.stderr
    assert "Traceback" not in again.stderr
    assert here(tmp_path) == wanted(release)
    asked = {path for path, _ in release.log}
    assert not asked & {path for path in before if not path.endswith(".part")}
    assert all(release.asked(path) == [f"bytes={len(before[path + '.part'])}-"] for path in begun)


def test_the_command_line_says_one_line_and_fails(release: Release, tmp_path: Path) -> None:
    release.lies[f"{GEORGIA}g1/E00001.hea"] = "1" * 64
    run = subprocess.run(cli(tmp_path, release.url), capture_output=True, text=True, timeout=60)
    assert run.returncode == 1
    assert "Traceback" not in run.stderr
    assert run.stderr.count("\n") == 2  # the file and its reason, and the summary
    assert "1 of 7 files of g12ec could not be fetched" in run.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    "path", ["../outside", "/etc/cron.d/x", "training/georgia/../../../x", "training//x", "a\\..\\b", "c:/x", "./../x"]
)
def test_paths_that_leave_the_folder_are_refused(release: Release, tmp_path: Path, path: str) -> None:
    release.extra = f"{'0' * 64} {path}\n"
    with pytest.raises(UserError, match=r"line 10: .*leads out of its folder; nothing has been fetched"):
        download("g12ec", tmp_path / "to", release.url)
    assert here(tmp_path) == {}
    assert [asked for asked, _ in release.log] == [SUMS]


@given(st.text(alphabet="./\\:ab *\x00~", min_size=1, max_size=12))
def test_any_accepted_path_stays_inside(path: str) -> None:
    try:
        sums = read_sums(f"{'a' * 64} {path}", "list")
    except UserError:
        return
    for accepted in sums:
        assert (Path("/to") / accepted).resolve().is_relative_to("/to")


def test_a_page_instead_of_a_list(release: Release, tmp_path: Path) -> None:
    release.extra = "<html>please log in</html>\n"
    with pytest.raises(UserError, match=r"SHA256SUMS.txt, line 10: .*is this the address of a release"):
        download("g12ec", tmp_path, release.url)
    with pytest.raises(UserError, match=r"cannot fetch the list of files: .*HTTP 404.*--from"):
        download("g12ec", tmp_path, release.url + "nothing/")
    release.extra = ""
    with pytest.raises(UserError, match="lists no file of training/ptb-xl/"):
        download("ptbxl", tmp_path, release.url)


def test_a_full_disk_is_one_line(release: Release, tmp_path: Path) -> None:
    part = tmp_path / GEORGIA / "g1" / "E00002.mat.part"
    part.parent.mkdir(parents=True)
    part.symlink_to("/dev/full")
    with pytest.raises(UserError, match="no space left; make room, and the same command continues"):
        download("g12ec", tmp_path, release.url)
    part.unlink()
    download("g12ec", tmp_path, release.url)
    assert here(tmp_path) == wanted(release)


def test_a_lost_network_ends_the_download(release: Release, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downloader, "GIVE_UP", 3)
    for path in wanted(release):
        release.tricks[path] = ["busy"] * 100
    with pytest.raises(UserError, match=r"3 files failed one after the other .*HTTP 503"):
        download("g12ec", tmp_path, release.url, connections=1)
    for path in wanted(release):
        release.tricks[path] = []
    download("g12ec", tmp_path, release.url)
    assert here(tmp_path) == wanted(release)


def test_one_download_per_folder(release: Release, tmp_path: Path) -> None:
    with locked(tmp_path / GEORGIA / downloader.LOCK), pytest.raises(UserError, match="another download"):
        download("g12ec", tmp_path, release.url)
    download("g12ec", tmp_path, release.url)


def test_sources_of_the_recipes() -> None:
    source = find_source(load_recipe("g12ec"), None)
    assert source.folder == "training/georgia/"
    assert source.roots == (
        "https://physionet-open.s3.amazonaws.com/challenge-2021/1.0.3/",
        "https://physionet.org/files/challenge-2021/1.0.3/",
    )
    assert find_source(load_recipe("ptbxl_release"), "http://x/y").roots == ("http://x/y/",)
    for name in ("ptbxl", "ningbo", "chapman", "cpsc2018", "ptbxl_release"):
        assert find_source(load_recipe(name), None).roots[0].startswith("https://physionet-open")
    for wrong in ("ftp://x/", "file:///etc", "pipe:cat x"):
        with pytest.raises(UserError, match="no http"):
            find_source(load_recipe("g12ec"), wrong)


def test_only_the_files_a_recipe_reads() -> None:
    paths = ["records100/00000/00001_lr.dat", "records500/00000/00001_hr.dat", "records500/00000/00001_hr.hea"]
    paths += ["ptbxl_database.csv", SUMS]
    assert set(choose(paths, "", ("records500/*/*_hr.hea",))) == {paths[1], paths[2], paths[3]}
    assert choose(["a/b/c.hea", "a/x.mat", "z.hea"], "a/", ("**/*.hea",)) == {
        "a/b/c.hea": "b/c.hea",
        "a/x.mat": "x.mat",
    }


def test_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--connections 0"):
        download("g12ec", tmp_path, connections=0)
    with pytest.raises(UserError, match="no recipe `mimic`"):
        download("mimic", tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="file"):
        download("g12ec", tmp_path / "file", "http://127.0.0.1:9/")
