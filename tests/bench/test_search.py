"""The benchmark of the search, at a tiny size: what it compares, and what it refuses."""

import json
from pathlib import Path

import numpy as np
import pytest

from ecgmatch_dist.bench import search
from ecgmatch_dist.errors import UserError


@pytest.mark.slow
def test_search_and_exchange_against_faiss_and_gathering(tmp_path: Path) -> None:
    search.main(rows=(64, 128), queries=8, dim=4, repeats=1, json=tmp_path / "search.json")
    rows = json.loads((tmp_path / "search.json").read_text())
    assert len(rows) % 2 == 0, "the same comparisons at each size"
    assert len({row["other"] for row in rows}) > 1
    for row in rows:
        assert row["ours_value"] > 0
        assert row["ratio"] > 0


def test_looks_in_a_bank_of_a_runs_features(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "bank.npz", features=rng.standard_normal((40, 4), dtype=np.float32))
    search.main(rows=(64,), queries=8, repeats=0, features=tmp_path / "bank.npz", json=tmp_path / "looks.json")
    assert json.loads((tmp_path / "looks.json").read_text())


@pytest.mark.parametrize(("queries", "rows"), [(7, 64), (0, 64), (80, 64)])
def test_sizes_that_cannot_be_are_refused(queries: int, rows: int) -> None:
    with pytest.raises(UserError, match=r"at least 1; even; at least the queries"):
        search.main(rows=(rows,), queries=queries)
