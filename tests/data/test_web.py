"""Webdataset's own pipeline: every recording, on any ranks; resumed by counting; foreign tars, also from a server."""

import io
import json
import shutil
import tarfile
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ecgmatch_dist.config import Data
from ecgmatch_dist.data import web_stream
from ecgmatch_dist.data.archive import list_archive
from ecgmatch_dist.data.store import ShardStore
from ecgmatch_dist.data.unlabelled import shards_of_part
from ecgmatch_dist.data.web_shards import plain_webdataset
from ecgmatch_dist.data.web_stream import WebStream
from ecgmatch_dist.errors import UserError
from tests.support.ranks import run_processes
from tests.support.shard_factory import make_shards
from tests.support.training import assert_same_bits, final_state, make_data, run, tiny
from tests.support.web_server import Server

ROWS = np.random.default_rng(0).permutation(60)[:50]  # tars of 7 recordings, of which 4 to 7 are in the part


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root: Path = tmp_path_factory.mktemp("shards")
    make_shards(root, "chapman", 60, length=32)
    return root


@pytest.fixture(scope="module")
def store(place: Path) -> ShardStore:
    return ShardStore(place, ["chapman"])


def stream(store: ShardStore, batch: int = 4, rank: int = 0, world: int = 1, workers: int = 1) -> WebStream:
    return WebStream(shards_of_part(store, ROWS), 32, batch, 3, rank, world, workers, buffer=8)


