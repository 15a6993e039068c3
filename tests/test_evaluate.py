"""A part of any size on any number of ranks gives the predictions and metrics of one process."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ecgmatch_dist.data.stream import FiniteBatch, finite
from ecgmatch_dist.evaluate import Predictions, predict
from ecgmatch_dist.metrics import best_thresholds, compute_metrics
from ecgmatch_dist.network.backbones.base import Output
from tests.support.ranks import run_processes, run_threads

CLASSES = ["a", "b", "c"]


class Toy(nn.Module):
    """BatchNorm and dropout: in training mode its predictions would depend on the batch. Refuses an empty one."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv1d(12, 4, 3), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.AdaptiveMaxPool1d(1))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Output:
        assert len(x) > 0
        z = self.body(x).flatten(1)
        return Output(z, self.head(z))


class Memory:
    """Recordings in memory, read as from a store."""

    def __init__(self, x: NDArray[np.float16]) -> None:
        self.x, self.length = x, x.shape[2]

    def read(self, rows: NDArray[np.int64], out: NDArray[np.float16] | None = None) -> NDArray[np.float16]:
        return np.take(self.x, rows, axis=0, out=out)


def part(n: int) -> tuple[Toy, Memory, NDArray[np.uint8]]:
    torch.manual_seed(0)
    rng = np.random.default_rng(n)
    return Toy(), Memory(rng.normal(size=(n, 12, 16)).astype(np.float16)), rng.integers(0, 2, (n, 3), dtype=np.uint8)


def predict_finite(rank: int, world: int, model: Toy, store: Any, labels: NDArray[np.uint8]) -> Predictions:
    batches = finite(store, np.arange(len(labels)), 8, rank, world)
    return predict(model, batches, labels, torch.device("cpu"), torch.float64)


def measure(predictions: Predictions) -> dict[str, Any]:
    """All metrics, to ten digits."""
    thresholds = best_thresholds(predictions.labels, predictions.probabilities)
    found = compute_metrics(predictions.labels, predictions.probabilities, thresholds, CLASSES)
    return dict(json.loads(json.dumps(asdict(found)), parse_float=lambda text: round(float(text), 10)))


def test_one_process_is_the_plain_forward() -> None:
    model, store, labels = part(21)
    model.double()
    got = predict_finite(0, 1, model, store, labels)
    assert model.training
    assert model.body.training
    expected = model.eval()(torch.from_numpy(store.x).double())
    np.testing.assert_allclose(got.probabilities, expected.logits.sigmoid().detach().numpy(), rtol=1e-12)
    np.testing.assert_allclose(got.features, expected.z.detach().numpy(), rtol=1e-12)
    predict_finite(0, 1, model, store, labels)
    assert not model.training
    assert got.labels is labels


@pytest.mark.parametrize(
    ("run", "w", "n"), [(run_threads, w, n) for w in (2, 4, 8) for n in (1, 3, 16, 21)] + [(run_processes, 2, 21)]
)
def test_ranks_equal_one_process(run: Any, w: int, n: int) -> None:
    model, store, labels = part(n)
    model.double().eval()  # threads share the model, and eval mode is set and restored by each
    one = predict_finite(0, 1, model, store, labels)
    for got in run(w, predict_finite, model, store, labels):
        np.testing.assert_allclose(got.probabilities, one.probabilities, rtol=1e-12)
        np.testing.assert_allclose(got.features, one.features, rtol=1e-12)
        assert measure(got) == measure(one)


def test_shares_of_any_size_and_order() -> None:
    model, store, labels = part(9)
    model.eval()
    shares = [np.array([5, 0, 8]), np.array([], np.int64), np.array([7, 6, 4, 3, 2, 1])]

    def batches(rank: int) -> Iterator[FiniteBatch]:
        for id_ in shares[rank]:
            yield FiniteBatch(np.array([id_, -1]), store.x[[id_, 0]], np.array([True, False]))

    def body(rank: int, world: int) -> Predictions:
        return predict(model, batches(rank), labels, torch.device("cpu"))

    expected = model(torch.from_numpy(store.x).float())
    for got in run_threads(3, body):
        assert got.probabilities.dtype == np.float32
        np.testing.assert_allclose(got.probabilities, expected.logits.sigmoid().detach().numpy(), rtol=1e-5)


def test_a_recording_that_is_missing_or_twice_is_noticed() -> None:
    model, store, labels = part(4)
    for ids in ([0, 1, 2], [0, 1, 2, 2]):
        batch = FiniteBatch(np.array(ids), store.x[ids], np.ones(len(ids), bool))
        with pytest.raises(AssertionError, match="of 4 recordings"):
            predict(model, [batch], labels, torch.device("cpu"))
