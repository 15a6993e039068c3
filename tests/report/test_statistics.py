"""Statistics of the report: golden values of the paper and of Demšar's tables, scipy and brute force as references."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from hypothesis.extra import numpy as arrays
from scipy import stats

from ecgmatch_dist.report import display, paper
from ecgmatch_dist.report import statistics as st

GREATER = {metric.key: metric.greater_is_better for metric in display.METRICS}


@pytest.mark.parametrize(
    ("protocol", "metric", "f"),
    [
        ("within", "ranking_loss", 5.4706),
        ("within", "coverage", 5.1290),
        ("cross", "hamming_loss", 5.0640),
        ("cross", "coverage", 22.8462),
    ],
)
def test_the_papers_tables_give_its_friedman_statistics(protocol: str, metric: str, f: float) -> None:
    test = st.friedman(paper.comparison(protocol, metric), GREATER[metric])
    assert round(test.f, 4) == f == paper.printed_f(protocol, metric)
    assert (test.k, test.n) == (8, 4)
    assert test.rejected
    assert test.f_tied == pytest.approx(test.f)  # these tables have no ties


def test_within_map_cannot_reach_the_papers_value_by_any_breaking_of_ties() -> None:
    values = paper.comparison("within", "map")
    choices = []
    for row in values:
        better = [[i for i in range(8) if row[i] == value] for value in sorted(set(row), reverse=True)]
        orders = itertools.product(*(itertools.permutations(group) for group in better))
        choices.append([np.argsort([i for group in order for i in group]) + 1.0 for order in orders])
    reached = {round(st.friedman(np.stack(ranks), False).f, 2) for ranks in itertools.product(*choices)}
    assert (min(reached), max(reached)) == (9.92, 12.04)
    assert paper.printed_f("within", "map") == 17.16


def test_critical_values() -> None:
    assert round(st.bonferroni_dunn(8, 4), 3) == 4.659
    test = st.friedman(paper.comparison("within", "map"), True)
    assert round(test.critical, 4) == 2.4876
    assert round(stats.f.ppf(0.95, 4, 12), 4) == 3.2592  # what the paper prints (3.2590) belongs to five methods


@pytest.mark.parametrize(
    ("k", "nemenyi", "dunn"), [(2, 1.960, 1.960), (5, 2.728, 2.498), (8, 3.031, 2.690), (10, 3.164, 2.773)]
)
def test_quantiles_are_those_of_demsars_table_5(k: int, nemenyi: float, dunn: float) -> None:
    assert round(st.nemenyi(k, 4) / st.rank_error(k, 4), 3) == nemenyi
    assert round(st.bonferroni_dunn(k, 4) / st.rank_error(k, 4), 3) == dunn


TABLES = arrays.arrays(
    np.float64, some.tuples(some.integers(2, 6), some.integers(3, 7)), elements=some.integers(0, 5).map(float)
)


@settings(max_examples=40, deadline=None)
@given(TABLES)
def test_tie_corrected_friedman_is_scipys(values: st.Array) -> None:
    n, k = values.shape
    test = st.friedman(values, True)
    assert test.ranks.sum() == pytest.approx(k * (k + 1) / 2)
    assert st.friedman(-values, False).f == pytest.approx(test.f)
    if np.all(values == values[:, :1]):
        assert test.f_tied == 0
    else:
        chi2 = stats.friedmanchisquare(*values.T).statistic
        assert test.f_tied == pytest.approx(st.iman_davenport(chi2, n, k), rel=1e-6)


def test_the_same_order_everywhere_is_infinitely_sure() -> None:
    test = st.friedman(np.array([[1.0, 2, 3], [4, 5, 6], [7, 8, 9]]), True)
    assert test.f == np.inf
    assert test.ranks.tolist() == [3, 2, 1]
    assert test.p == 0


def test_one_database_is_no_comparison() -> None:
    with pytest.raises(ValueError, match="at least two"):
        st.friedman(np.ones((1, 3)), True)


def test_nemenyi_p_falls_below_alpha_at_its_critical_difference() -> None:
    critical = st.nemenyi(3, 4)
    p = st.nemenyi_p(np.array([1.0, 1.0 + critical - 1e-6, 1.0 + critical + 1e-6]), 4)
    assert p[0, 1] > 0.05 > p[0, 2]
    assert np.array_equal(p, p.T)
    assert np.all(np.diag(p) == 1)


def test_holm_by_hand() -> None:
    assert st.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert st.holm([0.9, 0.8]) == [1.0, 1.0]
    assert st.holm([]) == []


def test_wilcoxon_of_six_wins_is_one_in_thirty_two() -> None:
    ours = np.array([0.7, 0.8, 0.75, 0.9, 0.65, 0.85])
    assert st.wilcoxon(ours, ours - np.array([0.01, 0.02, 0.03, 0.04, 0.05, 0.06])) == pytest.approx(2 / 64)
    assert st.wilcoxon(ours, ours) == 1.0
