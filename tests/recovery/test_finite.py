"""A loss or gradient that is not finite ends all ranks before any weight changes, and names the recordings."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ecgmatch_dist.config import Config, Model, Optim, Runtime
from ecgmatch_dist.data.splits import make_split
from ecgmatch_dist.data.store import ShardStore
from ecgmatch_dist.data.stream import Stream
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.losses import bce
from ecgmatch_dist.methods import supervised
from ecgmatch_dist.methods.fixmatch import FixMatchSettings
from ecgmatch_dist.methods.supervised import SupervisedSettings
from ecgmatch_dist.network.model import build_model
from ecgmatch_dist.network.optim import build_optimizer, gradient_norm, step_if_finite
from ecgmatch_dist.recovery.checkpoint import Checkpoint
from ecgmatch_dist.recovery.finite import FiniteCheck
from tests.support.method_trainer import Trainer
from tests.support.ranks import run_processes, run_threads
from tests.support.shard_factory import make_shards, random_codes
from tests.support.training import learnable, run, tiny

STEPS = 12


def spoiled(folder: Path, after: int = 5) -> tuple[Path, str, int]:
    """Data in which one recording is NaN, its name, and the first step that reads it (later than `after`)."""
    codes = random_codes(200)
    x = learnable(codes, 128)
    make_shards(folder / "clean", "chapman", 200, 128, codes, signals=x, per_shard=64)
    split = make_split(ShardStore(folder / "clean", ["chapman"]), "within", 0.2, 20, "ecgmatch5")
    config = config_of(folder, folder / "none", "clean")
    store = ShardStore(folder / "clean", ["chapman"])
    rows = store.rows(split.parts["unlabelled"])
    stream = Stream(store, rows, config.optim.unlabelled_batch, 4 * split.seed + 2, 0, 1)
    seen = [set(stream[step].ids.tolist()) for step in range(STEPS)]
    step = next(s for s in range(after, STEPS - 1) if seen[s] - set().union(*seen[:s]))
    victim = sorted(seen[step] - set().union(*seen[:step]))[0]
    name = store.manifest["id"].iloc[rows[victim]]
    x[rows[victim], 3, 17] = np.nan
    make_shards(folder / "shards", "chapman", 200, 128, codes, signals=x, per_shard=64)
    store = ShardStore(folder / "shards", ["chapman"])
    make_split(store, "within", 0.2, 20, "ecgmatch5").save(folder / "split.json")
    return folder, name, step + 1


def config_of(data: Path, runs: Path, shards: str = "shards", **changes: Any) -> Config:
    runtime = Runtime(device="cpu", log_every=100, save_every=3, readers=1, threads=1)
    optim = Optim(steps=STEPS, labelled_batch=8, unlabelled_batch=16)
    config = tiny(data, runs, FixMatchSettings(), optim=optim, runtime=runtime, init="scratch", **changes)
    return Config(**(vars(config) | {"shards": str(data / shards)}))


def _fails(rank: int, world: int, config: Config) -> str:
    with pytest.raises(UserError) as caught:
        run(config)
    return str(caught.value)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_recording_with_nan_ends_all_ranks_and_is_named(tmp_path: Path, ranks: int) -> None:
    data, name, step = spoiled(tmp_path)
    config = config_of(data, tmp_path / "runs")
    messages = run_processes(ranks, _fails, config)
    for message in messages:
        assert f"step {step}: the loss or its gradient is not finite, so no weight was changed" in message
        assert f"1 of the 24 recordings in its batch have values that are not finite, {name}:" in message
    (folder,) = (tmp_path / "runs").glob("within*")
    log = (folder / "log.txt").read_text()
    assert f"step {step}: not finite; the recordings of its batch: " in log
    assert len(log.split("batch: ")[1].splitlines()[0].split()) == 24
    saved = sorted((folder / "checkpoints").glob("step-*"))
    last = json.loads((saved[-1] / "state.json").read_text())["step"]
    assert last == (step - 1) // 3 * 3
    assert all(t.isfinite().all() for t in Checkpoint(saved[-1], {}).load({}).values())


def test_finite_signals_with_a_loss_that_is_not(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found at the step's log line here; every recording of the batch is in log.txt."""
    calls = []

    def infinite(logits: Tensor, *rest: Tensor | None) -> Tensor:
        calls.append(1)
        return bce(logits, *rest) / (0.0 if len(calls) == 4 else 1.0)

    monkeypatch.setattr(supervised, "bce", infinite)
    config = tiny(data, tmp_path, SupervisedSettings()).supervised()
    with pytest.raises(UserError, match=r"step 4: .*all signals in its batch are finite .*lower optim\.lr"):
        run(config)


def test_the_norm_is_logged(data: Path, tmp_path: Path) -> None:
    folder = run(tiny(data, tmp_path, SupervisedSettings()).supervised())
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    norms = [record["gradient_norm"] for record in records if record["kind"] == "train"]
    assert norms
    assert all(0 < norm < 100 for norm in norms)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_the_optimiser_changes_nothing_without_a_finite_gradient(name: Any, bad: float) -> None:
    model = build_model(5, Model(width=8, heads=2), seed=1)
    optimizer = build_optimizer(Optim(optimizer=name), model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    step_if_finite(optimizer, gradient_norm(model))  # a good step first, so that there is momentum
    before = [parameter.detach().clone() for parameter in model.parameters()]
    model.classifier.bias.grad[1] = bad
    step_if_finite(optimizer, gradient_norm(model))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    step_if_finite(optimizer, gradient_norm(model))
    assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_the_first_bad_step_is_kept() -> None:
    check = FiniteCheck(torch.device("cpu"))
    for step, norm in enumerate([1.0, float("inf"), 2.0, float("nan")], 1):
        assert check.seen() == check.now() == (0 if step <= 2 else 2)
        check.add(torch.tensor(norm), step)
    assert check.seen() == check.now() == 2


def test_one_rank_s_loss_makes_every_rank_s_gradient_not_finite() -> None:
    """Also where the gradient alone would be finite: the loss of rank 1 overflows after a constant was added."""

    def body(rank: int, world: int) -> tuple[bool, bool]:
        trainer = Trainer(rank, world, SupervisedSettings())
        losses = trainer.method.losses

        def added(*args: Any) -> dict[str, Tensor]:
            found = losses(*args)
            return found | {"loss": found["loss"] + (float("inf") if rank == 1 else 0.0)}

        trainer.method.losses = added  # type: ignore[method-assign]
        before = [p.detach().clone() for p in trainer.model.parameters()]
        finite = bool(trainer.one()["gradient_norm"].isfinite())
        return finite, all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))

    assert run_threads(2, body) == [(False, True)] * 2
