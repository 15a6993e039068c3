"""`ecgmatch bench predict` with few recordings."""

import re
from pathlib import Path

import pytest

from ecgmatch_dist.bench import main as bench
from ecgmatch_dist.bench.predict import main
from ecgmatch_dist.errors import UserError
from tests.support.prediction import write_model


def test_what_it_cannot_use_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="at least 40"):
        bench(["predict", str(tmp_path), "--recordings", "3"])


@pytest.mark.slow
def test_it_compares_one_command_with_one_process_per_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(write_model(tmp_path / "run"), recordings=40, alone=1)
    out = capsys.readouterr().out
    assert re.search(r"one command is \d+ times as fast as \d+ processes of one file, counted from", out), out
    assert "one file in 10 is cut" in out
