"""The commands of the README, docs/, shards/ and launch/, run as by somebody who follows the pages. Only sizes are smaller."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ecgmatch_dist import cli
from ecgmatch_dist.data.synthetic.databases import make_databases
from tests.support.commands import ROOT, commands, pages
from tests.support.finished_sweep import write_finished_sweep
from tests.support.shard_factory import make_shards

EVERY = list(dict.fromkeys(command for page in pages() for command in commands(page)))
ELSEWHERE = {
    "ecgmatch download": "needs the network; tests/data/test_download.py has a server of its own",
    "ecgmatch monitor": "runs until it is stopped; tests/record/test_monitor.py",
    "ecgmatch serve": "runs until it is stopped; tests/serve",
    "ecgmatch label": "runs until it is stopped; tests/label",
    "ecgmatch doctor": "takes long; tests/doctor runs it alone and under torchrun",
    "torchrun --nproc-per-node 8 -m ecgmatch_dist.doctor": "the same",
    "ecgmatch status": "needs a sweep on Slurm; tests/cluster",
    "ecgmatch logs": "needs a sweep on Slurm; tests/cluster",
    "ecgmatch cancel": "needs a sweep on Slurm; tests/cluster",
    "ecgmatch split mix --databases ptbxl": "what `make demo` prints; tests/test_demo.py compares it with what the demo calls",
    "ecgmatch train --ranks 2 --preset demo": "the same",
    "ecgmatch report demo/runs": "the same",
    "ecgmatch export chapman_ptbxl": "a minute each; tests/export has these options, and the README's export is run here",
}
"""How commands begin that cannot run here, and why. tests/test_docs.py reads their options all the same."""
KINDS = ("adopt", "shards", "split", "train", "bench", "choose", "sweep", "report", "predict", "export", "plan")
"""In the order in which one needs them."""
STARTS = [line for line in EVERY if re.search("^ecgmatch export .* --trees", line)]
"""Models that further runs begin with: made between the runs, in the order of their page."""
SHORT = "--pretrain.passes 0 --pretrain.steps 4 --optim.steps 4 --optim.unlabelled-batch 32 --evaluate.every 4"
SHORT_START = "--pretrain.passes 0 --pretrain.steps 4"
SMALLER = (
    ("@0.05.s1.json", "@0.05.s20.json"),  # the loop over labelled sets: one of them
    ("@0.05.s19.json", "@0.05.s20.json"),
    ("splits/*.json", "splits/within-chapman@0.05.s20.json"),
    ("/data/challenge-2021", "data/raw"),
    ("--nproc-per-node 8", "--nproc-per-node 2"),
    ("--seeds 11 12 13 14 15", "--seeds 11 --labels 40"),
    ("--scale 100000", "--scale 500"),
    ("--contrast.steps 150", "--contrast.steps 4"),
    ("-m ecgmatch_dist.train", f"-m ecgmatch_dist.train --preset cpu --model.width 8 --runs two {SHORT}"),
)
"""The rest of what is smaller is in `smaller`."""
PROCESSES = ("train", "bench")
"""These start ranks, threads or processes of their own: each gets a fresh interpreter. The others share this one."""


def kind(line: str) -> str:
    """The command: the word after `ecgmatch`, or after `torchrun ... -m ecgmatch_dist.`"""
    found = re.search(r"^ecgmatch (\w+)| ecgmatch_dist\.(\w+)", line)
    assert found, line
    return found[1] or found[2]


def smaller(line: str) -> list[str]:
    """The words of a command after `ecgmatch` or `torchrun`, with sizes for a test."""
    for large, small in SMALLER:
        line = line.replace(large, small)
    words = shlex.split(line)
    if "--html" in words and shutil.which("npm") is None:
        words.remove("--html")
    if words[1] == "train":
        words += shlex.split(SHORT_START if {"contrastive", "supervised"} & {*words} else SHORT)
    if kind(line) == "sweep" and "--dry-run" not in words:  # hundreds of runs
        words.append("--dry-run")
    return words


def in_a_process(folder: Path, words: list[str]) -> str:
    start = ["torch.distributed.run"] if words[0] == "torchrun" else ["ecgmatch_dist"]
    done = subprocess.run(
        [sys.executable, "-m", *start, *words[1:]],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout}"
    return done.stdout


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[[str], str]:
    """Run a command in an empty folder. Returns what it printed; its exit code must be 0."""
    monkeypatch.chdir(tmp_path)
    seen: set[str] = set()

    def one(line: str) -> str:
        words = smaller(line)
        if shlex.join(words) in seen:  # two that differ in size alone
            return ""
        seen.add(shlex.join(words))
        if words[0] == "torchrun" or kind(line) in PROCESSES:
            return in_a_process(tmp_path, words)
        monkeypatch.setattr(sys, "argv", words)
        code: object = None
        try:
            cli.main()
        except SystemExit as end:
            code = end.code
        told = capfd.readouterr()
        assert not code, f"{shlex.join(words)}\n{code}\n{told.out}{told.err}"
        return told.out

    return one


def chosen(*patterns: str) -> list[str]:
    """The documented commands that match any of these, in the order in which one needs them."""
    found = [line for line in EVERY if not line.startswith(tuple(ELSEWHERE))]
    found = [line for line in found if any(re.search(pattern, line) for pattern in patterns)]
    return sorted(found, key=lambda line: KINDS.index("train" if line in STARTS else kind(line)))


HOSPITAL = chosen(
    "my_hospital", "splits/labelled.json", r"--database ptbxl --shards data/shards --ratio 1$", r"within-ptbxl@1\.s20"
)
ORIGINALS = chosen(r"build chapman --raw data/raw --out data/shards$", "challenge-2021", "shards verify")
SEARCH = chosen("choose", "--chosen")
MODEL = [line for line in chosen("^ecgmatch (predict|export)") if line not in STARTS]
RESULTS = [line for line in chosen("") if line not in {*HOSPITAL, *ORIGINALS, *SEARCH, *MODEL}]


def test_the_commands_are_found_and_none_is_left_out_without_a_reason() -> None:
    here = [*HOSPITAL, *ORIGINALS, *SEARCH, *MODEL, *RESULTS]
    assert sorted([*here, *(line for line in EVERY if line.startswith(tuple(ELSEWHERE)))]) == sorted(EVERY)
    assert min(map(len, (HOSPITAL, ORIGINALS, SEARCH, MODEL))) >= 2
    assert len(RESULTS) >= 20
    assert all(any(line.startswith(start) for line in EVERY) for start in ELSEWHERE)


@pytest.mark.slow
def test_my_own_folder_of_ecgs(tmp_path: Path, run: Callable[[str], str]) -> None:
    """README, docs/own-data.md and docs/label.md."""
    make_databases(tmp_path / "made", 150, databases=["chapman"])
    (archive,) = (path for path in (tmp_path / "made").rglob("*") if path.is_dir() and any(path.glob("*.hea")))
    archive.rename(tmp_path / "archive")
    headers = sorted((tmp_path / "archive").glob("*.hea"))
    for header in headers[50:]:  # most have no label
        lines = header.read_text().splitlines(keepends=True)
        header.write_text("".join(line for line in lines if "Dx" not in line))
    scheme = [f'[[class]]\nname = "{name}"\nshort = "{name}"\ncodes = []\n' for name in ("AF", "ST")]
    for name in ("my_classes", "other_classes"):
        (tmp_path / f"{name}.toml").write_text(f'name = "{name}"\nunlabelled = "keep"\n' + "".join(scheme))
    tables = {"labels": ("AF", "ST", "AF|ST", "none"), "corrected": ("CD", "Rhythm", "STT|Other", "Normal")}
    for table, answers in tables.items():
        rows = [f"{header.stem},{answers[number % 4]}" for number, header in enumerate(headers[:60])]
        (tmp_path / f"{table}.csv").write_text("\n".join(["record,label", *rows]) + "\n")
    for part, keys in (("labelled", headers[:30]), ("val", headers[30:40]), ("test", headers[40:50])):
        (tmp_path / f"{part}.csv").write_text("\n".join(["record", *(header.stem for header in keys)]) + "\n")
    make_databases(tmp_path / "data" / "raw", 120, databases=["ptbxl"])  # the public one, from which a start is made
    run("ecgmatch shards build ptbxl --raw data/raw --out data/shards --preset cpu")
    told = [run(line) for line in HOSPITAL]
    assert any("test MAP" in text for text in told)
    assert (tmp_path / "runs" / "within-my_hospital@1.s20.ecgmatch" / "result.json").is_file()
    assert (tmp_path / "runs" / "labelled.ecgmatch" / "result.json").is_file()
    assert (tmp_path / "runs" / "within-my_hospital@1.s20.ecgmatch.mine" / "result.json").is_file()


@pytest.mark.slow
def test_the_papers_databases(tmp_path: Path, run: Callable[[str], str]) -> None:
    """README and shards/README.md, at 500 Hz."""
    make_databases(tmp_path / "data" / "raw", 60, databases=["chapman"])
    for line in ORIGINALS:
        run(line)
    assert (tmp_path / "shards" / "chapman" / "card.html").is_file()


@pytest.mark.slow
def test_a_search_and_what_it_chose(tmp_path: Path, run: Callable[[str], str]) -> None:
    """docs/slurm.md."""
    write_finished_sweep("search", tmp_path / "runs")
    for line in SEARCH:
        run(line)
    assert "lambda_u" in (tmp_path / "chosen.toml").read_text()


@pytest.mark.slow
@pytest.mark.timeout(1800)  # some fifty commands: five minutes on a quiet machine
def test_results_and_their_use(tmp_path: Path, run: Callable[[str], str]) -> None:
    """README, docs/ and launch/, at 100 Hz."""
    make_databases(tmp_path / "data" / "raw", 300, databases=["chapman"])
    make_databases(tmp_path / "more", 120, databases=["ptbxl"])
    shutil.copytree(tmp_path / "more", tmp_path / "data" / "raw", dirs_exist_ok=True)
    for database in ("ningbo", "g12ec"):
        make_shards(tmp_path / "data" / "shards", database, 400, 1024, per_shard=200)
    for folder in ("launch", "slurm"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("lab"))
    shutil.copy(ROOT / "slurm" / "gpu.toml", tmp_path / "slurm" / "my-cluster.toml")
    for line in RESULTS:
        run(line)
    assert (tmp_path / "report" / "index.html").is_file()
    write_new_recordings(tmp_path)
    for line in MODEL:
        # two pages write a table of this name, and a folder `model`
        (tmp_path / "predictions.csv").unlink(missing_ok=True)
        shutil.rmtree(tmp_path / "model", ignore_errors=True)
        run(line)
        if "export" in line and "--to model" in line:
            assert (tmp_path / "model" / "model.onnx").is_file()
        if "predictions.csv" in line:
            assert len((tmp_path / "predictions.csv").read_text().splitlines()) == 4
    assert list((tmp_path / "pages").glob("*.html"))


def write_new_recordings(folder: Path) -> None:
    """What the pages about prediction call new: recordings, a folder, a list of them, a CSV file."""
    some = sorted((folder / "data" / "raw").rglob("*.hea"))[:3]
    for place in ("new", "folder", "some/recordings"):
        (folder / place).mkdir(parents=True)
        for number, header in enumerate(some, 1):
            copy_recording(header, folder / place / f"ecg{number}.hea")
    copy_recording(some[0], folder / "ecg.hea")
    (folder / "list.txt").write_text("new/ecg1.hea\nnew/ecg2.hea\n")
    leads = ["I", "II", "V1", "V2", "V3", "V4", "V5", "V6"]
    values = ",".join(str(number % 50) for number in range(8))
    (folder / "ecg.csv").write_text("\n".join([",".join(leads), *([values, "0,9,80,3,2,1,7,5"] * 2500)]))


def copy_recording(header: Path, to: Path) -> None:
    """A WFDB recording under another name."""
    for file in header.parent.glob(f"{header.stem}.*"):
        data = file.read_bytes()
        to.with_suffix(file.suffix).write_bytes(
            data.replace(header.stem.encode(), to.stem.encode()) if file.suffix == ".hea" else data
        )
