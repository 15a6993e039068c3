"""Metrics against scikit-learn, numbers by hand, and classes that are absent."""

import json
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as sk

from ecgmatch_dist import metrics
from ecgmatch_dist.data.labels import UNKNOWN
from ecgmatch_dist.errors import UserError

CLASSES = ["CD", "Rhythm", "STT", "Other", "Normal"]

# Four recordings, three classes, thresholds of 0.5.
Y = np.array([[1, 0, 0], [1, 1, 0], [0, 0, 1], [0, 0, 0]], np.uint8)
P = np.array([[0.9, 0.2, 0.6], [0.3, 0.8, 0.1], [0.7, 0.5, 0.4], [0.1, 0.2, 0.3]], np.float32)


def test_by_hand() -> None:
    got = asdict(metrics.compute_metrics(Y, P, np.full(3, 0.5), ["a", "b", "c"]))
    # Pairs out of order: row 2 has its positive c below a and b (2 of 2); the other rows none.
    assert got["ranking_loss"] == pytest.approx((0 + 0 + 1 + 0) / 4)
    # How far one must go down the list to have all positives: 1, 2, 3; nothing to find in the last row.
    assert got["coverage"] == pytest.approx((1 + 2 + 3 + 0) / 4)
    # Predicted (0.5 >= 0.5 counts): row 0 a c, row 1 b, row 2 a b, row 3 none. Wrong: c; a; a, b, c.
    assert got["hamming_loss"] == pytest.approx(5 / 12)
    assert got["accuracy"] == pytest.approx(1 / 4)
    # a: TP 1 FP 1 FN 1. b: TP 1 FP 1 FN 0. c: TP 0 FP 1 FN 1.
    assert got["macro_gbeta"] == pytest.approx((1 / 4 + 1 / 2 + 0) / 3)
    assert got["macro_fbeta"] == pytest.approx((5 / 10 + 5 / 6 + 0) / 3)
    # a: sorted 0.9+ 0.7- 0.3+ 0.1-: AP (1 + 2/3) / 2, AUC 3/4. b: the best is positive. c: 0.6- 0.4+: AP 1/2, AUC 2/3.
    assert got["map"] == pytest.approx((5 / 6 + 1 + 1 / 2) / 3)
    assert got["macro_auc"] == pytest.approx((3 / 4 + 1 + 2 / 3) / 3)
    assert got["absent"] == ()
    expected = {"ap": 1, "auc": 1, "gbeta": 0.5, "fbeta": 5 / 6, "precision": 0.5, "recall": 1, "prevalence": 0.25}
    assert got["per_class"]["b"] == pytest.approx({**expected, "threshold": 0.5})


@st.composite
def parts(draw: Any) -> tuple[Any, Any]:
    """Labels and coarse probabilities (many ties) of up to 40 recordings and 5 classes."""
    n, C = draw(st.integers(1, 40)), draw(st.integers(2, 5))
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    levels = draw(st.sampled_from([2, 5, 1000]))
    y = (rng.random((n, C)) < draw(st.sampled_from([0.05, 0.3, 0.9]))).astype(np.uint8)
    return y, (rng.integers(0, levels, (n, C)) / levels).astype(np.float32)


@settings(max_examples=40, deadline=None)
@given(parts())
def test_equal_to_scikit_learn(part: tuple[Any, Any]) -> None:
    y, p = part
    classes = CLASSES[: y.shape[1]]
    thresholds = np.linspace(0.2, 0.7, len(classes))
    got = asdict(metrics.compute_metrics(y, p, thresholds, classes))
    hard = (p >= thresholds).astype(int)
    assert got["ranking_loss"] == pytest.approx(sk.label_ranking_loss(y, p))
    assert got["coverage"] == pytest.approx(sk.coverage_error(y, p))
    assert got["hamming_loss"] == pytest.approx(sk.hamming_loss(y, hard))
    assert got["accuracy"] == pytest.approx(sk.accuracy_score(y, hard))
    there = [c for c in range(len(classes)) if 0 < y[:, c].sum() < len(y)]
    assert list(got["absent"]) == [name for c, name in enumerate(classes) if c not in there]
    if there:
        y, p, hard = y[:, there], p[:, there], hard[:, there]
        assert got["map"] == pytest.approx(sk.average_precision_score(y, p, average="macro"))
        assert got["macro_auc"] == pytest.approx(sk.roc_auc_score(y, p, average="macro"))
        f = [sk.fbeta_score(y[:, c], hard[:, c], beta=2, zero_division=0) for c in range(len(there))]
        assert got["macro_fbeta"] == pytest.approx(np.mean(f))
        for c, name in enumerate(classes[i] for i in there):
            value = got["per_class"][name]
            assert value["precision"] == pytest.approx(sk.precision_score(y[:, c], hard[:, c], zero_division=0))
            assert value["recall"] == pytest.approx(sk.recall_score(y[:, c], hard[:, c]))


