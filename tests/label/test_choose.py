"""Which recording is asked about next: spread, then gain; never a duplicate; and the space that says what is alike."""

import numpy as np
import pytest

from ecgmatch_dist.label.choose import FIRST, Chooser, expected_gain
from ecgmatch_dist.label.space import Space, normal_ranks


def clusters(sizes: tuple[int, ...], seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Points [N, 40] in clusters far from each other, and the cluster of each."""
    rng = np.random.default_rng(seed)
    of = np.repeat(np.arange(len(sizes)), sizes)
    return (12 * rng.standard_normal((len(sizes), 40))[of] + rng.standard_normal((len(of), 40))).astype(np.float32), of


def chooser_of(features: np.ndarray, groups: np.ndarray | None = None, seed: int = 0) -> Chooser:
    return Chooser(Space(features), np.arange(len(features)) if groups is None else groups, seed)


def ask(chooser: Chooser, count: int, random: bool = False) -> list[int]:
    rows = []
    for _ in range(count):
        found = chooser.next(random=random)
        assert found
        chooser.take(found[0])
        rows.append(found[0])
    return rows


def test_the_spread_reaches_every_cluster_before_chance_does() -> None:
    features, of = clusters((600, 30, 30, 30, 30, 30))
    spread = [len({*of[ask(chooser_of(features, seed=s), 12)]}) for s in range(5)]
    chance = [len({*of[ask(chooser_of(features, seed=s), 12, random=True)]}) for s in range(5)]
    assert np.mean(spread) > np.mean(chance) + 0.5


def test_a_near_duplicate_is_never_asked_while_there_is_anything_else() -> None:
    features, _ = clusters((30, 30))
    doubled = np.concatenate([features, features])
    rows = ask(chooser_of(doubled), 60)
    assert len({row % 60 for row in rows}) == 60
    assert len({*ask(chooser_of(doubled), 120)}) == 120  # in the end all are asked


def test_a_patient_is_asked_once_while_there_are_others() -> None:
    features, _ = clusters((40,))
    groups = np.arange(40) // 2
    assert len({row // 2 for row in ask(chooser_of(features, groups), 20)}) == 20


def test_gain_is_uncertainty_of_rare_classes_where_recordings_are_many() -> None:
    p = np.array([[0.5, 0.0], [0.0, 0.5], [0.0, 0.0], [0.5, 0.5]], np.float32)
    labels = np.array([[1, 0]] * 15 + [[0, 0]] * 14 + [[0, 1]], np.uint8)
    gain = expected_gain(p, labels)
    assert gain[3] > gain[1] > gain[0] > gain[2] == 0
    features, of = clusters((100, 100))
    chooser = chooser_of(features)
    ask(chooser, FIRST)
    sure = np.where(of == 1, 0.5, 0.01)[:, None].astype(np.float32)
    chooser.learn(sure, labels[:, :1])
    row, why = chooser.next() or (-1, "")
    assert (of[row], why) == (1, "uncertain")
    assert chooser.space.density[row] > 0.5


def test_the_same_answers_give_the_same_questions_and_the_end_is_told() -> None:
    features, _ = clusters((10, 10))
    assert ask(chooser_of(features), 8) == ask(chooser_of(features), 8)
    chooser = chooser_of(features)
    assert sorted(ask(chooser, 20)) == list(range(20))
    assert chooser.next() is None
    assert chooser.next(random=True) is None


def test_one_recording_or_equal_ones_do_no_harm() -> None:
    for features in (np.zeros((1, 5), np.float32), np.ones((7, 5), np.float32)):
        assert sorted(ask(chooser_of(features), len(features))) == list(range(len(features)))


def test_units_and_outliers_do_not_decide_what_is_alike() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((200, 3))
    odd = np.stack([x[:, 0] * 1e6, np.exp(5 * x[:, 1]), x[:, 2]], 1)
    assert normal_ranks(odd) == pytest.approx(normal_ranks(x), abs=1e-6)


def test_density_agrees_with_a_plain_count_of_neighbours() -> None:
    features, _ = clusters((300, 20))
    space = Space(features)
    away = np.sqrt(((space.points[:, None] - space.points[None]) ** 2).sum(2))
    np.fill_diagonal(away, np.inf)
    plain = 1 / np.sort(away, 1)[:, :10].mean(1)
    assert space.density == pytest.approx(plain / np.median(plain), rel=1e-3)
    assert space.usual == pytest.approx(np.median(1 / plain), rel=1e-3)
    assert space.distances(3) == pytest.approx(np.where(np.isinf(away[3]), 0, away[3]), abs=1e-3)
