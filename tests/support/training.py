"""Small trainings for tests: learnable shards, a tiny configuration, and the final state of a run."""

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from ecgmatch_dist.config import Config, Evaluate, MethodSettings, Model, Optim, Runtime
from ecgmatch_dist.data.splits import make_split
from ecgmatch_dist.data.store import ShardStore
from ecgmatch_dist.methods.ecgmatch import ECGMatchSettings
from ecgmatch_dist.recovery.checkpoint import Checkpoint, generation_and_step
from ecgmatch_dist.train import train
from tests.support.shard_factory import CODES, make_shards, random_codes

STEPS = 12
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def learnable(codes: list[str], length: int) -> np.ndarray:
    """Noise, plus a sine wave per class with its own frequency and leads."""
    rng = np.random.default_rng(0)
    t = np.arange(length) / length
    x = rng.standard_normal((len(codes), 12, length))
    for i, some in enumerate(codes):
        for code in some.split():
            c = CODES.index(code)
            x[i, 2 * c : 2 * c + 2] += 2 * np.sin(2 * np.pi * (4 + 5 * c) * t + rng.uniform(0, 6.28))
    return x


def make_data(folder: Path) -> None:
    """Shards of one database of 200 recordings, and its within split."""
    codes = random_codes(200)
    make_shards(folder / "shards", "chapman", 200, 128, codes, signals=learnable(codes, 128), per_shard=64)
    store = ShardStore(folder / "shards", ["chapman"])
    make_split(store, "within", 0.2, 20, "ecgmatch5").save(folder / "split.json")


def tiny(data: Path, runs: Path, method: MethodSettings | None = None, **changes: Any) -> Config:
    optim = Optim(steps=STEPS, labelled_batch=8, unlabelled_batch=16)
    config = Config(
        split=data / "split.json",
        shards=str(data / "shards"),
        runs=runs,
        method=method or ECGMatchSettings(neighbours=3),
        model=Model(width=16, heads=2),
        optim=optim,
        pretrain=replace(optim, steps=6),
        evaluate=Evaluate(every=4, batch=32),
        runtime=Runtime(device="cpu", log_every=2, save_every=5, readers=1, threads=1),
    )
    return replace(config, **changes)


def run(config: Config) -> Path:
    """Train on the ranks of the current process group, or in this process alone."""
    return train(config).path


def final_state(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of the last checkpoint, with whole banks, and the best weights."""
    last = max((folder / "checkpoints").glob("step-*"), key=generation_and_step)
    # Copies: with safetensors before 0.5 they would be a view of the file, and change with it.
    kept = {f"best.{k}": v.clone() for k, v in load_file(folder / "best.safetensors").items()}
    return kept | Checkpoint(last, {}).load({})


def assert_same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    different = [name for name in a if not torch.equal(a[name], b[name])]
    assert different == []


def assert_near(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    """Equal up to rounding in fp64. The banks are fp32, where two nearly equal numbers may round apart."""
    assert a.keys() == b.keys()
    for key in a:
        bound = {"rtol": 1e-5, "atol": 1e-6} if key.startswith("bank.") else {"rtol": 1e-10, "atol": 1e-12}
        torch.testing.assert_close(b[key], a[key], **bound, msg=lambda text, key=key: f"{key}: {text}")


def command(config: Config, ranks: int = 1) -> list[str]:
    flags = [f"--{name}={value}" for name, value in options(config).items()]
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    return [sys.executable, *launcher, "-m", "ecgmatch_dist.train", *flags]


def options(config: Config) -> dict[str, Any]:
    """The command line of the tiny configuration."""
    optim, pretrain = config.optim, config.pretrain
    return {
        "split": config.split,
        "shards": config.shards,
        "data.rate": 0,
        "data.length": 0,
        "runs": config.runs,
        "model.width": 16,
        "model.heads": 2,
        "optim.steps": optim.steps,
        "optim.labelled-batch": optim.labelled_batch,
        "optim.unlabelled-batch": optim.unlabelled_batch,
        "pretrain.steps": pretrain.steps,
        "pretrain.labelled-batch": optim.labelled_batch,
        "pretrain.unlabelled-batch": optim.unlabelled_batch,
        "evaluate.every": config.evaluate.every,
        "evaluate.batch": config.evaluate.batch,
        "runtime.device": "cpu",
        "runtime.log-every": 1,
        "runtime.save-every": config.runtime.save_every,
        "runtime.threads": 1,
    }


def wait_for_step(folder: Path, step: int, process: subprocess.Popen[bytes], limit: float = 120) -> None:
    end = time.time() + limit
    path = folder / "metrics.jsonl"
    while time.time() < end:
        if path.exists() and any(f'"step": {s},' in path.read_text() for s in range(step, step + 20)):
            return
        assert process.poll() is None, "the run ended before it could be killed"
        time.sleep(0.01)
    raise AssertionError(f"step {step} was not reached within {limit} s")
