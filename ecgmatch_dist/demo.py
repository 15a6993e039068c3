"""The whole path on synthetic ECGs. Each stage prints and runs the command that a user would type.

Finished stages are skipped, so an interrupted demo continues where it stopped.
"""

import shlex
import subprocess
import sys
import time
from pathlib import Path

from ecgmatch_dist.errors import UserError

PUBLIC, OWN = "g12ec", ("ptbxl", "ningbo", "chapman")
"""The database that others have labelled, and those with few labels."""


def main(to: Path = Path("demo"), recordings: int = 600, ranks: int = 2) -> None:
    """Synthetic databases, shards and splits; on two ranks few labels alone, ECGMatch, and both begun with the labels of
    another database; a report.

    Args:
        to: Folder for all files of the demo.
        recordings: Recordings per database; there are four.
        ranks: Processes that train.
    """
    begin = time.time()
    raw, shards, splits, runs, report = (to / name for name in ("raw", "shards", "splits", "runs", "report"))
    few, public = splits / "mix@0.05.s20.json", splits / f"within-{PUBLIC}@1.s20.json"
    if not (raw / "synthetic.json").is_file():
        ecgmatch("synth", raw, "--recordings", recordings)
    for database in (PUBLIC, *OWN):
        if not (shards / database / "dataset.json").is_file():
            ecgmatch("shards", "build", database, "--raw", raw, "--out", shards, "--preset", "cpu", "--workers", 2)
    here = ("--shards", shards, "--seeds", 20, "--to", splits)
    if not few.is_file():
        ecgmatch("split", "mix", "--databases", *OWN, "--ratio", 0.05, *here)
    if not public.is_file():
        ecgmatch("split", "within", "--database", PUBLIC, "--ratio", 1, *here)

    def train(split: Path, *options: object) -> None:
        where = ("--split", split, "--shards", shards, "--runs", runs)
        ecgmatch("train", "--ranks", ranks, "--preset", "demo", *where, *options)

    train(few)
    train(public, "--method", "supervised")
    train(few, "--weights", runs / f"{public.stem}.supervised", "--tag", "public")
    ecgmatch("report", runs, "--out", report)
    print(
        f"\nFinished in {time.time() - begin:.0f} s. Open {report / 'index.html'}, or watch: ecgmatch monitor --runs {runs}"
    )


def ecgmatch(*args: object) -> None:
    """Print and run a stage; one that fails ends the demo."""
    words = list(map(str, args))
    print(f"\n$ {shlex.join(['ecgmatch', *words])}", flush=True)
    with subprocess.Popen([sys.executable, "-m", "ecgmatch_dist", *words]) as process:
        try:
            code = process.wait()
        except KeyboardInterrupt:  # the stage received it, too: let it save
            process.wait()
            raise
    if code:
        raise UserError(f"the stage above ended with exit code {code}; the same command tries it again")
