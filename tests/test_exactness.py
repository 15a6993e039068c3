"""The number of ranks changes the speed, never the result: W ranks against one process on everything a run computes.

Dropout and augmentation are on.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ecgmatch_dist.augment import ECGAugment
from ecgmatch_dist.bank.memory import Neighbours
from ecgmatch_dist.config import Bank, Config, Model, Optim, Runtime
from ecgmatch_dist.data.store import ShardStore
from ecgmatch_dist.data.stream import Stream, finite
from ecgmatch_dist.distributed.collectives import world
from ecgmatch_dist.distributed.session import Ranks
from ecgmatch_dist.evaluate import predict
from ecgmatch_dist.learner import build_learner
from ecgmatch_dist.methods.ecgmatch import ECGMatchSettings
from ecgmatch_dist.methods.views import Views
from ecgmatch_dist.metrics import best_thresholds, compute_metrics
from ecgmatch_dist.network.batchnorm import convert_batchnorm
from ecgmatch_dist.network.model import build_model
from ecgmatch_dist.network.student import Student
from ecgmatch_dist.train import train_step
from tests.support.ranks import run_processes, run_threads
from tests.support.shard_factory import make_shards

CPU = torch.device("cpu")
# 3 shards; 70 unlabelled rows for batches of 64, so that every batch straddles an epoch and some rows come twice in one;
# 37 validation rows, so that no world size divides them and with 64 ranks 27 have none.
RECORDINGS, B, U, C, D, K, STEPS = 150, 64, 64, 5, 8, 3, 3
PARTS = {"labelled": np.arange(40), "unlabelled": np.arange(40, 110), "validation": np.arange(110, 147)}
CLASSES = ["CD", "Rhythm", "STT", "Other", "Normal"]

ROWS = {"ids_b", "ids_u", "weak", "strong", "neighbours", "scores", "votes", "pseudo_labels", "weights", "predictions"}
"""Values per row, concatenated over ranks; all others must be the same on every rank."""
BITS = {"ids_b", "ids_u", "bank.written", "num_batches_tracked"}
"""Integers, which must be equal."""
STORED = {"scores", "votes", "pseudo_labels", "weights", "bank.z", "bank.p"}
"""Rows of the bank and what is computed from them. The bank is fp32 in every precision."""


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exact")
    make_shards(folder, "chapman", RECORDINGS, 64, per_shard=64)
    return folder


class ExactRun:
    """A run without files: a learner and streams of shards."""

    def __init__(self, rank: int, shards: Path, dtype: torch.dtype, shard_group: int) -> None:
        self.share, self.dtype = (rank, world()), dtype
        self.store = ShardStore(shards, ["chapman"])
        labels = self.store.manifest["labels"]
        y = np.array([[name in text.split() for name in CLASSES] for text in labels], np.uint8)
        self.labels = {part: y[rows] for part, rows in PARTS.items()}
        self.y_b = torch.from_numpy(self.labels["labelled"]).to(dtype)
        config = Config(
            method=ECGMatchSettings(neighbours=K),
            model=Model(width=D, heads=2, dropout=0.3),
            optim=Optim(steps=STEPS, encoder_lr_scale=1.0, unlabelled_batch=U, teacher_momentum=0.9),
            bank=Bank(shard_group=shard_group, backend="torch", overlap=False),
            runtime=Runtime(device="cpu", precision="fp64" if dtype == torch.float64 else "fp32"),
        )
        ranks = Ranks(rank, world(), rank, world(), CPU)
        self.learner = build_learner(config, ranks, self.y_b, len(PARTS["unlabelled"]), seed=1)
        self.model, self.method, self.rate = self.learner.model, self.learner.method, config.optim.lr
        assert self.learner.bank is not None
        self.bank = self.learner.bank
        self.augment = ECGAugment(config.augment)
        self.labelled = Stream(self.store, PARTS["labelled"], B, 5, *self.share)
        self.unlabelled = Stream(self.store, PARTS["unlabelled"], U, 6, *self.share)

    def signals(self, x: Any) -> Tensor:
        return torch.from_numpy(x).to(self.dtype)

    def whole_pass(self) -> Iterator[tuple[Tensor, Tensor]]:
        for batch in finite(self.store, PARTS["unlabelled"], 32, *self.share, readers=0):
            yield torch.from_numpy(batch.ids), self.signals(batch.x)

    def step(self, number: int) -> dict[str, Tensor]:
        (ids_b, x_b), (ids_u, x_u) = self.labelled[number], self.unlabelled[number]
        rows_b, rows_u = torch.from_numpy(ids_b), torch.from_numpy(ids_u)
        arguments = self.signals(x_b), self.y_b[rows_b], rows_b, self.signals(x_u), rows_u
        views = Views(*arguments, self.augment, seed=1, step=number)
        found: list[Neighbours] = []
        collect = self.bank._collect
        self.bank._collect = lambda candidates: found.append(collect(candidates)) or found[0]  # type: ignore[func-returns-value,method-assign]
        losses = train_step(self.learner, views, self.rate, self.whole_pass)
        self.bank._collect = collect  # type: ignore[method-assign]
        # A rank's loss is the mean over its rows; their mean over the ranks is the loss of the global batch.
        out = {f"mean {name}": value.detach() for name, value in losses.items() if value.ndim == 0}
        out |= {name: losses[name] for name in ("pseudo_labels", "weights", "predictions")}
        out |= {"ids_b": rows_b, "ids_u": rows_u, "weak": views.weak.x, "strong": views.strong.x}
        out |= {"neighbours": found[0].rows, "scores": found[0].scores, "votes": found[0].p, "R_u": self.method.R_u}
        out |= {f"grad {name}": p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}
        return out

    def state(self) -> dict[str, Tensor]:
        out = {f"student.{name}": t.clone() for name, t in self.model.state_dict().items()}
        out |= {f"teacher.{name}": t.clone() for name, t in self.learner.teacher.state_dict().items()}
        batches = finite(self.store, PARTS["validation"], 32, *self.share, readers=0)
        found = predict(self.model, batches, self.labels["validation"], CPU, self.dtype)
        thresholds = best_thresholds(found.labels, found.probabilities)
        metrics = compute_metrics(found.labels, found.probabilities, thresholds, CLASSES)
        out |= {f"metric {name}": torch.tensor(value) for name, value in metrics.scalars().items()}
        return out | {"metric probabilities": torch.from_numpy(found.probabilities)}


def run(rank: int, world: int, shards: Path, dtype: torch.dtype, shard_group: int) -> dict[str, Any]:
    """The values of all steps, the state at the end, and this rank's block of the bank."""
    torch.set_num_threads(1)
    parts = ExactRun(rank, shards, dtype, shard_group)
    steps = [parts.step(number) for number in range(STEPS)]
    block = {name: t.clone() for name, t in parts.bank.state().items()}
    return {"steps": steps, "state": parts.state(), "bank": block, "first copy": parts.bank.is_first_replica}


