"""The model beside the reader: it learns, says how well without having seen the answer, and doubts what is wrong."""

import numpy as np
import pytest

from ecgmatch_dist.data.labels import UNKNOWN
from ecgmatch_dist.label.growing import MODELS, best_model, doubted, grow, learn
from ecgmatch_dist.metrics import macro_ap


def problem(n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Two classes that two of four features tell, with noise."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, 4)).astype(np.float32)
    return x, (x[:, :2] + 0.3 * rng.standard_normal((n, 2)) > 0.8).astype(np.uint8)


def test_the_curve_rises_and_agrees_with_recordings_that_were_never_asked() -> None:
    x, y = problem(300)
    rows = np.arange(100)
    grown = grow(x, rows, y[:100])
    sizes, values = [n for n, _ in grown.curve], [at.value for _, at in grown.curve]
    assert sizes == [24, 36, 48, 64, 80]
    assert all(at.low <= at.value <= at.high for _, at in grown.curve)
    assert grown.probabilities.shape == (300, 2)
    assert grown.fit is not None
    elsewhere = macro_ap(y[100:], grown.probabilities[100:])
    assert elsewhere > 0.8
    assert values[0] < values[-1] < elsewhere + 0.05  # learnt from four fifths: never too high


@pytest.mark.parametrize("model", MODELS)
def test_unknown_is_no_no(model: str) -> None:
    x, y = problem(200)
    hidden = y.copy()
    hidden[::2, 0] = UNKNOWN
    lied = np.where(hidden == UNKNOWN, 0, hidden).astype(np.uint8)
    own, wrong = (learn(model, x, labels)(x)[y[:, 0] == 1, 0].mean() for labels in (hidden, lied))
    assert own > wrong + 0.1


def test_few_answers_one_class_or_no_positive_do_no_harm() -> None:
    x, y = problem(50)
    assert grow(x, np.arange(3), y[:3]).curve == ()
    one = grow(x, np.arange(19), np.zeros((19, 1), np.uint8))
    assert one.probabilities.shape == (50, 1)
    assert one.probabilities.max() < 0.1


def test_a_wrong_label_is_doubted_first() -> None:
    x, y = problem(150, seed=3)
    clear = int(np.argmax(x[:120, 0]))  # certainly of the first class
    labels = y[:120].copy()
    labels[clear, 0] = 0
    grown = grow(x, np.arange(120), labels)
    assert grown.doubts[0].row == clear
    assert (grown.doubts[0].class_, grown.doubts[0].label) == (0, 0)
    assert len(grown.doubts) <= 12


def test_a_weak_model_doubts_a_tenth_at_most() -> None:
    rng = np.random.default_rng(0)
    labels = (np.arange(75)[:, None] % 2).astype(np.uint8)
    p = np.clip(0.5 + 0.02 * labels + rng.normal(0, 0.2, (75, 1)), 0, 1).astype(np.float32)
    found = doubted(labels, p)
    assert len(found) == 8
    strongest = max(range(75), key=lambda row: p[row, 0] if labels[row, 0] == 0 else 0)
    assert strongest in {doubt.row for doubt in found}


def test_doubts_need_a_model_that_knows_the_class() -> None:
    labels = np.array([[1], [1], [0], [0]], np.uint8)
    assert doubted(labels, np.array([[0.2], [0.3], [0.6], [0.7]], np.float32)) == []
    assert doubted(labels, np.full((4, 1), 0.5, np.float32)) == []


def test_cross_validation_chooses_the_linear_head_where_it_is_the_better_one() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((150, 40)).astype(np.float32)  # as features of a network: each class is a direction of many
    y = (x @ rng.standard_normal((40, 2)) > 3).astype(np.uint8)
    grown = grow(x, np.arange(100), y[:100], models=tuple(MODELS))
    assert grown.model == "linear head"
    assert (
        macro_ap(y[100:], grown.probabilities[100:])
        > macro_ap(y[100:], learn("forest", x[:100], y[:100])(x[100:])) + 0.1
    )
    assert 0 <= grown.probabilities.min() <= grown.probabilities.max() <= 1
    boxes = ((x[:, :2] > 0.5) & (x[:, 2:4] < 0.5)).astype(np.uint8)
    assert best_model(x[:100], boxes[:100], 0, ("linear head", "forest")) == "forest"
