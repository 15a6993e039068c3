"""The lab, tiny data, and undisturbed runs to compare with."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ecgmatch_dist.data.splits import make_split
from ecgmatch_dist.data.store import ShardStore
from ecgmatch_dist.launch.expand import base_config, load_sweep, plan_runs
from tests.cluster.harm import ROOT, SET, SWEEP, Lab
from tests.support.shard_factory import make_shards, random_codes
from tests.support.training import learnable


@pytest.fixture(scope="session")
def lab() -> Lab:
    folder = os.environ.get("SLURM_LAB_DIR")
    if not folder or not shutil.which("sbatch"):
        pytest.skip("no lab: run this through slurm/lab/with-slurm (make test-cluster)")
    return Lab(Path(folder))


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of one database of 200 recordings and two splits of it."""
    folder = tmp_path_factory.mktemp("data")
    codes = random_codes(200)
    make_shards(folder / "shards", "chapman", 200, 128, codes, signals=learnable(codes, 128), per_shard=64)
    store = ShardStore(folder / "shards", ["chapman"])
    for seed in (20, 21):
        split = make_split(store, "within", 0.2, seed, "ecgmatch5")
        split.save(folder / "splits" / f"{split.name}.json")
    return folder


@pytest.fixture(scope="session")
def sweep_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two splits, two methods: four runs, and the two supervised ones that they start from."""
    path = tmp_path_factory.mktemp("sweep") / "four.toml"
    path.write_text(SWEEP)
    return path


@pytest.fixture(scope="session")
def reference(data: Path, sweep_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the same runs, undisturbed, under torchrun with two ranks."""
    runs = tmp_path_factory.mktemp("reference")
    sweep = load_sweep(str(sweep_file))
    base = base_config(sweep, "", str(data / "shards"), runs, SET)
    planned = plan_runs(sweep, base, data / "splits")
    (runs / "configs.json").write_text(json.dumps([run.config.to_json() for run in planned]))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*torchrun, "-m", "tests.cluster.reference", str(runs / "configs.json")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return runs


@pytest.fixture
def runs(reference: Path, tmp_path: Path) -> Path:
    """A folder of runs in which the supervised runs are finished."""
    for path in reference.glob("*.supervised"):
        shutil.copytree(path, tmp_path / "runs" / path.name)
    return tmp_path / "runs"
