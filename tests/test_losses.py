"""Every equation against numbers by hand and against slow loops; the correlation across ranks."""

import copy
import math
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ecgmatch_dist import losses
from ecgmatch_dist.distributed import collectives
from ecgmatch_dist.network.student import data_parallel
from tests.support.ranks import run_processes, run_threads

SIMILARITIES = get_args(losses.Similarity)


def test_pseudo_labels_and_agreement_by_hand() -> None:
    # Two rows, K = 4, C = 2. Row 0 votes 3/4 and 1/2, row 1 0 and 1.
    p = torch.tensor([[[1.0, 0.5], [1, 0.5], [1, 0.5], [0, 0.5]], [[0, 1], [0, 1], [0, 1], [0, 1]]])
    y = losses.pseudo_labels(p)
    assert y.tolist() == [[0.75, 0.5], [0, 1]]
    assert losses.neighbour_agreement(y).tolist() == [[0.5, 0], [1, 1]]


def test_bce_by_hand() -> None:
    # q = 3/4 and 1/2; labels 1 and 0: losses -log(3/4), -log(1/2). Soft label 1/2 on q = 3/4: the mean of both sides.
    logits = torch.tensor([[math.log(3), 0.0]], dtype=torch.float64)
    hard = (-math.log(0.75) - math.log(0.5)) / 2
    assert losses.bce(logits, torch.tensor([[1, 0]])).item() == pytest.approx(hard)
    soft = (-(math.log(0.75) + math.log(0.25)) / 2 - math.log(0.5)) / 2
    assert losses.bce(logits, torch.tensor([[0.5, 0.0]])).item() == pytest.approx(soft)
    # Weight 0 removes the second term from the sum, not from the number of terms.
    weight = torch.tensor([[1.0, 0.0]])
    assert losses.bce(logits, torch.tensor([[1.0, 0.0]]), weight).item() == pytest.approx(-math.log(0.75) / 2)


def test_bce_is_finite_for_certain_and_wrong_predictions() -> None:
    logits = torch.tensor([[1e4, -1e4], [300.0, -300]], requires_grad=True)
    loss = losses.bce(logits, torch.tensor([[0.0, 1.0], [0.0, 1.0]]))
    torch.autograd.backward(loss)
    assert loss.item() == pytest.approx((1e4 + 1e4 + 300 + 300) / 4)
    assert logits.grad is not None
    assert logits.grad.tolist() == [[0.25, -0.25], [0.25, -0.25]]
    assert losses.bce(torch.zeros(2, 3, dtype=torch.bfloat16), torch.ones(2, 3)).dtype == torch.float32


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 5), st.integers(1, 6), st.integers(1, 4), st.integers(0, 10**6))
def test_equations_1_2_6_7_against_loops(U: int, K: int, C: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    p, q = rng.random((U, K, C)), rng.random((U, C))
    plain = weighted = 0.0
    for i in range(U):
        for c in range(C):
            y = sum(p[i, k, c] for k in range(K)) / K
            alpha = abs(2 / K * sum(p[i, k, c] for k in range(K)) - 1)
            term = (1 - y) * math.log(1 - q[i, c]) + y * math.log(q[i, c])
            plain -= term / (U * C)
            weighted -= alpha * term / (U * C)
    y_UC, logits = losses.pseudo_labels(torch.tensor(p)), torch.logit(torch.tensor(q))
    assert losses.bce(logits, y_UC).item() == pytest.approx(plain, rel=1e-10)
    assert losses.bce(logits, y_UC, losses.neighbour_agreement(y_UC)).item() == pytest.approx(weighted, rel=1e-10)


# Four rows, three classes: the first two share one of two positives; the third is absent.
Y = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 1, 0], [0, 0, 0]], dtype=torch.uint8)


