"""A mistake under several ranks: one line with `--ranks`; with torchrun, the line is the end of its long summary."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ecgmatch_dist.errors import UserError
from ecgmatch_dist.train import main
from tests.support.training import ENVIRONMENT, command, tiny


def test_a_mistake_of_the_ranks_is_told_without_torchruns_summary(data: Path, tmp_path: Path) -> None:
    single = command(tiny(data, tmp_path))
    ranks = [*single, "--ranks=2", "--optim.labelled-batch=15"]
    done = subprocess.run(ranks, capture_output=True, text=True, check=False, env=ENVIRONMENT)
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert lines[0].endswith("optim.labelled_batch = 15: make it a multiple of 2, the number of ranks"), done.stderr
    assert len(lines) <= 3, (
        done.stderr
    )  # of the first rank, and of the second, which may be ended in the middle of a word
    assert not {"Traceback", "Root Cause"} & {*re.findall(r"Traceback|Root Cause", done.stderr)}


def test_torchruns_summary_ends_in_our_line(data: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [*command(tiny(data, tmp_path), ranks=2), "--optim.labelled-batch=15"],
        capture_output=True,
        text=True,
        check=False,
        env=ENVIRONMENT,
    )
    assert done.returncode == 1
    summary = done.stderr.partition("Root Cause")[2]
    assert "optim.labelled_batch = 15: make it a multiple of 2" in summary
    assert "To enable traceback see" not in done.stderr


@pytest.mark.slow
def test_ranks_train_together(data: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [*command(tiny(data, tmp_path)), "--ranks=2", "--init=scratch"],
        capture_output=True,
        text=True,
        check=False,
        env=ENVIRONMENT,
    )
    assert done.returncode == 0, done.stderr
    (folder,) = tmp_path.glob("*.ecgmatch")
    assert '"world_size": 2' in (folder / "result.json").read_text()
    assert "step 12/12" in done.stderr  # without a terminal, too


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_reader_of_the_output_that_goes_away(data: Path, tmp_path: Path, ranks: int) -> None:
    """`ecgmatch train --ranks 2 ... | head -1`: quiet, with the exit code of other programs. It was a traceback."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(  # the chain's first line, "run 1 of 2", finds nobody
        [*command(tiny(data, tmp_path)), f"--ranks={ranks}"],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        env=ENVIRONMENT,
    )
    os.close(writer)
    assert done.returncode == 128 + signal.SIGPIPE, done.stderr
    assert "Traceback" not in done.stderr
    assert "ignored" not in done.stderr


LEAVING = """
import os, sys, time
from ecgmatch_dist.distributed.launcher import tell_launcher
if os.environ["RANK"] == "1":
    tell_launcher("lost contact")
    time.sleep(60)
while not os.path.exists(os.environ["TORCHELASTIC_ERROR_FILE"].replace("/0/error", "/1/error")):
    time.sleep(0.1)
time.sleep(1.5)  # torchrun counts whole seconds
sys.exit(141)
"""


def test_the_exit_code_is_of_the_rank_that_chose_one(tmp_path: Path) -> None:
    """Rank 1 tells first that something is wrong, and is then ended by a signal. That signal's number was the exit code."""
    (tmp_path / "leaving.py").write_text(LEAVING)
    code = "from ecgmatch_dist.distributed.launcher import start_ranks; start_ranks(2, 'leaving', [])"
    environment = ENVIRONMENT | {"PYTHONPATH": f"{Path.cwd()}{os.pathsep}{tmp_path}"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 141, done.stderr


def test_a_number_of_ranks_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="--ranks many: a number"):
        main(["--ranks", "many"])
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UserError, match=r"--ranks 2: .*not together with another launcher"):
        main(["--ranks", "2"])
