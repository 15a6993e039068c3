"""The README's commands, run as a newcomer would: in an empty folder, one after the other. Only sizes are smaller."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ecgmatch_dist.data.synthetic.databases import make_databases
from tests.support.commands import ROOT, commands

README = commands(ROOT / "README.md")
ELSEWHERE = {
    "ecgmatch download": "needs the network; tests/data/test_download.py has a server of its own",
    "ecgmatch monitor": "runs until it is stopped; tests/record/test_monitor.py",
    "ecgmatch doctor": "tests/doctor",
    "ecgmatch serve": "runs until it is stopped; tests/serve",
    "ecgmatch label": "runs until it is stopped; tests/label",
    "ecgmatch sweep": "needs Slurm; tests/cluster",
    "ecgmatch status": "needs Slurm; tests/cluster",
    "ecgmatch plan": "tests/capacity",
    "torchrun": "the paper's size needs GPUs; tests/test_train.py has torchrun in small",
}
SHORT = "--pretrain.passes 0 --pretrain.steps 4 --optim.steps 4 --evaluate.every 4"


def run(folder: Path, line: str) -> str:
    """Run a command of the README in `folder`. Returns what it printed; its exit code must be 0."""
    words = shlex.split(line.replace("@0.05.s1.json", "@0.05.s20.json"))  # the loop over labelled sets: one of them
    if "--html" in words and shutil.which("npm") is None:
        words.remove("--html")
    if words[1] == "train":
        words += shlex.split(SHORT)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "ecgmatch_dist", *words[1:]],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout}"
    return done.stdout


def between(first: str, last: str) -> list[str]:
    """The README's commands from the one that begins with `first` to the next that begins with `last`."""
    begin = next(i for i, line in enumerate(README) if line.startswith(first))
    end = next(i for i, line in enumerate(README) if i >= begin and line.startswith(last))
    return README[begin : end + 1]


OWN = between("ecgmatch adopt", "ecgmatch train")
PAPER = between("ecgmatch shards build chapman", "ecgmatch split")
RESULTS = between("ecgmatch shards build chapman --raw data/raw --out data/shards --preset cpu", "ecgmatch report")
USE = [line for line in README if line.split()[1] in ("predict", "export")]
CLAIMS = [line for line in README if line.startswith("ecgmatch report runs --check")]


def test_every_command_of_the_readme_is_run_somewhere() -> None:
    here = {*OWN, *PAPER, *RESULTS, *USE, *CLAIMS}
    missing = [line for line in README if line not in here and not line.startswith(tuple(ELSEWHERE))]
    assert not missing
    assert len(here) >= 14


@pytest.mark.slow
def test_my_own_folder_of_ecgs(tmp_path: Path) -> None:
    make_databases(tmp_path / "made", 150, databases=["chapman"])
    (archive,) = (path for path in (tmp_path / "made").rglob("*") if path.is_dir() and any(path.glob("*.hea")))
    archive.rename(tmp_path / "archive")
    for header in sorted((tmp_path / "archive").glob("*.hea"))[50:]:  # most have no label
        lines = header.read_text().splitlines(keepends=True)
        header.write_text("".join(line for line in lines if "Dx" not in line))
    for line in OWN:
        told = run(tmp_path, line)
    assert "test MAP" in told
    assert (tmp_path / "runs" / "within-my_hospital@1.s20.ecgmatch" / "result.json").is_file()


@pytest.mark.slow
def test_the_papers_databases(tmp_path: Path) -> None:
    make_databases(tmp_path / "data" / "raw", 60, databases=["chapman"])
    for line in PAPER:
        run(tmp_path, line)
    assert len(list((tmp_path / "splits").iterdir())) == 3


@pytest.mark.slow
def test_results_and_their_use(tmp_path: Path) -> None:
    make_databases(tmp_path / "data" / "raw", 300, databases=["chapman"])
    for line in [*RESULTS, *CLAIMS]:
        run(tmp_path, line)
    assert (tmp_path / "report" / "index.html").is_file()
    some = sorted((tmp_path / "data" / "raw").rglob("*.hea"))[:3]
    (tmp_path / "new").mkdir()
    for number, header in enumerate(some, 1):
        for file in header.parent.glob(f"{header.stem}.*"):
            text = file.read_bytes()
            renamed = text.replace(header.stem.encode(), f"ecg{number}".encode()) if file.suffix == ".hea" else text
            (tmp_path / "new" / f"ecg{number}{file.suffix}").write_bytes(renamed)
    for line in USE:
        run(tmp_path, line)
    assert len((tmp_path / "predictions.csv").read_text().splitlines()) == 4
    assert list((tmp_path / "pages").glob("*.html"))
    assert (tmp_path / "model" / "model.onnx").is_file()