def test_correlation_by_hand() -> None:
    # Cosine: 1 / (sqrt 2 sqrt 2) = sqrt(P(a|b) P(b|a)) = 1/2; an absent class has zeros, diagonal included.
    expected = [[1, 0.5, 0], [0.5, 1, 0], [0, 0, 0]]
    torch.testing.assert_close(losses.correlation(Y), torch.tensor(expected), rtol=1e-6, atol=0)
    # Pearson: half of the rows each, overlapping in one of four: covariance 1/4 - 1/4 = 0.
    expected = [[1, 0, 0], [0, 1, 0], [0, 0, 0]]
    torch.testing.assert_close(losses.correlation(Y, "pearson"), torch.tensor(expected).float(), rtol=3e-6, atol=1e-9)
    # Euclid: the columns a and b differ in two rows, each from the zero column in two.
    r = 1 / (1 + math.sqrt(2))
    expected = [[1, r, r], [r, 1, r], [r, r, 1]]
    torch.testing.assert_close(losses.correlation(Y, "euclidean"), torch.tensor(expected))


def test_correlation_is_clipped() -> None:
    opposite = torch.tensor([[1.0, -1.0], [0.5, -0.5]])
    assert losses.correlation(opposite)[0, 1] == 0


def slow_correlation(p: np.ndarray, similarity: str) -> np.ndarray:
    """Two columns at a time, from the definitions."""
    r = np.zeros((p.shape[1], p.shape[1]))
    for i in range(p.shape[1]):
        for j in range(p.shape[1]):
            a, b = p[:, i], p[:, j]
            if similarity == "pearson":
                a, b = a - a.mean(), b - b.mean()
            r[i, j] = a @ b / (np.linalg.norm(a) * np.linalg.norm(b) + 1e-6)
            if similarity == "pearson":
                r[i, j] **= 2
            if similarity == "euclidean":
                r[i, j] = 1 / (1 + np.linalg.norm(a - b))
            if similarity == "expected":
                r[i, j] = 1 if i == j else a @ b / (np.sqrt(a.sum() * b.sum()) + 1e-6)
    return np.clip(r, 0, 1)


@pytest.mark.parametrize("similarity", SIMILARITIES)
@settings(max_examples=30, deadline=None)
@given(st.integers(2, 40), st.integers(1, 6), st.integers(0, 10**6))
def test_correlation_against_loops(similarity: losses.Similarity, n: int, C: int, seed: int) -> None:
    p = np.random.default_rng(seed).random((n, C)) ** 3
    got = losses.correlation(torch.tensor(p), similarity).numpy()
    np.testing.assert_allclose(got, slow_correlation(p, similarity), rtol=1e-9, atol=1e-12)
    assert got.min() >= 0
    assert got.max() <= 1


@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_correlation_is_safe(similarity: losses.Similarity) -> None:
    """Zero, constant and equal columns, one row: finite values and gradients."""
    for rows in ([[0.0, 0.5, 1, 1, 0.3], [0, 0.5, 1, 1, 0.9]], [[0.0, 0.5, 1, 1, 0.3]]):
        p = torch.tensor(rows, requires_grad=True)
        r = losses.correlation(p, similarity)
        torch.autograd.backward(losses.correlation_alignment(torch.eye(5), r))
        assert torch.isfinite(r).all()
        assert p.grad is not None
        assert torch.isfinite(p.grad).all()
    many = torch.full((50_000, 2), 0.7)
    assert losses.correlation(many, similarity).dtype == torch.float32
    assert losses.correlation(many.bfloat16(), similarity).dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = losses.correlation(p, similarity)
    assert torch.equal(inside, r)


def test_alignment_by_hand_and_where_equal() -> None:
    R_b, R_u = torch.eye(2), torch.tensor([[1.0, 3.0], [4.0, 1.0]], requires_grad=True)
    assert losses.correlation_alignment(R_b, R_u).item() == 5
    loss = losses.correlation_alignment(R_u.detach(), R_u)
    torch.autograd.backward(loss)
    assert loss.item() == 0
    assert R_u.grad is not None
    assert R_u.grad.tolist() == [[0, 0], [0, 0]]


