"""The keyed order: a bijection for any n, another one for any key, without a visible pattern."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ecgmatch_dist.data.order import Permutation, WindowPermutation


@given(n=st.integers(1, 3000), seed=st.integers(-(2**70), 2**70), epoch=st.integers(0, 10**9))
@settings(deadline=None)
def test_bijective_for_any_n(n: int, seed: int, epoch: int) -> None:
    rows = Permutation(n, seed, epoch)(np.arange(n))
    assert rows.dtype == np.int64
    assert np.array_equal(np.sort(rows), np.arange(n))


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 66_000, 2**16, 2**16 + 1, 1_000_003])
def test_bijective_at_the_edges(n: int) -> None:
    seen = np.zeros(n, bool)
    seen[Permutation(n, 20, 3)(np.arange(n))] = True
    assert seen.all()


@given(n=st.integers(1, 10**15), seed=st.integers(0, 100), data=st.data())
@settings(deadline=None)
def test_a_slice_is_the_same_wherever_it_is_asked(n: int, seed: int, data: st.DataObject) -> None:
    positions = np.array(data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=20)))
    permutation = Permutation(n, seed, 1)
    together = permutation(positions)
    assert ((together >= 0) & (together < n)).all()
    assert [int(permutation(np.array([p]))[0]) for p in positions] == together.tolist()
    assert len(set(together.tolist())) == len(set(positions.tolist()))


def test_seed_epoch_and_part_are_keys() -> None:
    at = np.arange(1000)
    orders = [Permutation(1000, s, e, p)(at) for s, e, p in [(20, 0, 0), (21, 0, 0), (20, 1, 0), (20, 0, 1)]]
    for i, one in enumerate(orders):
        for other in orders[:i]:
            assert (one == other).sum() < 12  # a random pair agrees at one place on average


@pytest.mark.parametrize("n", [1000, 1024, 66_000])
def test_no_visible_pattern(n: int) -> None:
    """Lag-1 and between-epoch correlation, and the means of blocks, as of a random permutation (5 standard errors)."""
    orders = np.stack([Permutation(n, 7, epoch)(np.arange(n)) for epoch in range(8)]).astype(float)
    z = (orders - (n - 1) / 2) / orders.std(1, keepdims=True)
    limit = 5 / np.sqrt(n)
    assert np.abs((z[:, 1:] * z[:, :-1]).mean(1)).max() < limit
    assert np.abs((z * np.linspace(-1.7, 1.7, n)).mean(1)).max() < limit
    between = z @ z.T / n - np.eye(8)
    assert np.abs(between).max() < limit
    blocks = z[:, : n // 50 * 50].reshape(8, 50, -1).mean(2)
    assert np.abs(blocks).max() < 5 / np.sqrt(n // 50)


def test_tiny_permutations_all_occur() -> None:
    seen = {tuple(Permutation(4, seed, 0)(np.arange(4)).tolist()) for seed in range(1000)}
    assert len(seen) == 24


@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=12),
    window=st.integers(1, 14),
    seed=st.integers(0, 50),
    epoch=st.integers(0, 5),
)
@settings(deadline=None)
def test_windows_are_bijective_and_keep_to_their_shards(sizes: list[int], window: int, seed: int, epoch: int) -> None:
    order = WindowPermutation(np.array(sizes), window, seed, epoch)
    n = sum(sizes)
    rows = order(np.arange(n))
    assert np.array_equal(np.sort(rows), np.arange(n))
    shard_of_row = np.repeat(np.arange(len(sizes)), sizes)
    for position in range(n):
        assert shard_of_row[rows[position]] in order.shards_of(order.window_of(position))
    used = [shard for w in range(-(-len(sizes) // window)) for shard in order.shards_of(w)]
    assert sorted(used) == list(range(len(sizes)))


def test_window_order_changes_with_the_epoch() -> None:
    sizes = np.full(10, 20)
    one, two = (WindowPermutation(sizes, 3, 1, epoch)(np.arange(200)) for epoch in (0, 1))
    assert (one == two).sum() < 10


def test_windows_of_one_epoch_are_mixed_differently() -> None:
    order = WindowPermutation(np.full(4, 50), 1, 1, 0)
    inside = order(np.arange(200)).reshape(4, 50) % 50
    for i, one in enumerate(inside):
        assert all((one == other).sum() < 10 for other in inside[:i])


def test_the_order_of_older_versions() -> None:
    """A checkpoint holds a position, not the order: another order would show a resumed run some recordings twice."""
    assert Permutation(1000, 20, 3)(np.arange(6)).tolist() == [235, 363, 917, 514, 0, 714]
    windows = WindowPermutation(np.array([50, 40, 60, 30, 20]), 2, 20, 3)
    assert windows(np.arange(0, 200, 29)).tolist() == [159, 177, 0, 91, 118, 192, 85]
    with pytest.raises(AssertionError, match="position outside the epoch"):
        Permutation(5, 20, 3)(np.array([5]))
