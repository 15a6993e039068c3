"""The archive of the benchmark is one that can be opened, split and read."""

from pathlib import Path

import numpy as np
import pytest

from ecgmatch_dist.bench import archive
from ecgmatch_dist.capacity import cost
from ecgmatch_dist.data.index import read_manifest
from ecgmatch_dist.data.make_split import make_split
from ecgmatch_dist.data.split_file import PARTS, Split
from ecgmatch_dist.data.store import ShardStore
from ecgmatch_dist.errors import UserError


def test_the_archive_is_what_it_says(tmp_path: Path) -> None:
    archive.make_archive(tmp_path, 20_000, 500, 16, with_csv=True)
    store = ShardStore(tmp_path, ["archive"], check=True)
    assert store.tables[0].path is not None
    texts = read_manifest(tmp_path / "archive")
    assert store.tables[0].frame(slice(9_990, 10_010)).equals(texts[9_990:10_010].reset_index(drop=True))
    assert (texts["codes"] != "").sum() == 500
    size = (tmp_path / "archive/manifest.safetensors").stat().st_size / 20_000
    assert size == pytest.approx(cost.TABLE_ROW, rel=0.1), "what `ecgmatch plan` expects"
    rows = np.array([3, 9_999, 10_003, 19_999])
    x = store.read(rows)
    assert np.array_equal(x[0], x[2])
    assert not np.array_equal(x[0], x[1])
    split = make_split(store, "within", 1.0, 20, "ecgmatch5")
    assert sum(split.size(part) for part in PARTS) + sum(split.left_out.values()) == 20_000


@pytest.mark.slow
def test_a_million_recordings(tmp_path: Path) -> None:
    archive.make_archive(tmp_path, 1_000_000, 20_000, 16, with_csv=False)
    opened, split = archive.measure("open", tmp_path, 2), archive.measure("split", tmp_path, 1)
    assert opened["pss"] < 300  # MiB; of texts it would be a thousand
    assert split["peak"] < 500
    saved = Split.load(next(tmp_path.glob("*.json")))
    assert saved.format == 3
    assert sum(map(len, saved.letters.values())) == 1_000_000


def test_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="at least 1000"):
        archive.main(rows=10)
    with pytest.raises(UserError, match="does not exist yet"):
        archive.main(to=tmp_path)
