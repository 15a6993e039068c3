"""Keyed random numbers: distributions, independence, and the same bits in every batch."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from ecgmatch_dist import keyed

ROWS = torch.arange(512)
KNOWN_KEYS = [6616470582378235304, -3549675333533366959, -4748319252451056676]
KNOWN_INTEGERS = [[566, 755, 816, 839], [333, 240, 823, 607], [47, 467, 288, 317]]
KNOWN_PERMUTATION = [[2, 3, 5, 1, 4, 0]]
DRAWS = {
    "uniform": lambda keys, n: keyed.uniform(keys, n, 3),
    "normal": lambda keys, n: keyed.normal(keys, n, 3),
    "integers": lambda keys, n: keyed.integers(keys, n, 7, 3),
    "permutation": lambda keys, n: keyed.permutation(keys, n, 3),
}


@pytest.mark.parametrize("name", DRAWS)
@given(
    start=st.integers(0, 40),
    count=st.integers(0, 40),
    n=st.sampled_from([1, 2, 12, 33, 4097, keyed.CPU_BLOCK + 1]),
    order=st.randoms(),
)
@settings(max_examples=15, deadline=None)
def test_batching_does_not_change_a_bit(name, start, count, n, order):
    keys = keyed.row_keys(20, 5, 1, ROWS[:48])
    if n > 5000:
        keys = keys[:6]
        start, count = start % 6, count % 6
    whole = DRAWS[name](keys, n)
    assert torch.equal(DRAWS[name](keys[start : start + count], n), whole[start : start + count])
    shuffled = torch.tensor(order.sample(range(len(keys)), len(keys)))
    assert torch.equal(DRAWS[name](keys[shuffled], n), whole[shuffled])


def test_known_values_never_change():
    """A later version must draw the same numbers, or old runs cannot be resumed or compared."""
    keys = keyed.row_keys(20, 3, 1, torch.tensor([0, 1, 1 << 40]))
    assert keys.tolist() == KNOWN_KEYS
    assert keyed.integers(keys, 4, 1000, 2).tolist() == KNOWN_INTEGERS
    assert keyed.permutation(keys[:1], 6, 0).tolist() == KNOWN_PERMUTATION
    # The same bits as the integers, scaled; 23 bits against 32.
    assert torch.equal((keyed.uniform(keys, 4, 2).double() * 1000).long(), keyed.integers(keys, 4, 1000, 2))


def test_hash_equals_plain_python():
    """The tensor arithmetic (wrapping, logical shifts) against unlimited integers."""
    mask = (1 << 32) - 1
    keys = keyed.row_keys(1, 2, 3, torch.arange(50))
    for key, row in zip(keys.tolist(), keyed._bits(keys, 9, 4).tolist(), strict=True):
        word = keyed._mix64_int((key & ((1 << 64) - 1)) ^ keyed._mix64_int(5 * keyed.GOLDEN_64))
        for position, value in enumerate(row):
            x = (position * keyed.GOLDEN_32 + word) & mask
            x = ((x ^ (x >> 16)) * 0x21F0AAAD) & mask ^ (word >> 32)
            x = ((x ^ (x >> 15)) * 0xD35A2D97) & mask
            assert value & mask == x ^ (x >> 15)


@pytest.mark.parametrize("n", [1, 7, 12 * 256])
def test_works_without_data_on_meta(n):
    """The meta device has no values: any hidden host synchronisation would raise."""
    keys = keyed.row_keys(0, 0, 0, torch.arange(8, device="meta"))
    for draw in DRAWS.values():
        assert draw(keys, n).shape == (8, n)
    high = torch.ones(8, 1, dtype=torch.int64, device="meta")
    assert keyed.integers(keys, n, high, 0).device.type == "meta"
    assert keyed.batch_key(0, 0, 0, "meta").shape == (1,)


def test_keys_differ():
    keys = [keyed.row_keys(seed, step, view, ROWS) for seed in range(3) for step in range(20) for view in range(3)]
    keys += [keyed.batch_key(seed, step, 0) for seed in range(3) for step in range(20)]
    assert len(torch.cat(keys).unique()) == sum(map(len, keys))


def test_uniform_law():
    u = keyed.uniform(keyed.row_keys(20, 0, 0, ROWS), 2048, 0)
    assert u.dtype == torch.float32
    assert u.min() > 0
    assert u.max() < 1
    values = u.flatten().double()
    assert abs(values.mean() - 0.5) < 4 / (12 * values.numel()) ** 0.5
    assert abs(values.var() - 1 / 12) < 4 * (1 / 180 / values.numel()) ** 0.5
    for axis in (u, u[:1], u[:, :1]):  # all, one row, the first element of every row
        counts = np.bincount((axis.flatten() * 64).long().numpy(), minlength=64)
        assert stats.chisquare(counts).pvalue > 1e-4


def test_extreme_bits_stay_inside_the_open_interval():
    bits = torch.tensor([[-1, 0, 2**31 - 1, -(2**31)]], dtype=torch.int32)
    u = keyed._to_unit(bits, torch.empty(1, 4))
    assert u.min() == 2.0**-24
    assert u.max() == 1 - 2.0**-24


def test_normal_law():
    z = keyed.normal(keyed.row_keys(20, 0, 0, ROWS), 2047, 0)
    assert z.shape == (512, 2047)
    assert stats.kstest(z[:, ::16].flatten().numpy(), "norm").pvalue > 1e-4
    count = z.numel() ** 0.5
    assert abs(z.mean()) < 4 / count
    assert abs(z.double().var() - 1) < 4 * 2**0.5 / count
    assert abs((z.double() ** 4).mean() - 3) < 4 * 96**0.5 / count
    # Both outputs of a pair come from one radius: uncorrelated, in their squares too.
    first, second = z[:, :1023].flatten().double(), z[:, 1024:].flatten().double()
    for a, b in ((first, second), (first**2, second**2), (z[:, :-1].flatten(), z[:, 1:].flatten())):
        assert abs(torch.corrcoef(torch.stack([a, b]))[0, 1]) < 4 / len(a) ** 0.5


def test_neighbours_are_independent():
    """Neighbouring rows, steps, views, seeds and streams, in values and in each of the leading bits."""
    base = {"seed": 20, "step": 7, "view": 1}
    draws = [keyed.uniform(keyed.row_keys(rows=ROWS, **base), 512, 0)]
    draws += [keyed.uniform(keyed.row_keys(rows=ROWS, **{**base, k: v + 1}), 512, 0) for k, v in base.items()]
    draws += [keyed.uniform(keyed.row_keys(rows=ROWS, **base), 512, 1), draws[0].roll(1, 0), draws[0].roll(1, 1)]
    limit = 4.5 / draws[0].numel() ** 0.5
    values = torch.stack([d.flatten().double() for d in draws])
    for shift in range(8):
        parts = (values * 2**shift) % 1
        correlation = torch.corrcoef(parts) - torch.eye(len(draws))
        assert correlation.abs().max() < limit
        pairs = (parts[:1] * 8).long() * 8 + (parts[1:] * 8).long()
        for pair in pairs:
            assert stats.chisquare(np.bincount(pair.numpy(), minlength=64)).pvalue > 1e-5


def test_integers_and_permutations_are_uniform():
    keys = keyed.row_keys(20, 0, 0, torch.arange(24000))
    assert stats.chisquare(np.bincount(keyed.integers(keys, 3, 12, 0).flatten().numpy(), minlength=12)).pvalue > 1e-4
    high = torch.arange(1, 24001)[:, None]
    values = keyed.integers(keys, 3, high, 1)
    assert (values >= 0).all()
    assert (values < high).all()
    assert abs((values / high).mean() - 0.5) < 0.01
    orders = keyed.permutation(keys, 4, 2)
    assert torch.equal(orders.sort(1).values, torch.arange(4).expand(24000, 4))
    code = orders @ torch.tensor([64, 16, 4, 1])
    assert stats.chisquare(torch.unique(code, return_counts=True)[1].numpy()).pvalue > 1e-4
    assert len(code.unique()) == 24


def test_uses_no_global_generator():
    before = torch.random.get_rng_state()
    keyed.normal(keyed.row_keys(0, 0, 0, ROWS), 5, 0)
    assert torch.equal(before, torch.random.get_rng_state())