def test_total_by_hand() -> None:
    assert losses.total(torch.tensor(1.0), torch.tensor(2.0), torch.tensor(3.0), 0.5, 2.0).item() == 8


@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_gradients(similarity: losses.Similarity) -> None:
    torch.manual_seed(0)
    logits = torch.randn(7, 3, dtype=torch.float64, requires_grad=True)
    R_b, y = losses.correlation(Y, similarity).double(), torch.rand(7, 3, dtype=torch.float64)

    def loss(logits: Tensor) -> Tensor:
        L_u = losses.bce(logits, y, losses.neighbour_agreement(y))
        L_f = losses.correlation_alignment(R_b, losses.correlation(logits.sigmoid(), similarity))
        return losses.total(losses.bce(logits, (y > 0.5).double()), L_u, L_f, 0.8, 1.2)

    assert torch.autograd.gradcheck(loss, [logits])


def ecgmatch_gradient(rank: int, world: int, layer: nn.Linear, x: Tensor, y: Tensor, similarity: Any) -> dict[str, Any]:
    """Equation 12 on this rank's equal share of the rows."""
    layer = copy.deepcopy(layer)
    share = slice(rank * len(x) // world, (rank + 1) * len(x) // world)
    model = data_parallel(layer)
    logits = model(x[share])
    R_u = losses.correlation(logits.sigmoid(), similarity, collectives.all_sum)
    L_f = losses.correlation_alignment(losses.correlation(Y, similarity).to(R_u.dtype), R_u)
    L_u = losses.bce(logits, y[share], losses.neighbour_agreement(y[share]))
    loss = losses.total(losses.bce(logits, y[share].round()), L_u, L_f, 0.8, 1.2)
    torch.autograd.backward(loss)
    assert layer.weight.grad is not None
    mean = collectives.all_sum_nograd(loss) / world
    return {"R_u": R_u.detach(), "L_f": L_f.item(), "loss": mean.item(), "gradient": layer.weight.grad.clone()}


@pytest.mark.parametrize(("run", "w"), [(run_threads, 2), (run_threads, 4), (run_processes, 2)])
@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_ranks_equal_one_process(run: Any, w: int, similarity: losses.Similarity) -> None:
    torch.manual_seed(4)
    layer = nn.Linear(6, 3).double()
    x, y = torch.randn(16, 6, dtype=torch.float64), torch.rand(16, 3, dtype=torch.float64)
    one = ecgmatch_gradient(0, 1, layer, x, y, similarity)
    for got in run(w, ecgmatch_gradient, layer, x, y, similarity):
        torch.testing.assert_close(got["R_u"], one["R_u"], rtol=1e-12, atol=1e-15)
        assert got["L_f"] == pytest.approx(one["L_f"], rel=1e-12)
        assert got["loss"] == pytest.approx(one["loss"], rel=1e-12)
        error = (got["gradient"] - one["gradient"]).abs().max()
        assert error <= 1e-12 * one["gradient"].abs().max()


def test_expected_is_the_cosine_of_labels_and_unbiased_for_probabilities() -> None:
    generator = torch.Generator().manual_seed(0)
    mix = torch.tensor([[2.0, 1.0, 0.0], [0.0, 2.0, 1.0], [0.0, 0.0, 2.0]])
    p = torch.sigmoid(torch.randn(100_000, 3, generator=generator) @ mix - 1)
    y = (torch.rand(p.shape, generator=generator) < p).float()  # labels that p is right about
    truth = losses.correlation(y, "cosine")
    torch.testing.assert_close(losses.correlation(y, "expected"), truth, atol=1e-5, rtol=0)
    torch.testing.assert_close(losses.correlation(p, "expected"), truth, atol=5e-3, rtol=0)
    assert (losses.correlation(p, "cosine") - truth).max() > 0.2  # the bias that "expected" avoids


def test_expected_without_positives_is_zero() -> None:
    r = losses.correlation(torch.tensor([[0.0, 1.0], [0.0, 0.0]]), "expected")
    assert r.tolist() == [[0.0, 0.0], [0.0, 1.0]]
