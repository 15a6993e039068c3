"""Random access to shards, here and behind a web server, and what is refused."""

import hashlib
import json
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ecgmatch_dist.data import remote, store
from ecgmatch_dist.data.remote import RemoteFolder, plain_name, scheme_of
from ecgmatch_dist.data.store import ShardStore
from ecgmatch_dist.data.stream import Stream
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.files.lock import locked
from tests.support.shard_factory import make_shards
from tests.support.web_server import Server


@pytest.fixture
def shards(tmp_path: Path) -> tuple[Path, np.ndarray]:
    one = make_shards(tmp_path / "shards", "chapman", 30, seed=1)
    two = make_shards(tmp_path / "shards", "g12ec", 17, seed=2)
    return tmp_path / "shards", np.concatenate([one, two])


def change(path: Path, **fields: Any) -> None:
    """Other values in a dataset.json."""
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def rewrite_manifest(folder: Path, old: str, new: str) -> None:
    """A manifest that was changed together with its checksum: only its content can be wrong."""
    text = (folder / "manifest.csv").read_text()
    assert old in text
    (folder / "manifest.csv").write_text(text.replace(old, new, 1))
    digest = hashlib.sha256((folder / "manifest.csv").read_bytes()).hexdigest()
    change(folder / "dataset.json", manifest_sha256=digest)


def test_reads_any_rows_in_any_order(shards: tuple[Path, np.ndarray]) -> None:
    root, x = shards
    s = ShardStore(root, ["chapman", "g12ec"])
    assert (len(s), s.length, s.rate) == (47, 64, 100)
    rows = np.random.default_rng(0).integers(0, 47, 200)
    out = np.empty((200, 12, 64), np.float16)
    assert s.read(rows, out) is out
    assert np.array_equal(out, x[rows])
    assert s.read(np.array([], np.int64)).shape == (0, 12, 64)


def test_ids_are_rows(shards: tuple[Path, np.ndarray]) -> None:
    s = ShardStore(str(shards[0]), ["chapman", "g12ec"])
    assert s.rows(["g12ec/g12ec00003", "chapman/chapman00029", "g12ec/g12ec00003"]).tolist() == [33, 29, 33]
    assert s.manifest["id"].iloc[33] == "g12ec/g12ec00003"
    assert s.rows([]).shape == (0,)
    with pytest.raises(UserError, match="chapman/nobody"):
        s.rows(["chapman/chapman00000", "chapman/nobody"])


def test_threads_share_a_store_that_keeps_few_files_open(shards: tuple[Path, np.ndarray], monkeypatch: Any) -> None:
    monkeypatch.setattr(store, "KEEP_OPEN", 2)
    root, x = shards
    s = ShardStore(root, ["chapman", "g12ec"])
    rows = [np.random.default_rng(i).integers(0, 47, 50) for i in range(40)]
    with ThreadPoolExecutor(8) as pool:
        for asked, got in zip(rows, pool.map(s.read, rows), strict=True):
            assert np.array_equal(got, x[asked])
    assert len(s._files) <= 2


def test_a_pickled_store_opens_its_own_files(shards: tuple[Path, np.ndarray]) -> None:
    root, x = shards
    s = ShardStore(root, ["chapman"])
    s.read(np.arange(3))
    other = pickle.loads(pickle.dumps(s))
    assert s._files
    assert not other._files
    assert np.array_equal(other.read(np.arange(30)), x[:30])


def test_bytes_that_change_under_a_run_are_noticed_at_the_first_reading(shards: tuple[Path, np.ndarray]) -> None:
    """A byte of recording 11 changes, the file's length does not, while two stores have the shard open."""
    root, x = shards
    first, again = ShardStore(root, ["chapman"]), ShardStore(root, ["chapman"], check=True)
    row = first.manifest.iloc[11]
    for opened in (first, again):
        opened.read(np.arange(7, 11))
    again.read(np.arange(11, 12))
    path = root / "chapman" / row["shard"]
    with path.open("r+b") as file:
        file.seek(row["offset"] + 5)
        (byte,) = file.read(1)
        file.seek(row["offset"] + 5)
        file.write(bytes([byte ^ 1]))
    assert np.array_equal(first.read(np.arange(7, 11)), x[7:11])
    for opened in (first, again, ShardStore(root, ["chapman"])):  # `check` verifies what was read before, too
        with pytest.raises(UserError, match=r"chapman-000001\.tar: the checksum of chapman/chapman00011 is wrong"):
            opened.read(np.arange(30))


