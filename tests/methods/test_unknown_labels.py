"""Labels that nobody has given: no method counts them as negative, on any number of ranks."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ecgmatch_dist.data.labels import UNKNOWN
from ecgmatch_dist.losses import (
    annotation_weights,
    bce,
    class_frequencies,
    correlation,
    correlation_alignment,
    labelled_correlation,
)
from ecgmatch_dist.methods.base import Task
from ecgmatch_dist.methods.percentmatch import PercentMatch, PercentMatchSettings
from ecgmatch_dist.record.diagnostics import Diagnostics
from tests.support.method_trainer import METHODS, STEPS, B, C, Trainer, data
from tests.support.ranks import run_threads

VARIANTS = [m for m in METHODS if m.needs_labels]
VARIANTS += [PercentMatchSettings(score_source="labelled_conditional", refresh=2)]


def two_databases() -> Tensor:
    """The second half of the labelled rows is of a database that annotates the first three classes only."""
    unknown = torch.zeros(2 * B, C, dtype=torch.bool)
    unknown[B:, 3:] = True
    return unknown


def test_the_loss_of_two_databases_by_hand() -> None:
    y = torch.tensor([[1.0, 0.0, 1.0, 0.0, 1.0], [0.0, 1.0, 0.0, torch.nan, torch.nan]]).double()
    logits = torch.linspace(-2, 2, 10).double().reshape(2, 5).requires_grad_()
    loss = bce(logits, y, annotation_weights(y))
    loss.backward()
    entries = [
        np.log1p(np.exp(-s if label else s))
        for s, label in zip(logits.flatten().tolist(), y.flatten().tolist(), strict=True)
        if label == label
    ]
    assert loss.item() == pytest.approx(sum(entries) / 8, rel=1e-12)
    assert logits.grad is not None
    assert (logits.grad[1, 3:] == 0).all()
    assert (logits.grad[y == y] != 0).all()


def test_a_forgotten_weight_is_loud() -> None:
    y = torch.tensor([[1.0, torch.nan]])
    assert bce(torch.zeros(1, 2), y).isnan()
    assert annotation_weights(torch.ones(3, 2)) is None


def test_all_known_is_the_plain_loss_to_the_bit() -> None:
    _, y, _ = data()
    logits = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).double()
    weight = annotation_weights(y)
    assert weight is None
    assert torch.equal(bce(logits, y, weight), F.binary_cross_entropy_with_logits(logits, y))


def after_steps(rank: int, world: int, settings: Any) -> dict[str, Tensor]:
    trainer = Trainer(rank, world, settings, unknown=two_databases())
    for _ in range(STEPS):
        losses = trainer.one()
        assert all(value.isfinite().all() for value in losses.values())
    return trainer.state()


@pytest.mark.parametrize("settings", VARIANTS, ids=lambda s: s.name)
def test_finite_and_the_same_on_two_ranks(settings: Any) -> None:
    alone = after_steps(0, 1, settings)
    # PercentMatch keeps the labels that it has seen, with the unknown ones as they are.
    assert all(value.isfinite().all() for key, value in alone.items() if key != "method.labelled")
    for state in run_threads(2, after_steps, settings):
        for key, value in state.items():
            torch.testing.assert_close(
                value, alone[key], rtol=1e-9, atol=1e-11, equal_nan=True, msg=lambda m, key=key: f"{key}: {m}"
            )


@pytest.mark.parametrize("settings", VARIANTS, ids=lambda s: s.name)
def test_unknown_is_not_negative(settings: Any) -> None:
    """The run with unknown labels is not the run in which they are zeros: they would pull the classes down."""
    zeros = Trainer(0, 1, settings)
    zeros.y_b[two_databases()] = 0.0
    unknown = Trainer(0, 1, settings, unknown=two_databases())
    for _ in range(STEPS):
        zeros.one()
        unknown.one()
    own, others = unknown.state(), zeros.state()
    biases = [key for key in own if key.startswith("student.") and "auxiliary" not in key and own[key].shape == (C,)]
    assert biases
    for key in biases:
        assert not torch.equal(own[key][3:], others[key][3:])


@pytest.mark.parametrize("similarity", ["cosine", "pearson", "euclidean", "expected"])
def test_correlation_uses_the_rows_that_have_both_labels(similarity: Any) -> None:
    y = (torch.rand(40, 4, generator=torch.Generator().manual_seed(0)) < 0.4).double()
    whole = labelled_correlation(y, similarity)
    assert torch.equal(whole, correlation(y, similarity))
    y[20:, 2] = torch.nan
    R = labelled_correlation(y, similarity)
    assert torch.allclose(R[:2, :2], whole[:2, :2])
    assert torch.allclose(R[2, [0, 1, 3]], correlation(y[:20], similarity)[2, [0, 1, 3]])
    as_negative = correlation(y.nan_to_num(0.0), similarity)
    assert not torch.allclose(R[2, [0, 1, 3]], as_negative[2, [0, 1, 3]])


def test_pairs_that_nobody_has_seen_are_not_aligned() -> None:
    y = torch.tensor([[1.0, 1.0, torch.nan], [0.0, 1.0, torch.nan], [1.0, torch.nan, 1.0]])
    R_b = labelled_correlation(y)
    assert R_b[1, 2].isnan()
    R_u = torch.rand(3, 3, requires_grad=True)
    loss = correlation_alignment(R_b, R_u)
    loss.backward()
    assert loss.isfinite()
    assert R_u.grad is not None
    assert R_u.grad[1, 2] == R_u.grad[2, 1] == 0


def test_frequencies_are_of_those_looked_at() -> None:
    y = torch.tensor([[1.0, torch.nan], [0.0, 1.0], [0.0, torch.nan]])
    assert class_frequencies(y).tolist() == pytest.approx([1 / 3, 1.0])


def test_percentmatch_puts_unknown_labels_on_no_side() -> None:
    settings = PercentMatchSettings(score_source="labelled_conditional")
    method = PercentMatch(settings, Task(torch.ones(4, 1), rows=3, steps=10, width=8, seed=1))
    known = torch.tensor([[0.1, 0.0], [0.2, 0.0], [0.9, 1.0]]).double()
    smuggled = torch.cat([known, torch.tensor([[0.99, torch.nan]]).double()])
    thresholds = []
    for scored in (known, smuggled):
        method.fresh, method.labelled = True, scored[:, :, None]
        method.refresh()
        thresholds.append(method.tau.clone())
    assert torch.equal(*thresholds)


def test_hidden_diagnostics_are_of_known_recordings() -> None:
    hidden = torch.tensor([[1, UNKNOWN], [0, UNKNOWN], [UNKNOWN, UNKNOWN]], dtype=torch.uint8)
    diagnostics = Diagnostics(["A", "B"], hidden)
    pseudo = torch.tensor([[0.9, 0.1], [0.2, 0.2], [0.99, 0.3]])
    diagnostics.add(torch.arange(3), {"pseudo_labels": pseudo, "weights": torch.ones(3, 2), "predictions": pseudo})
    found = diagnostics.summary()
    assert found["hidden/pseudo_ap/A"] == 1.0  # the third recording, with the highest score, has no say
    assert not [name for name in found if name.startswith("hidden/") and name.endswith("/B")]
    assert found["weight/B"] == 1.0
