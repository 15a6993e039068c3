"""`ecgmatch predict` on a folder, against one process per file, as a loop in a shell does; memory; the cost of bad files."""

import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from ecgmatch_dist.data.preprocess import LEADS
from ecgmatch_dist.errors import UserError

EVERY = 10  # one file in so many is cut


def main(run: tyro.conf.Positional[Path], /, recordings: int = 1000, alone: int = 5, workers: int = 1) -> None:
    """Predict made-up recordings of 10 s at 500 Hz in one command, and a few of them by one process each.

    Args:
        run: A run's folder, one that `ecgmatch export` wrote, or chapman_ptbxl (comes with the package).
        recordings: How many in one command; a quarter of them is predicted too, for the memory.
        alone: How many by a process of their own; their median counts.
        workers: Processes that read.
    """
    if recordings < 40 or alone < 1:
        raise UserError(f"--recordings {recordings} --alone {alone}: at least 40, and at least 1")
    table = Table(title=f"predict, {recordings:,} recordings", title_justify="left")
    for column in ("", "seconds", "each, ms", "computing, s", "peak MiB"):
        table.add_column(column, justify="right" if column else "left")
    with tempfile.TemporaryDirectory(prefix="ecgmatch-bench-") as place:
        folder = Path(place)
        names = [write(folder, number) for number in range(recordings)]
        single = sorted(timed(run, [name], workers, folder) for name in names[:alone])[alone // 2]
        few = timed(run, names[: recordings // 4], workers, folder)
        many = timed(run, names, workers, folder)
        for name in names[::EVERY]:
            data = name.with_suffix(".dat")
            data.write_bytes(data.read_bytes()[:1000])
        bad = timed(run, names, workers, folder)
    for what, count, (seconds, computing, peak) in (
        ("one command, a quarter of them", recordings // 4, few),
        ("one command", recordings, many),
        (f"one file in {EVERY} is cut", recordings, bad),
    ):
        table.add_row(what, f"{seconds:.1f}", f"{1000 * seconds / count:.1f}", f"{computing:.1f}", f"{peak:.0f}")
    table.add_row(f"one file (median of {alone})", *(f"{n:.1f}" for n in (single[0], 1000 * single[0], *single[1:])))
    Console().print(table)
    clock, work = (single[i] * recordings / many[i] for i in (0, 1))
    print(
        f"one command is {clock:.0f} times as fast as {recordings:,} processes of one file, counted from {alone} of them;"
    )
    print(f"in computing time, which other programs on the machine do not change, {work:.0f} times")


def write(folder: Path, number: int) -> Path:
    """A recording of noisy beats."""
    rng = np.random.default_rng(number)
    t = np.arange(5000) / 500
    beats = np.exp(-0.5 * (((t + rng.uniform(0, 1)) % rng.uniform(0.5, 1.2) - 0.3) / 0.012) ** 2)
    signal = rng.uniform(-1.5, 1.5, (12, 1)) * beats + rng.normal(0, 0.02, (12, 5000))
    name = f"r{number:06}"
    lines = [f"{name} 12 500 5000", *(f"{name}.dat 16 1000/mV 16 0 0 0 0 {lead}" for lead in LEADS)]
    (folder / f"{name}.hea").write_text("\n".join(lines) + "\n")
    np.round(1000 * signal.T).astype("<i2").tofile(folder / f"{name}.dat")
    return folder / f"{name}.hea"


def timed(run: Path, names: Sequence[Path], workers: int, folder: Path) -> tuple[float, float, float]:
    """Seconds of the command from start to end, seconds that it computed, and its largest memory in MiB."""
    listed, out = folder / "list.txt", folder / "out.csv"
    listed.write_text("\n".join(map(str, names)))
    out.unlink(missing_ok=True)
    arguments = [str(run), f"@{listed}", "--out", str(out), "--workers", str(workers), "--nearest", "0"]
    code = "import resource, sys; from ecgmatch_dist.cli import main\ntry: main()\nexcept SystemExit: pass\n"
    code += "print('peak', resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)"
    begin, before = time.perf_counter(), computed()
    done = subprocess.run(
        [sys.executable, "-c", code, "predict", *arguments], capture_output=True, text=True, check=False
    )
    seconds = time.perf_counter() - begin
    if not out.exists():
        raise UserError(f"{run}: {' '.join((done.stderr or done.stdout).split())[-300:]}")
    return seconds, computed() - before, float(done.stdout.split("peak")[-1])


def computed() -> float:
    """Seconds on a processor of all commands that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