def test_a_stream_stops_at_changed_bytes(shards: tuple[Path, np.ndarray]) -> None:
    """On a reader's thread, batches ahead: the loop that trains gets the name."""
    root, _ = shards
    stream = Stream(ShardStore(root, ["chapman"]), np.arange(30), 5, 1, 0, 1)
    batches = stream.iterate(0, 12, readers=2, ahead=1)
    next(batches)
    for path in (root / "chapman").glob("*.tar"):
        with path.open("r+b") as file:
            file.seek(512 + 128 + 5)
            file.write(b"x")
    with pytest.raises(UserError, match=r"the checksum of chapman/chapman000\d\d is wrong"):
        list(batches)


def test_a_shard_of_another_size_is_refused_by_name(shards: tuple[Path, np.ndarray]) -> None:
    path = shards[0] / "chapman" / "chapman-000002.tar"
    path.write_bytes(path.read_bytes()[:-512])
    with pytest.raises(UserError, match=r"chapman-000002\.tar.*bytes"):
        ShardStore(shards[0], ["chapman"])
    path.unlink()
    with pytest.raises(UserError, match=r"chapman-000002\.tar.*missing"):
        ShardStore(shards[0], ["chapman"])


def test_an_index_that_does_not_fit_its_tar_is_refused_by_name(shards: tuple[Path, np.ndarray]) -> None:
    folder = shards[0] / "chapman"
    offset = str(ShardStore(shards[0], ["chapman"]).manifest["offset"].iloc[7])
    rewrite_manifest(folder, f"chapman-000001.tar,{offset},", f"chapman-000001.tar,{int(offset) + 2},")
    s = ShardStore(shards[0], ["chapman"])
    s.read(np.arange(7))
    with pytest.raises(UserError, match=r"chapman-000001\.tar.*manifest\.csv does not match the tar"):
        s.read(np.arange(10))
    rewrite_manifest(folder, f"chapman-000001.tar,{int(offset) + 2},", "chapman-000001.tar,99999999,")
    with pytest.raises(UserError, match=r"chapman-000001\.tar.*does not match.*chapman00007"):
        ShardStore(shards[0], ["chapman"])


def test_a_shard_that_is_cut_while_in_use(shards: tuple[Path, np.ndarray]) -> None:
    s = ShardStore(shards[0], ["chapman"])
    s.read(np.arange(7))
    path = shards[0] / "chapman" / "chapman-000000.tar"
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)
    with pytest.raises(UserError, match=r"chapman-000000\.tar.*cut"):
        s.read(np.arange(7))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"format": 2}, "format"),
        ({"database": "ningbo"}, "database"),
        ({"dtype": "float32"}, "dtype"),
        ({"recordings": 29}, "recordings"),
        ({"shards": []}, "shards"),
        ({"length": 128}, "length"),
        ({"rate": 500}, "rate"),
    ],
)
def test_a_dataset_that_does_not_fit_is_refused(shards: Any, fields: dict[str, Any], message: str) -> None:
    change(shards[0] / "chapman" / "dataset.json", **fields)
    with pytest.raises(UserError, match=message):
        ShardStore(shards[0], ["chapman", "g12ec"])


def test_a_manifest_that_was_edited_is_refused(shards: tuple[Path, np.ndarray]) -> None:
    path = shards[0] / "chapman" / "manifest.csv"
    path.write_text(path.read_text().replace("chapman00004", "chapman99999"))
    with pytest.raises(UserError, match=r"manifest\.csv"):
        ShardStore(shards[0], ["chapman"])


def test_names_that_leave_the_folder_are_refused(shards: tuple[Path, np.ndarray]) -> None:
    folder = shards[0] / "chapman"
    text = (folder / "manifest.csv").read_text().replace("chapman-000000.tar", "../../secret.tar")
    (folder / "manifest.csv").write_text(text)
    dataset = json.loads((folder / "dataset.json").read_text())
    dataset["shards"][0]["name"] = "../../secret.tar"
    dataset["manifest_sha256"] = hashlib.sha256(text.encode()).hexdigest()
    (folder / "dataset.json").write_text(json.dumps(dataset))
    with pytest.raises(UserError, match="secret"):
        ShardStore(shards[0], ["chapman"])
    for name in ("", ".", "..", "a/b", "-x", "a\n", "a b", "a;b"):
        with pytest.raises(UserError):
            plain_name(name, "here")


