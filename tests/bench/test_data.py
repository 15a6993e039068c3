"""The benchmark of the data path runs and measures what it says. No test depends on speed."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ecgmatch_dist import bench
from ecgmatch_dist.bench import data
from ecgmatch_dist.data.preprocess import PRESETS, preprocess
from ecgmatch_dist.data.store import ShardStore
from ecgmatch_dist.errors import UserError
from tests.support.shard_factory import make_shards


def test_the_official_recipe_gives_what_our_preset_gives() -> None:
    """Otherwise the two would not be compared on the same work."""
    t = np.arange(5000) / 500
    rng = np.random.default_rng(0)
    x = (np.sin(2 * np.pi * 7 * t) + rng.standard_normal((12, 5000))).astype(np.float32)
    settings = PRESETS["official_code"]
    ours, _ = preprocess(x, 500, settings)
    assert np.abs(ours - data.official_recipe(x, 500, settings, data.design)).max() < 1e-3


def test_an_enlarged_database_is_a_database(tmp_path: Path) -> None:
    x = make_shards(tmp_path / "small", "chapman", 20)
    data.enlarge(tmp_path / "small", "chapman", tmp_path / "large", 3)
    store = ShardStore(tmp_path / "large", ["chapman"], check=True)
    assert len(store) == 60
    assert np.array_equal(store.read(np.arange(60)), np.concatenate([x, x, x]))


def test_ways_take_turns_and_the_first_turn_does_not_count(monkeypatch: Any) -> None:
    clock, calls = [0.0], []
    monkeypatch.setattr(bench.time, "perf_counter", lambda: clock[0])

    def way(name: str, seconds: list[float]) -> Any:
        def run() -> None:
            clock[0] += seconds[calls.count(name)]
            calls.append(name)

        return run

    medians = bench.interleave({"a": way("a", [100, 1, 9, 2]), "b": way("b", [100, 4, 4, 5])}, 3)
    assert calls == ["a", "b"] * 4
    assert medians == {"a": 2, "b": 4}


def test_unknown_benchmarks_are_named(capsys: Any) -> None:
    with pytest.raises(UserError, match=r"there are .*data"):
        bench.main(["nothing"])
    bench.main([])
    assert "data" in capsys.readouterr().out


def test_the_share_of_a_checksum_is_told(tmp_path: Path) -> None:
    make_shards(tmp_path, "chapman", 20)
    row = data.bench_first_reading(tmp_path, "chapman", 1)
    assert (row.unit, row.ours_value > 0, row.ratio) == ("µs", True, row.other_value / row.ours_value)
    disk, cache, share = (float(text) for text in re.findall(r"([\d.]+)(?: µs|%)", row.note))
    assert disk > 0 < cache
    assert abs(share - 100 * row.ours_value / disk) < 1  # of rounded microseconds


@pytest.mark.slow
def test_the_command_end_to_end(tmp_path: Path) -> None:
    """Synthetic recordings, the real builder, all measurements, in the smallest size."""
    command = [sys.executable, "-m", "ecgmatch_dist", "bench", "data", "--recordings", "64", "--repeats", "1"]
    result = subprocess.run(
        [*command, "--json", str(tmp_path / "x.json")], capture_output=True, text=True, check=False, timeout=250
    )
    assert result.returncode == 0, result.stderr
    rows = json.loads((tmp_path / "x.json").read_text())
    whats = ["preprocessing", "building shards", "building shards", "random batches of 64", "random batches of 64"]
    whats.append("checksum at the first reading")
    whats += [f"a batch of 56 from storage that answers after {ms} ms" for ms in ("0.5", "5")]
    modes = ["time to the first batch", "recordings per second", "memory of reading", "mixing"]
    assert [row["what"].split(",")[0] for row in rows] == [*whats, "peak memory of a rank", *modes, *modes]
    assert [row["other"] for row in rows[-8:]] == ["windows through a cache"] * 4 + ["webdataset's pipeline"] * 4
    assert ["designed anew for each lead" in row["other"] for row in rows[:3]] == [False, True, False]
    assert all(row["ratio"] > 0 for row in rows)
    assert "peak memory" in result.stdout