def together(ranks: list[dict[str, Any]]) -> dict[str, Tensor]:
    """The ranks' results as one: rows and blocks of the bank concatenated, losses averaged."""
    out = {}
    for number in range(STEPS):
        for name in ranks[0]["steps"][number]:
            values = [rank["steps"][number][name] for rank in ranks]
            if name in ROWS:
                value = torch.cat(values)
            elif name.startswith("mean "):
                value = torch.stack(values).mean(0)
            else:
                assert all(torch.equal(value, values[0]) for value in values), f"{name} differs between ranks"
                value = values[0]
            out[f"step {number}: {name}"] = value
    for name, value in ranks[0]["state"].items():
        assert all(torch.equal(rank["state"][name], value) for rank in ranks), f"{name} differs between ranks"
        out[f"end: {name}"] = value
    for name in ("z", "p", "written"):
        out[f"end: bank.{name}"] = torch.cat([rank["bank"][name] for rank in ranks if rank["first copy"]])
    return out


def compare(
    one: dict[str, Tensor], many: dict[str, Tensor], bound: float, stored: float, other_neighbours: float = 0.0
) -> float:
    """Compare relative to the largest value of each tensor; return the largest difference, for display.

    `other_neighbours`: the share of neighbours that may differ.
    """
    assert one.keys() == many.keys()
    largest = 0.0
    for name, expected in one.items():
        plain, value = name.split(": ")[1], many[name]
        assert value.shape == expected.shape, name
        if plain == "neighbours":
            assert (value != expected).double().mean() <= other_neighbours, name
        elif plain in BITS or plain.rsplit(".")[-1] in BITS:
            assert torch.equal(value, expected), name
        else:
            difference = ((value - expected).abs().max() / expected.abs().max().clamp(min=1e-300)).item()
            assert difference <= (stored if plain in STORED else bound), f"{name}: {difference}"
            largest = max(largest, difference)
    return largest