def write_foreign(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """A tar as somebody else would write it: `<key>.npy` in float32, and a text that we do not know."""
    with tarfile.open(path, "w") as tar:
        for key, x in arrays.items():
            array = io.BytesIO()
            np.save(array, x)
            for suffix, data in ((".npy", array.getvalue()), (".txt", b"normal")):
                info = tarfile.TarInfo(key + suffix)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    (tmp_path / "www").mkdir()
    with Server(tmp_path / "www") as found:
        threading.Thread(target=found.serve_forever, args=(0.02,), daemon=True).start()
        yield found
        found.shutdown()


def test_the_pipelines_threads_fill_the_memory_that_they_are_given(store: ShardStore) -> None:
    """For a GPU it is pinned, and the main thread must not wait for that."""
    given: list[tuple[str, np.ndarray]] = []

    def memory(count: int) -> np.ndarray:
        given.append((threading.current_thread().name, np.full((count, 12, 32), np.nan, np.float16)))
        return given[-1][1]

    rank = WebStream(shards_of_part(store, ROWS), 32, 4, 3, 0, 1, buffer=8, memory=memory)
    batch = next(iter(rank.iterate(0, 1)))
    assert batch.x is given[0][1]
    assert given[0][0].startswith("reader")
    assert np.array_equal(batch.x, store.read(ROWS[batch.ids]))


def test_plain_webdataset_reads_our_shards_without_the_index(place: Path, store: ShardStore) -> None:
    samples = list(plain_webdataset(str(place / "chapman" / "chapman-{000000..000008}.tar")))
    assert [s["key"] for s in samples] == [f"chapman{i:05d}" for i in range(60)]
    assert np.array_equal(np.stack([s["x"] for s in samples]), store.read(np.arange(60)))
    assert samples[11]["row"] == 11
    urls = sorted(map(str, (place / "chapman").glob("*.tar")))
    mixed = [s["key"] for s in plain_webdataset(urls, shuffle=20)]
    assert mixed != sorted(mixed) == [s["key"] for s in samples]


def test_plain_webdataset_refuses_commands_and_pickles(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    for url in (f"pipe:touch {marker}", f"pipe:touch${{IFS}}{marker}", "http://127.0.0.1:9/x';touch y;'"):
        with pytest.raises(UserError):
            plain_webdataset([url])
    array = io.BytesIO()
    np.save(array, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with tarfile.open(tmp_path / "bad.tar", "w") as tar:
        for name, data in (("a.ecg.npy", array.getvalue()), ("a.json", json.dumps({}).encode())):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    with pytest.raises(UserError, match=r"bad\.tar, at a"):
        list(plain_webdataset(str(tmp_path / "bad.tar")))
    with pytest.raises(UserError, match="no such shard"):
        list(plain_webdataset(str(tmp_path / "none.tar")))
    (tmp_path / "text.tar").write_text("hello" * 1000)
    with pytest.raises(UserError, match="not a shard"):
        list(plain_webdataset(str(tmp_path / "text.tar")))
    assert not marker.exists()


def test_one_rank_sees_each_recording_once_an_epoch(store: ShardStore) -> None:
    for workers in (1, 2):
        batches = list(stream(store, 5, workers=workers).iterate(0, 30))
        ids = np.concatenate([batch.ids for batch in batches])
        assert all(np.array_equal(batch.x, store.read(ROWS[batch.ids])) for batch in batches)
        if workers == 1:
            assert all(sorted(ids[e * 50 : (e + 1) * 50]) == list(range(50)) for e in range(3))
            assert not np.array_equal(ids[:50], ids[50:100])
            assert len({int(i) // 7 for i in ROWS[ids[:7]]}) > 1  # the buffer mixes tars


def test_uneven_ranks_never_run_dry_and_see_everything(store: ShardStore) -> None:
    for world, workers in ((2, 1), (3, 1), (2, 2)):
        ranks = [stream(store, 2 * world, rank, world, workers) for rank in range(world)]
        seen = [np.concatenate([b.ids for b in found.iterate(0, 100)]) for found in ranks]
        assert {len(ids) for ids in seen} == {200}
        counts = Counter(np.concatenate(seen).tolist())
        assert set(counts) == set(range(50))
        # 200 W draws of 50 recordings; a rank with smaller tars goes through its share sooner, so this is not exact
        assert max(counts.values()) < 2.5 * 4 * world
        assert not np.array_equal(seen[0], seen[1])


def test_a_pass_shows_everything_once_with_as_many_batches_on_all_ranks(store: ShardStore) -> None:
    for world, limit in ((1, None), (2, None), (3, 17)):
        ranks = [list(stream(store, 12, rank, world).once(12, limit)) for rank in range(world)]
        assert len({len(batches) for batches in ranks}) == 1
        assert {b.x.shape for batches in ranks for b in batches} == {(12 // world, 12, 32)}
        ids = np.concatenate([b.ids[b.valid] for batches in ranks for b in batches])
        assert sorted(ids) == list(range(limit or 50))
        assert all(np.array_equal(b.x[b.valid], store.read(ROWS[b.ids[b.valid]])) for r in ranks for b in r)


@pytest.mark.parametrize("workers", [1, 2])
def test_resuming_equals_never_having_stopped_and_opens_only_what_is_left(
    store: ShardStore, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = stream(store, 4, rank=1, world=2, workers=workers)
    whole = list(mine.iterate(0, 40, readers=0))
    opened: list[str] = []
    original = web_stream.read_tar
    monkeypatch.setattr(web_stream, "read_tar", lambda url: opened.append(url) or original(url))
    for start in (1, 7, 12, 23, 39):
        opened.clear()
        resumed = list(mine.iterate(start, 40, readers=1))
        assert len(resumed) == 40 - start
        for one, other in zip(whole[start:], resumed, strict=True):
            assert np.array_equal(one.ids, other.ids)
            assert np.array_equal(one.x, other.x)
    if workers == 1:  # batch 39 of two recordings: near the end of an epoch of about 25, after three whole ones
        assert len(opened) <= 5
    assert np.array_equal(mine[23].ids, whole[23].ids)


def test_mistakes_are_refused(store: ShardStore, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"9 tars with unlabelled recordings for 5 ranks with 2 workers"):
        stream(store, 10, 0, 5, workers=2)
    with pytest.raises(UserError, match="multiple of 3"):
        stream(store, 4, 0, 3)
    for wrong in ({"archive": "x.tar"}, {"workers": 2}, {"buffer": 5}, {"reader": "webdataset", "window": 3}):
        with pytest.raises(UserError, match=rf"data\.{list(wrong)[-1]} = "):
            Data(**wrong)  # type: ignore[arg-type]
    write_foreign(tmp_path / "short.tar", {"a": np.zeros((12, 32)), "b": np.zeros((12, 31))})
    with pytest.raises(UserError, match=r"short\.tar, at b: float64 \[12, 31\], expected numbers \[12, 32\]"):
        list_archive(str(tmp_path / "short.tar"), 32, ())
    write_foreign(tmp_path / "nan.tar", {"a": np.full((12, 32), np.nan)})
    with pytest.raises(UserError, match=r"nan\.tar, at a: .*not finite"):
        list_archive(str(tmp_path / "nan.tar"), 32, ())


def test_a_tar_that_was_changed_is_noticed(store: ShardStore, tmp_path: Path) -> None:
    write_foreign(tmp_path / "x.tar", {"a": np.zeros((12, 32)), "b": np.ones((12, 32))})
    found = WebStream(list_archive(str(tmp_path / "x.tar"), 32, ()).shards(0), 32, 1, 0, 0, 1)
    write_foreign(tmp_path / "x.tar", {"a": np.zeros((12, 32))})
    with pytest.raises(UserError, match=r"x\.tar: 1 of the 2 recordings that were listed"):
        list(found.once(1))


def test_an_archive_on_a_server_without_an_index(server: Server) -> None:
    x = np.random.default_rng(1).standard_normal((10, 12, 32)).astype(np.float32)
    for number, rows in enumerate((range(6), range(6, 10))):
        write_foreign(server.root / f"x-{number}.tar", {f"r{i}": x[i] for i in rows})
    server.fail["x-1.tar"] = 1  # the connection breaks off once
    archive = list_archive(server.url + "/x-{0..1}.tar", 32, {"r3", "r7", "other"})
    assert archive.names == [f"x-{i // 6}.tar/r{i}" for i in range(10) if i not in (3, 7)]
    assert (len(archive), archive.left_out) == (8, 2)
    found = WebStream(archive.shards(100), 32, 4, 0, 0, 1, buffer=3)
    kept = np.delete(x, [3, 7], axis=0).astype(np.float16)
    for batch in found.iterate(0, 6):
        assert np.array_equal(batch.x, kept[batch.ids - 100])
    with pytest.raises(UserError, match="no such shard"):
        list_archive(f"{server.url}/y.tar", 32, ())


def _train(rank: int, world: int, data: Path, runs: Path) -> Path:
    """The shards have 64, 64, 64 and 8 recordings; the archive's tars 5 and 2."""
    reading = Data(reader="webdataset", archive=str(data / "archive"), buffer=20)
    return run(replace(tiny(data, runs), data=reading))


@pytest.mark.slow
def test_two_ranks_train_on_uneven_tars_and_resume_to_the_bit(tmp_path: Path) -> None:
    make_data(tmp_path)
    (tmp_path / "archive").mkdir()
    x = np.random.default_rng(2).standard_normal((7, 12, 128)).astype(np.float32)
    for number, rows in enumerate((range(5), range(5, 7))):
        write_foreign(tmp_path / "archive" / f"{number}.tar", {f"r{i}": x[i] for i in rows})
    folder = run_processes(2, _train, tmp_path, tmp_path / "runs", timeout=120)[0]
    before = final_state(folder)
    assert "bank: 135 rows, 1 x 2 blocks" in (folder / "log.txt").read_text()  # 128 of the split and 7 of the archive
    assert "archive: 7 recordings" in (folder / "log.txt").read_text()

    # as if it had been killed after step 10, and the archive's tars were not listed again
    (folder / "result.json").unlink()
    shutil.rmtree(max((folder / "checkpoints").glob("step-*12*")))
    listed = (folder / "archive.json").stat().st_mtime_ns
    run_processes(2, _train, tmp_path, tmp_path / "runs", timeout=120)
    assert (folder / "archive.json").stat().st_mtime_ns == listed
    assert "resumed at step 10" in (folder / "log.txt").read_text()
    assert_same_bits(before, final_state(folder))
