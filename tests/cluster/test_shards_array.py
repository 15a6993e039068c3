"""An array of jobs writes the same shards as one process, byte for byte."""

from pathlib import Path
from typing import Any

import pytest

from ecgmatch_dist.data.synthetic import databases
from ecgmatch_dist.launch import build_shards
from tests.cluster.harm import Lab

pytestmark = pytest.mark.cluster


def test_an_array_writes_the_same_shards(lab: Lab, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    databases.main(tmp_path / "raw", recordings=20)
    (tmp_path / "site.toml").write_text('partition = "main"\nparallel = 3\n')
    for out, where in ((tmp_path / "here", {}), (tmp_path / "there", {"cluster": "slurm"})):
        site = str(tmp_path / "site.toml")
        options: Any = {"workers": 1, "preset": "cpu", "shard_size": 4, "site": site} | where
        build_shards.main("chapman", raw=tmp_path / "raw", out=out, **options)
    assert "5 shards in 3 jobs" in capsys.readouterr().out
    here, there = tmp_path / "here" / "chapman", tmp_path / "there" / "chapman"
    names = sorted(path.name for path in here.iterdir() if not path.name.startswith("."))
    assert names == sorted(path.name for path in there.iterdir() if not path.name.startswith("."))
    assert [name for name in names if (here / name).read_bytes() != (there / name).read_bytes()] == []
