"""Without write permission: a sentence from every command, never a traceback."""

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path

from ecgmatch_dist.data.make_split import make_split
from ecgmatch_dist.data.store import ShardStore
from tests.support.recordings import make_signal, write_record
from tests.support.shard_factory import make_shards

PR_CAPBSET_DROP, CAP_DAC_OVERRIDE = 24, 1
ROOT = Path(__file__).resolve().parents[1]
TRY_ALL = """
import json, sys, traceback
from ecgmatch_dist.cli import main
answers = []
for command in json.loads(sys.argv[1]):
    sys.argv = ["ecgmatch", *command]
    try:
        main()
        answers.append("went well")
    except SystemExit as end:
        answers.append(end.code)
    except BaseException:
        answers.append(traceback.format_exc())
print(json.dumps(answers))
"""


def obey_permissions() -> None:
    """Root may write anywhere; without CAP_DAC_OVERRIDE it obeys the permissions of its own files, as everybody does."""
    if os.geteuid() == 0:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_CAPBSET_DROP, CAP_DAC_OVERRIDE, 0, 0, 0):
            raise OSError(ctypes.get_errno(), "prctl")


def test_without_write_permission_every_command_says_a_sentence(tmp_path: Path) -> None:
    """One process tries them all: each import of torch takes seconds."""
    make_shards(tmp_path / "shards", "own", 60, length=64)
    make_split(ShardStore(tmp_path / "shards", ["own"]), "within", 0.3, 20, "ecgmatch5").save(tmp_path / "split.json")
    write_record(tmp_path / "raw", "r0", make_signal(n=1000))
    (tmp_path / "own.toml").write_text("database = 'own'\n")
    closed = tmp_path / "closed"
    (closed / "runs").mkdir(parents=True)
    for folder in (closed, closed / "runs", tmp_path / "shards/own"):
        folder.chmod(0o555)
    shards, inside = str(tmp_path / "shards"), str(closed / "new")
    commands = [
        ["synth", inside, "--recordings", "8"],
        ["download", "g12ec", "--to", inside, "--from", "http://127.0.0.1:9/"],
        ["shards", "build", str(tmp_path / "own.toml"), "--raw", str(tmp_path / "raw"), "--out", inside, "--workers", "1"],
        ["shards", "verify", shards],
        ["split", "within", "--shards", shards, "--database", "own", "--to", inside],
        ["train", "--preset", "cpu", "--split", str(tmp_path / "split.json"), "--shards", shards, "--data.length", "64",
         "--optim.unlabelled-batch", "16", "--runs", str(closed / "runs")],
        ["report", str(closed / "runs"), "--out", inside],
        ["sweep", "within", "--cluster", "local", "--shards", shards, "--runs", str(closed / "runs")],
        ["choose", "within", "--runs", str(closed / "runs"), "--write", inside],
        ["predict", str(closed / "runs"), str(tmp_path / "raw/r0"), "--out", inside],
    ]  # fmt: skip
    home = {"HOME": str(closed), "MPLCONFIGDIR": str(closed), "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", TRY_ALL, json.dumps(commands)],
        cwd=closed, env=os.environ | home, capture_output=True, text=True, check=False, preexec_fn=obey_permissions,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout.splitlines()[-1])
    for command, answer in zip(commands, answers, strict=True):
        assert str(answer).startswith("ecgmatch: "), (command, answer)
    denied = [c[0] for c, answer in zip(commands, answers, strict=True) if "ermission denied" in answer]
    assert {"synth", "shards", "split", "train"} <= set(denied), answers