def test_missing_folders_say_what_is_there(shards: tuple[Path, np.ndarray], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        ShardStore(tmp_path / "nowhere", ["chapman"])
    with pytest.raises(UserError, match="here: chapman, g12ec"):
        ShardStore(shards[0], ["ningbo"])
    with pytest.raises(UserError, match="each once"):
        ShardStore(shards[0], ["chapman", "chapman"])


@pytest.mark.parametrize(
    "url",
    [
        "pipe:cat /etc/passwd",
        "pipe://x",
        "PIPE:ls",
        "exec:ls",
        "ssh://host/x",
        "simplecache::http://x/y",
        "http://host/$(touch x)",
        "http://host/a;b",
        "http://host/a|b",
        "https://host/a'b",
        "s3://bucket/a&b",
        "http://host/`x`",
        "http://host/a b",
        "http://host/a\nb",
        "http://host/zip::b",
        "http:host",
        "local:file",
    ],
)
def test_urls_that_could_start_a_command_are_refused(url: str, tmp_path: Path) -> None:
    with pytest.raises(UserError):
        ShardStore(url, ["chapman"], cache=tmp_path)


def test_urls_and_folders_are_told_apart() -> None:
    assert [scheme_of(u) for u in ("data/shards", "./a:b", "/x", "HTTP://h/x", "s3://b/k")] == [
        "",
        "",
        "",
        "http",
        "s3",
    ]


@pytest.fixture
def server(shards: tuple[Path, np.ndarray], monkeypatch: Any) -> Iterator[Server]:
    monkeypatch.setattr(remote, "PAUSE", 0.0)
    with Server(shards[0]) as s:
        thread = threading.Thread(target=s.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        yield s
        s.shutdown()


def cached_bytes(cache: Path) -> int:
    return sum(p.stat().st_size for p in (cache / "shards").iterdir())


def test_remote_shards_are_fetched_once(shards: Any, server: Server, tmp_path: Path) -> None:
    s = ShardStore(server.url, ["chapman", "g12ec"], cache=tmp_path / "cache", check=True)
    rows = np.random.default_rng(0).permutation(47)
    assert np.array_equal(s.read(rows), shards[1][rows])
    again = pickle.loads(pickle.dumps(s))
    assert np.array_equal(again.read(rows), shards[1][rows])
    tars = [name for name in server.asked if name.endswith(".tar")]
    assert len(tars) == len(set(tars)) == len(s.shards)


def test_the_cache_is_bounded_and_evicts_the_longest_unused(shards: Any, server: Server, tmp_path: Path) -> None:
    size = max(p.stat().st_size for p in shards[0].glob("*/*.tar"))
    cache = tmp_path / "cache"
    s = ShardStore(server.url, ["chapman"], cache=cache, cache_bytes=int(2.5 * size))
    order = [0, 1, 0, 2, 0, 1]  # shard 0 stays: it is always the more recent; 1 makes room for 2, 2 for 1
    for shard in order:
        assert np.array_equal(s.read(np.array([7 * shard])), shards[1][[7 * shard]])
        assert cached_bytes(cache) <= 2.5 * size
        time.sleep(0.01)
    tars = [name[-5] for name in server.asked if name.endswith(".tar")]
    assert tars == ["0", "1", "2", "1"]
    with pytest.raises(UserError, match="do not fit the cache"):
        ShardStore(server.url, ["chapman"], cache=tmp_path / "small", cache_bytes=size // 2).read(np.arange(2))


def test_threads_fetch_together_within_the_bound(shards: Any, server: Server, tmp_path: Path) -> None:
    size = max(p.stat().st_size for p in shards[0].glob("*/*.tar"))
    cache = tmp_path / "cache"
    server.delay = 0.01
    s = ShardStore(server.url, ["chapman", "g12ec"], cache=cache, cache_bytes=2 * size)
    most, stop = [0], threading.Event()

    def watch() -> None:
        while not stop.wait(0.002):
            with suppress(FileNotFoundError):  # evicted between glob and stat
                most[0] = max(most[0], sum(p.stat().st_size for p in (cache / "shards").glob("*.tar")))

    watcher = threading.Thread(target=watch)
    watcher.start()
    rows = [np.random.default_rng(i).integers(0, 47, 6) for i in range(12)]
    with ThreadPoolExecutor(4) as pool:
        for asked, got in zip(rows, pool.map(s.read, rows), strict=True):
            assert np.array_equal(got, shards[1][asked])
    stop.set()
    watcher.join()
    assert 0 < most[0] <= 2 * size
    assert not list((cache / "shards").glob("*.part"))


def test_a_shard_arrives_only_while_nobody_counts_the_cache(shards: Any, server: Server, tmp_path: Path) -> None:
    """Renamed between the two lists of whoever makes room, it would be in neither, and the cache would outgrow its bound."""
    server.delay = 0.2
    s = ShardStore(server.url, ["chapman"], cache=tmp_path)
    folder = tmp_path / "shards"
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(s.read, np.arange(2))
        while not list(folder.glob("*.part")):
            time.sleep(0.002)
        with locked(folder / "room.lock"):
            time.sleep(0.6)
            assert list(folder.glob("*.part"))
            assert not list(folder.glob("*.tar"))
        assert np.array_equal(reading.result(), shards[1][:2])


def test_threads_that_want_one_shard_fetch_it_once(shards: Any, server: Server, tmp_path: Path) -> None:
    server.delay = 0.05
    s = ShardStore(server.url, ["chapman"], cache=tmp_path / "cache")
    with ThreadPoolExecutor(4) as pool:
        for got in pool.map(s.read, [np.arange(5)] * 4):
            assert np.array_equal(got, shards[1][:5])
    assert server.asked.count("chapman-000000.tar") == 1


def test_processes_share_a_cache(shards: Any, server: Server, tmp_path: Path) -> None:
    server.delay = 0.02
    code = (
        "import sys, pathlib, numpy as np; from ecgmatch_dist.data.store import ShardStore\n"
        "s = ShardStore(sys.argv[1], ['chapman'], cache=pathlib.Path(sys.argv[2]), check=True)\n"
        "print(len(s.read(np.random.default_rng(int(sys.argv[3])).permutation(30))))"
    )
    command = [sys.executable, "-c", code, server.url, str(tmp_path / "cache")]
    children = [subprocess.Popen([*command, str(i)], stdout=subprocess.PIPE) for i in range(2)]
    assert [child.communicate(timeout=60)[0].strip() for child in children] == [b"30"] * 2
    tars = [name for name in server.asked if name.endswith(".tar")]
    assert len(tars) == len(set(tars)) == 5


def test_a_broken_transfer_is_repeated_and_a_false_one_refused(shards: Any, server: Server, tmp_path: Path) -> None:
    server.fail = {"chapman-000000.tar": 1}
    s = ShardStore(server.url, ["chapman"], cache=tmp_path / "cache")
    assert np.array_equal(s.read(np.arange(7)), shards[1][:7])
    assert server.asked.count("chapman-000000.tar") == 2
    server.corrupt = {"chapman-000001.tar"}
    with pytest.raises(UserError, match=r"chapman-000001\.tar.*checksum"):
        s.read(np.arange(7, 14))
    assert not list((tmp_path / "cache" / "shards").glob("*.part"))
    server.corrupt = set()
    assert np.array_equal(s.read(np.arange(7, 14)), shards[1][7:14])


def test_what_a_killed_fetch_left_is_cleared(shards: Any, server: Server, tmp_path: Path) -> None:
    size = max(p.stat().st_size for p in shards[0].glob("*/*.tar"))
    s = ShardStore(server.url, ["chapman"], cache=tmp_path / "cache", cache_bytes=int(1.5 * size))
    orphan = tmp_path / "cache" / "shards" / f"{'0' * 64}.{size}.part"
    orphan.write_bytes(b"half")
    s.read(np.arange(3))
    assert not orphan.exists()


def test_a_missing_remote_says_where(server: Server, tmp_path: Path, monkeypatch: Any) -> None:
    with pytest.raises(UserError, match=r"ningbo/dataset\.json: not found"):
        ShardStore(server.url, ["ningbo"], cache=tmp_path)
    monkeypatch.setattr(remote, "ATTEMPTS", 1)
    with pytest.raises(UserError, match="127"):
        RemoteFolder("http://127.0.0.1:9", tmp_path, 1).folder("chapman")
