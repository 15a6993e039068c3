"""What more unlabelled recordings bring: the comparison of runs with several numbers of them."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import tests.support.run_factory as factory
from ecgmatch_dist.report.arrange import find_studies
from ecgmatch_dist.report.drawing import style
from ecgmatch_dist.report.run_files import SplitSizes, split_sizes
from ecgmatch_dist.report.runs import FinishedRun, find_runs
from ecgmatch_dist.report.studies import Column, column_of
from ecgmatch_dist.report.unlabelled import comparison_figure, comparison_table, find_comparisons

POOL = ("chapman", "g12ec")  # a split's databases are sorted; its name begins with the labelled one


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[FinishedRun], SplitSizes]:
    """Of 2,000 recordings 1,520 are unlabelled. Two labelled sets with 400 and all of them; a third has only 400."""
    root = tmp_path_factory.mktemp("runs")
    for seed in (19, 20, 21):
        factory.write_run(root, "supervised", seed=seed, quality=0.8)
        fewer = {"data.unlabelled": 400}
        factory.write_run(root, "ecgmatch", seed=seed, quality=1.2, tag="unlabelled=400", change=fewer)
        if seed < 21:
            factory.write_run(root, "ecgmatch", seed=seed, quality=2.0)
    runs, problems = find_runs(root, root / "report")
    assert not problems
    started = [
        replace(run, started_from=f"within-chapman@0.05.s{run.seed}.supervised" if run.method == "ecgmatch" else None)
        for run in runs
    ]
    return started, split_sizes(started, problems)


def test_the_same_labelled_sets_are_compared(found: tuple[list[FinishedRun], SplitSizes]) -> None:
    runs, sizes = found
    (comparison,) = find_comparisons(find_studies(runs), runs, sizes)
    assert [amount.recordings for amount in comparison.amounts] == [400, 1520]
    assert all([run.seed for run in amount.runs] == [19, 20] for amount in comparison.amounts), (
        "the third has one amount"
    )
    few, every = comparison.amounts
    assert np.mean(every.scores) > np.mean(few.scores)
    starts = [run.test.map for run in runs if run.method == "supervised" and run.seed < 21]
    assert every.gains == pytest.approx(np.subtract(every.scores, starts))


def test_the_table_and_the_figure_show_each_amount(found: tuple[list[FinishedRun], SplitSizes]) -> None:
    runs, sizes = found
    comparisons = find_comparisons(find_studies(runs), runs, sizes)
    rows = comparison_table(comparisons).blocks[0].rows
    assert [[cell.text for cell in row[2:5]] for row in rows] == [["Chapman", "400", "2"], ["Chapman", "1,520", "2"]]
    with style():
        (axis,) = comparison_figure(comparisons).axes
    thick = [line for line in axis.get_lines() if line.get_linewidth() == 2 and len(line.get_xdata())]
    assert [list(line.get_xdata()) for line in thick] == [[400, 1520]]


def test_recordings_of_other_databases_are_a_line_of_their_own(found: tuple[list[FinishedRun], SplitSizes]) -> None:
    runs, sizes = found
    more = [
        replace(run, databases=POOL, split=f"within-chapman+g12ec@0.05.s{run.seed}", split_sha256=f"more{run.seed}")
        for run in runs
        if run.seed < 21 and not run.tag
    ]
    there = {"chapman": {"unlabelled": 1520}, "g12ec": {"unlabelled": 1900}}
    sizes = sizes | {"more19": there, "more20": there}
    (comparison,) = find_comparisons(find_studies([*runs, *more]), [*runs, *more], sizes)
    assert [(a.databases, a.recordings) for a in comparison.amounts] == [
        (("chapman",), 400), (("chapman",), 1520), (POOL, 3420),
    ]  # fmt: skip
    assert comparison.column.label == "Chapman"
    assert column_of(more[0]).label == "Chapman (unlabelled: G12EC, too)"
    other = replace(more[0], split="within-g12ec+chapman@0.05.s19")
    assert column_of(other).label == "G12EC (unlabelled: Chapman, too)"


def test_one_amount_is_no_comparison(tmp_path: Path) -> None:
    factory.write_run(tmp_path, "ecgmatch")
    runs, problems = find_runs(tmp_path, tmp_path / "report")
    runs = [replace(run, started_from="start") for run in runs]
    assert find_comparisons(find_studies(runs), runs, split_sizes(runs, problems)) == []


def test_an_unseen_database_is_not_named_as_trained_on() -> None:
    """The databases of a split are those that it reads, the tested one among them."""
    column = Column("cross", "ecgmatch5", ("chapman", "ptbxl"), "ptbxl")
    assert column.label == "PTB-XL (from Chapman)"
    assert column.slug == "ptbxl-from-chapman"