@settings(max_examples=40, deadline=None)
@given(parts())
def test_never_nan_and_plain_json(part: tuple[Any, Any]) -> None:
    y, p = part
    classes = CLASSES[: y.shape[1]]
    got = asdict(metrics.compute_metrics(y, p, metrics.best_thresholds(y, p), classes))
    json.dumps(got, allow_nan=False)  # numpy numbers and nan are refused
    layout = {"ranking_loss", "hamming_loss", "coverage", "map", "macro_auc", "macro_gbeta", "macro_fbeta", "accuracy"}
    assert set(got) == layout | {"per_class", "absent"}
    assert all(isinstance(got[name], float) for name in layout)
    assert list(got["per_class"]) == classes
    for value in got["per_class"].values():
        assert list(value) == [*metrics.PER_CLASS, "prevalence", "threshold"]


def test_absent_classes_are_stated_and_left_out() -> None:
    y, p = Y.copy(), P.copy()
    y[:, 1], y[:, 2] = 0, 1
    got = asdict(metrics.compute_metrics(y, p, np.full(3, 0.5), ["a", "b", "c"]))
    assert got["absent"] == ("b", "c")
    assert got["map"] == got["per_class"]["a"]["ap"] == pytest.approx(5 / 6)
    assert got["macro_gbeta"] == pytest.approx(1 / 4)
    assert got["per_class"]["b"]["ap"] is None
    assert (got["per_class"]["b"]["prevalence"], got["per_class"]["c"]["prevalence"]) == (0, 1)
    nothing = asdict(metrics.compute_metrics(np.zeros_like(Y), p, np.full(3, 0.5), ["a", "b", "c"]))
    assert (nothing["map"], nothing["macro_auc"], nothing["absent"]) == (0, 0, ("a", "b", "c"))


@settings(max_examples=30, deadline=None)
@given(parts())
def test_thresholds_maximise_f2_among_all(part: tuple[Any, Any]) -> None:
    y, p = part
    chosen = metrics.best_thresholds(y, p)
    for c in range(y.shape[1]):
        if not 0 < y[:, c].sum() < len(y):
            assert chosen[c] == 0.5
            continue

        def f2(threshold: float, c: int = c) -> float:
            return float(sk.fbeta_score(y[:, c], p[:, c] >= threshold, beta=2, zero_division=0))

        assert f2(chosen[c]) == pytest.approx(max(f2(t) for t in np.unique(p[:, c])))
        # The number that is saved decides as the number that was chosen: the boundary recording stays positive.
        assert f2(json.loads(json.dumps(float(chosen[c])))) == f2(chosen[c])


def test_the_boundary_recording_is_positive() -> None:
    y, p = np.array([[1], [1], [0]], np.uint8), np.array([[0.9], [0.6], [0.1]], np.float32)
    threshold = metrics.best_thresholds(y, p)
    assert threshold[0] == p[1, 0]
    assert metrics.compute_metrics(y, p, threshold, ["a"]).macro_fbeta == 1


def test_what_cannot_be_measured_is_an_error() -> None:
    with pytest.raises(UserError, match="part of the split is empty"):
        metrics.compute_metrics(Y[:0], P[:0], np.full(3, 0.5), ["a", "b", "c"])
    broken = P.copy()
    broken[1, 0] = np.nan
    with pytest.raises(UserError, match=r"1 of 4 predictions .* diverged"):
        metrics.best_thresholds(Y, broken)


def test_labels_that_nobody_has_given_count_nowhere() -> None:
    """By hand: two databases, of which the second annotates the first class only."""
    y = np.array([[1, 0], [0, 1], [1, 0], [0, UNKNOWN], [1, UNKNOWN]], np.uint8)
    p = np.array([[0.9, 0.2], [0.3, 0.8], [0.6, 0.7], [0.7, 0.99], [0.4, 0.01]])
    thresholds = metrics.best_thresholds(y, p)
    assert thresholds[1] == metrics.best_thresholds(y[:3], p[:3])[1] == 0.8
    found = metrics.compute_metrics(y, p, np.array([0.5, 0.5]), ["A", "B"])
    assert found.per_class["B"].ap == 1.0  # the fourth recording's 0.99 has no say
    assert found.per_class["B"].prevalence == pytest.approx(1 / 3)
    assert found.per_class["A"].prevalence == pytest.approx(3 / 5)
    assert found.hamming_loss == pytest.approx(3 / 8)  # wrong: row 3 B, row 4 A, row 5 A
    assert found.accuracy == pytest.approx(2 / 5)
    assert found.ranking_loss == pytest.approx((0 + 0 + 1) / 5)  # row 3 ranks B above A
    assert found.coverage == pytest.approx((1 + 1 + 2 + 0 + 1) / 5)
    assert found.absent == ()
    nobody = y.copy()
    nobody[:, 1] = UNKNOWN
    found = metrics.compute_metrics(nobody, p, np.array([0.5, 0.5]), ["A", "B"])
    assert found.absent == ("B",)
    assert found.map == found.per_class["A"].ap


def test_a_recording_without_any_label_is_refused() -> None:
    y = np.array([[1, 0], [0, 1], [UNKNOWN, UNKNOWN]], np.uint8)
    with pytest.raises(UserError, match="1 of 3 recordings to measure on have no label"):
        metrics.compute_metrics(y, np.full((3, 2), 0.5), np.array([0.5, 0.5]), ["A", "B"])
    with pytest.raises(UserError, match="no label"):
        metrics.best_thresholds(y, np.full((3, 2), 0.5))