_alone: dict[torch.dtype, dict[str, Tensor]] = {}


def alone(shards: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    if dtype not in _alone:
        _alone[dtype] = together([run(0, 1, shards, dtype, 1)])
    return _alone[dtype]


FP64, FP32 = 1e-12, 1e-3


@pytest.mark.parametrize(
    ("runner", "ranks", "shard_group"),
    [
        (run_processes, 2, 2),
        (run_processes, 4, 2),
        (run_threads, 4, 1),
        (run_threads, 8, 8),
        (run_threads, 16, 4),
        (run_threads, 64, 8),
    ],
)
def test_ranks_change_nothing_in_fp64(shards: Path, runner: Any, ranks: int, shard_group: int) -> None:
    results = runner(ranks, run, shards, torch.float64, shard_group, timeout=240)
    # One unit of the last place of fp32, for a row of the bank whose fp64 value lies at the edge between two of them.
    largest = compare(alone(shards, torch.float64), together(results), FP64, stored=2.0**-23)
    print(f"W = {ranks}, L = {shard_group}: {largest:.1e}")


@pytest.mark.parametrize(("ranks", "shard_group"), [(2, 1), (8, 2)])
def test_ranks_change_little_in_fp32(shards: Path, ranks: int, shard_group: int) -> None:
    """Sums in another order. Before training all features are alike, so that a few neighbours differ."""
    results = run_threads(ranks, run, shards, torch.float32, shard_group, timeout=240)
    largest = compare(alone(shards, torch.float32), together(results), FP32, stored=FP32, other_neighbours=0.02)
    print(f"fp32, W = {ranks}, L = {shard_group}: {largest:.1e}")


def test_the_comparison_can_fail(shards: Path) -> None:
    one = alone(shards, torch.float64)
    assert {
        "step 2: strong",
        "step 2: grad stem.weight",
        "end: student.stem_bn.running_var",
        "end: metric map",
    } <= one.keys()
    for name in ("step 1: weights", "step 2: grad stem.weight", "end: bank.z", "end: teacher.classifier.bias"):
        with pytest.raises(AssertionError, match=name):
            compare(one, {**one, name: one[name] * (1 + 1e-6)}, FP64, stored=2.0**-23)
    with pytest.raises(AssertionError, match="step 0: neighbours"):
        compare(one, {**one, "step 0: neighbours": one["step 0: neighbours"].flip(1)}, FP64, FP64)
    ids = one["step 0: ids_u"].tolist() + one["step 1: ids_u"].tolist()
    assert sorted(ids[:70]) == list(range(70))  # every row once an epoch
    assert len(set(ids[64:])) < 64  # and twice in a batch


def test_local_batchnorm_is_another_run(shards: Path) -> None:
    """The error of local BatchNorm: the reason why it is not the default."""

    def body(rank: int, world: int, mode: Any) -> Tensor:
        model = build_model(C, Model(width=D, heads=2, dropout=0.0), seed=1).double()
        student = Student(convert_batchnorm(model, mode), "fp64", mode)
        stream = Stream(ShardStore(shards, ["chapman"]), PARTS["unlabelled"], U, 6, rank, world)
        x = torch.from_numpy(stream[0].x).double()
        student.forward(x, None).logits.square().mean().backward()
        assert model.stem.weight.grad is not None
        return model.stem.weight.grad.clone()

    one = body(0, 1, "global")

    def error(mode: str) -> float:
        return ((run_threads(4, body, mode)[0] - one).abs().max() / one.abs().max()).item()

    assert error("global") < 1e-12
    assert error("local") > 1e-2
