"""`ecgmatch bench measurements` on tiny shards."""

import re
from pathlib import Path

import pytest

from ecgmatch_dist.bench.measurements import main


def test_it_shows_each_split_and_the_runs_beside(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main((data / "split.json",), shards=str(data / "shards"))
    text = capsys.readouterr().out
    assert "within-chapman" in text
    assert len(re.findall(r"[01]\.\d{3}", text)) >= 2  # test and hidden
