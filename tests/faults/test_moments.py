"""Every command is killed, or meets a failing disk, at many moments: a sentence, and the same command ends as it should."""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.moments import FAULTS, Trials
from tests.support.prediction import write_model
from tests.support.recordings import make_signal, write_record
from tests.support.run_factory import write_run
from tests.support.training import make_data, options, tiny

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("moments")]
COMMANDS = {
    "synth": "synth synth --recordings 3 --databases chapman",
    "build": "shards build {base}/own.toml --raw {base}/raw --out shards --workers 1 --shard-size 4",
    "split": "split within --database chapman --shards {base}/shards --to splits --seeds 20 21",
    "adopt": "adopt {base}/raw --name mine",
    "train": "train --split {base}/split.json --shards {base}/shards --init scratch {tiny}",
    "export": "export {base}/model --to exported --no-onnx",
    "predict": "predict {base}/model {base}/raw --out p.csv",
    "pages": "predict {base}/model {base}/raw/r0.hea --pages pages",
    "report": "report {base}/runs --out report --replicates 10",
    "sweep": "sweep {base}/small.toml --cluster debug --shards {base}/shards --splits {base}/splits --runs runs --set {set}",
}
LONG = {"train", "report", "sweep"}
TRIED = int(os.environ.get("MOMENTS") or 2)
"""Moments of each command; half of them for those that take long."""
KINDS = tuple(FAULTS)
MADE_ANEW = {"config.json", "environment.json", "log.txt", "metrics.jsonl", "result.json"}
"""Files with times or places in them."""
UNLIKE = ("events.out.", "generations/", "checkpoints/", "sweeps/")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    make_data(folder)
    (folder / "splits").mkdir()
    (folder / "splits" / "one.json").write_text((folder / "split.json").read_text())
    for i in range(8):
        write_record(folder / "raw", f"r{i}", make_signal(i, n=1000))
    (folder / "own.toml").write_text("database = 'own'\n")
    (folder / "small.toml").write_text('split = "one"\n[grid]\nmethod = ["supervised"]\n')
    write_model(folder / "model")
    write_run(folder / "runs")
    return folder


@pytest.fixture(scope="module")
def trials() -> Iterator[Trials]:
    process = Trials()
    yield process
    process.close()


def words(name: str, base: Path) -> list[str]:
    skipped = {"split", "shards", "runs", "runtime.log-every", "runtime.save-every"}
    settings = {key: value for key, value in options(tiny(base, Path("runs"))).items() if key not in skipped}
    small = [f"{key.replace('-', '_')}={value}" for key, value in settings.items() if not key.startswith("optim")]
    values = {
        "base": str(base),
        "tiny": " ".join(f"--{key} {value}" for key, value in settings.items()) + " --runtime.save-every 4",
        "set": " ".join(small),
    }
    return COMMANDS[name].format(**values).split()


def contents(folder: Path) -> dict[str, str]:
    """File -> hash. Without what a kill may leave (hidden) and what has times in it."""
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    return {
        name: "" if path.name in MADE_ANEW else hashlib.sha256(path.read_bytes()).hexdigest()
        for name, path in sorted(files.items())
        if not path.name.startswith(".") and not any(part in name for part in UNLIKE)
    }


@pytest.mark.parametrize("name", COMMANDS)
def test_killed_or_refused_by_the_disk_at_many_moments(name: str, base: Path, trials: Trials, tmp_path: Path) -> None:
    command = words(name, base)
    untouched = trials.run(command, tmp_path / "untouched")
    assert untouched["said"] == ""
    expected = contents(tmp_path / "untouched")
    assert expected
    tried, last = TRIED // (1 + (name in LONG)), untouched["changes"]
    moments = sorted({1 + (k + 1) * (last - 1) // (tried + 1) for k in range(tried)})
    for i, moment in enumerate(moments):
        # Kills and errors take turns; each command meets other errors.
        error = KINDS[(i + list(COMMANDS).index(name)) % len(KINDS)]
        for fault in ("kill", error) if TRIED > 4 else (("kill", error)[i % 2],):
            folder = tmp_path / f"{moment}-{fault}"
            struck = trials.run(command, folder, moment, fault)
            if fault == "kill":
                assert struck["said"] == "signal 9"
            elif struck["said"]:
                assert struck["said"].startswith("ecgmatch: "), (moment, fault, struck["said"])
                assert ".tmp" not in struck["said"]
            else:  # it could do without
                assert contents(folder) == expected
                continue
            again = trials.run(command, folder)
            # Killed when all was written: these two do not write over what is there.
            complete = name in ("predict", "adopt") and "exists already" in again["said"]
            assert complete or again["said"] == "", (moment, fault, struck["said"])
            assert contents(folder) == expected, (moment, fault)
