"""Limb leads of which only the shapes are known get their proportions back."""

import numpy as np
import pytest

from ecgmatch_dist.label.draw import limb_sizes, picture


def limb_leads(seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    one, two = np.cumsum(rng.standard_normal((2, 500)), 1)
    one, two = one - one.mean(), 0.4 * (two - two.mean())
    return np.stack([one, two, two - one, -(one + two) / 2, one - two / 2, two - one / 2])


def test_proportions_come_back() -> None:
    leads = limb_leads()
    deviation = leads.std(1)
    sizes = limb_sizes((leads / deviation[:, None]).astype(np.float16))
    assert sizes == pytest.approx(deviation / np.median(deviation), rel=0.02)


def test_leads_that_do_not_fit_together_are_left_alone() -> None:
    leads = limb_leads()
    shapes = leads / leads.std(1, keepdims=True)
    swapped = shapes[[0, 1, 2, 3, 5, 4]]
    noise = np.random.default_rng(1).standard_normal((6, 500))
    flat = np.where(np.arange(6)[:, None] == 2, 0, shapes)
    for x in (swapped, noise, flat, 0 * shapes):
        assert limb_sizes(x) is None


def test_the_picture_says_whether_it_did() -> None:
    x = np.zeros((12, 600), np.float16)
    x[:6, :500] = limb_leads() / limb_leads().std(1, keepdims=True)
    svg, done = picture(x, 100, "<name>")
    assert done
    assert "&lt;name&gt;" in svg
    assert picture(np.zeros((12, 600), np.float16), 100, "n")[1] is False
