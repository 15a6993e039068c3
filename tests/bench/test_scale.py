"""The benchmark of scale: what it counts equals its formulas, and only gathering the bank depends on the bank's size."""

import json
from pathlib import Path

import pytest

from ecgmatch_dist.bench import scale
from ecgmatch_dist.errors import UserError


def test_counts_equal_the_formulas() -> None:
    moved = scale.bench_bytes((1000, 3001), 4, "threads")
    assert [x.counted for x in moved] == [x.formula for x in moved]
    assert all(x.least <= x.formula for x in moved)
    small, large = ({x.way: x.counted for x in moved if x.rows == n} for n in (1000, 3001))
    (gathered,) = (way for way in small if small[way] != large[way])
    assert gathered == "(a) whole bank gathered"
    assert (small[gathered], large[gathered]) == (3 * 250 * 532, 3 * 751 * 532)
    # By hand, for 4 ranks with 112 rows each: row 8 + 512 + 20 bytes, query 512, candidate 16 + 20.
    assert small["(b) replicated"] == 3 * 112 * 540
    assert small["(c) sharded over all"] == 3 * (112 * 540 + 112 * 512 + 112 * 5 * 36)
    assert small["(d) sharded in 2 nodes of 2"] == 112 * 540 + 2 * 112 * 540 + 112 * 512 + 112 * 5 * 36


def test_one_rank_moves_nothing() -> None:
    assert {x.counted for x in scale.bench_bytes((1000,), 1, "processes")} == {0}


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(
        scale, "bench_bytes", lambda rows, w, kind: [scale.Moved(w, kind, rows[0], "(a)", 7, None, 7, 5)]
    )
    monkeypatch.setattr(scale, "bench_throughput", lambda bank, repeats: {"throughput of two ranks over one": 1.25})
    scale.main(json=tmp_path / "scale.json")
    assert "4 of 4 counts equal their formula" in capsys.readouterr().out
    numbers = json.loads((tmp_path / "scale.json").read_text())
    assert [x["ranks"] for x in numbers["bytes"]] == [1, 2, 4, 8]
    assert numbers["times"] == {"throughput of two ranks over one": 1.25}
    with pytest.raises(UserError, match="--rows"):
        scale.main(rows=(10,))
