"""Which model is kept: the one with the highest validation MAP, and how long a run waits for a better one."""

from ecgmatch_dist.evaluate import Best


def test_the_best_model_is_kept_and_patience_counts() -> None:
    best = Best()
    kept = [best.update(step, value, [value]) for step, value in ((50, 0.5), (100, 0.7), (150, 0.6), (200, 0.65))]
    assert kept == [True, True, False, False]
    assert (best.map, best.step, best.thresholds, best.checks_since) == (0.7, 100, [0.7], 2)


def test_a_tie_goes_to_the_later_step() -> None:
    best = Best()
    assert best.update(50, 0.5, [0.1])
    assert best.update(100, 0.5, [0.2])
    assert (best.step, best.thresholds, best.checks_since) == (100, [0.2], 0)
