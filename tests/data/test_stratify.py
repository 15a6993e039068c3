"""Our stratified draw is the library's, recording by recording."""

import numpy as np
import pytest
from iterstrat.ml_stratifiers import MultilabelStratifiedShuffleSplit

from ecgmatch_dist.data import stratify


@pytest.mark.parametrize("fraction", [0.01, 0.05, 0.1, 0.2, 0.5])
def test_it_draws_what_the_library_draws(fraction: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stratify, "BLOCK", 16)
    rng = np.random.default_rng(0)
    for seed in range(20):
        n, classes = int(rng.integers(3, 300)), int(rng.integers(2, 7))
        y = (rng.random((n, classes)) < rng.choice([0.05, 0.3, 0.6])).astype(np.uint8)
        random, other = np.random.RandomState(seed), np.random.RandomState(seed)
        library = MultilabelStratifiedShuffleSplit(n_splits=1, test_size=fraction, random_state=other)
        expected = np.isin(np.arange(n), next(library.split(np.zeros(n), y))[1])
        assert np.array_equal(stratify.draw_stratified(y, fraction, random), expected)
        assert random.random_sample() == other.random_sample(), "and leaves the same random numbers"
