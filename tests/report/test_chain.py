"""Links of a chain and what more labels would buy."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

import tests.support.run_factory as factory
from ecgmatch_dist.report.arrange import find_studies
from ecgmatch_dist.report.assess import assess
from ecgmatch_dist.report.chain import (
    Link,
    chain_figure,
    chain_table,
    find_links,
    find_otherwise,
    otherwise_table,
    over_sets_and_recordings,
)
from ecgmatch_dist.report.drawing import style
from ecgmatch_dist.report.outlook import find_outlooks, outlook_figure, outlook_table
from ecgmatch_dist.report.run_files import split_sizes
from ecgmatch_dist.report.runs import FinishedRun, find_runs, with_trees


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[FinishedRun]:
    """Three labelled sets; ECGMatch is better than its start, a tagged one starts from nothing that is here."""
    root = tmp_path_factory.mktemp("runs")
    for seed in (19, 20, 21):
        factory.write_run(root, "supervised", seed=seed, quality=0.8)
        factory.write_run(root, "ecgmatch", seed=seed, quality=2.0)
    factory.write_run(root, "ecgmatch", seed=19, tag="alone", change={"init": "scratch"})
    found, problems = find_runs(root, root / "report")
    assert not problems
    return [
        replace(run, started_from=run.name.replace(".ecgmatch", ".supervised"))
        if run.method == "ecgmatch" and not run.tag
        else replace(run, started_from="somewhere-else" if run.tag else None)
        for run in found
    ]


@pytest.fixture(scope="module")
def links(runs: list[FinishedRun]) -> list[Link]:
    return find_links(runs)


def test_a_link_pairs_each_run_with_its_own_start(links: list[Link]) -> None:
    (link,) = links
    assert link.label == "Supervised → ECGMatch"
    assert [(start.method, run.method, start.seed == run.seed) for start, run in link.pairs] == [
        ("supervised", "ecgmatch", True)
    ] * 3


def public(runs: list[FinishedRun]) -> list[FinishedRun]:
    """The same chains, begun otherwise: each run and its start have the tag `public`."""
    return [
        replace(
            run,
            tag="public",
            name=f"{run.name}.public",
            started_from=run.started_from and f"{run.started_from}.public",
            settings=run.settings | {"weights": "chapman_ptbxl#1"},
        )
        for run in runs
        if not run.tag
    ]


def test_variants_of_a_sweep_are_links_of_their_own(runs: list[FinishedRun]) -> None:
    """A chain whose runs all have the tag `public` was counted as further labelled sets of the chain without one."""
    tagged = public(runs)
    found = {link.label: len(link.pairs) for link in find_links([*runs, *tagged])}
    assert found == {"Supervised → ECGMatch": 3, "Supervised → ECGMatch (public)": 3}


def test_a_chain_that_begins_otherwise_is_compared_with_the_plain_one(runs: list[FinishedRun]) -> None:
    plain = [run for run in runs if not run.tag]
    better = [replace(run, test=replace(run.test, map=run.test.map + 0.01)) for run in public(plain)]
    same_start = [replace(run, tag="no_vote", name=f"{run.name}.no_vote") for run in plain if run.started_from]
    members = [
        replace(run, tag="member2", settings=run.settings | {"member": 1}) for run in plain if not run.started_from
    ]
    found = find_otherwise([*plain, *better, *same_start, *members])
    assert {link.label: len(link.pairs) for link in found} == {"Supervised: public": 3, "ECGMatch: public": 3}
    for row in otherwise_table(found, {}).blocks[0].rows:
        assert row[-1].value == pytest.approx(0.01)
        assert row[5].value == pytest.approx(row[4].value + 0.01)
    assert find_otherwise([*plain, *same_start]) == []  # another setting on the same start is a matter of the studies


def test_another_start_is_not_blamed_for_other_settings(runs: list[FinishedRun]) -> None:
    begun = {"weights": "chapman_ptbxl#1", "model.dropout": 0.1}
    shorter = [replace(run, settings=run.settings | begun | {"optim.steps": 20}) for run in public(runs)]
    found = [link.label for link in find_otherwise([*runs, *shorter]) if "public" in link.label]
    assert found == ["Supervised: public (also other optim.steps)", "ECGMatch: public (also other optim.steps)"]


def trees_of(run: FinishedRun, better: float) -> FinishedRun:
    """What the run and its trees answer together."""
    folder, name = run.folder / "opinion", f"{run.name}/opinion"
    return replace(
        run, folder=folder, name=name, started_from=run.name, test=replace(run.test, map=run.test.map + better)
    )


def test_where_trees_answer_labels_alone_must_have_begun_alike(runs: list[FinishedRun]) -> None:
    """The bound of a chain that began with public weights began with them, too."""
    plain = [run for run in runs if not run.tag]
    asked = "chapman_ptbxl#0123456789abcdef"
    both = [*plain, *(replace(run, settings=run.settings | {"weights": asked}) for run in public(plain))]
    bounds = [
        replace(
            run,
            tag=f"{run.tag}trees",
            name=f"{run.name}.trees",
            folder=run.folder.with_name(f"{run.name}.trees"),
            settings=run.settings | {"weights": f"{asked}+fedcba9876543210" if run.tag else ""},
        )
        for run in both
        if not run.started_from
    ]
    answers = [trees_of(run, 0.02) for run in both if run.started_from]
    answers += [trees_of(run, 0.05 if "public" in run.tag else 0.01) for run in bounds]
    found = {link.label: link for link in find_links([*both, *bounds], answers)}
    for tag, gain in (("", 0.01), (" (public)", -0.03)):
        link = found[f"Supervised with its trees → ECGMatch with its trees{tag}"]
        plain_link = found[f"Supervised → ECGMatch{tag}"]
        assert len(link.pairs) == 3
        added = plain_link.mean("map", 1) - plain_link.mean("map", 0)
        assert link.mean("map", 1) - link.mean("map", 0) == pytest.approx(added + gain)
    assert not [link for link in find_otherwise([*both, *bounds]) if link.label.startswith("Supervised: trees")]


def test_two_folders_of_runs_may_have_runs_of_one_name(runs: list[FinishedRun]) -> None:
    one = next(run for run in runs if run.started_from)
    other = replace(one, folder=one.folder.parent / "b" / one.name, test=replace(one.test, map=one.test.map - 0.2))
    links = find_links([one, other], [trees_of(one, 0.01), trees_of(other, 0.01)])
    pairs = [pair for link in links for pair in link.pairs]
    assert [round(end.test.map - start.test.map, 6) for start, end in pairs] == [0.01, 0.01]


def test_the_table_has_means_and_an_interval_over_sets_and_recordings(
    runs: list[FinishedRun], links: list[Link]
) -> None:
    assessed = {}
    for split in {run.split_sha256 for run in runs}:
        assessed |= assess([run for run in runs if run.split_sha256 == split], 100)
    block = chain_table(links, assessed).blocks[0]
    (row,) = block.rows
    expected = np.mean([run.test.map - start.test.map for start, run in links[0].pairs])
    assert row[-1].value == pytest.approx(expected)
    assert row[-1].bold
    assert [cell.text for cell in row[1:4]] == ["Within one database: Chapman", "5 %", "3"]
    assert row[5].value is not None
    assert row[4].value is not None
    assert row[5].value > row[4].value


def test_without_predictions_there_is_a_difference_and_no_interval(links: list[Link]) -> None:
    cell = chain_table(links, {}).blocks[0].rows[0][-1]
    assert cell.text.endswith("–")
    assert not cell.bold


def test_the_figure_has_a_line_per_labelled_set_and_one_for_their_mean(links: list[Link]) -> None:
    with style():
        (axis,) = chain_figure(links).axes
    heights = [line.get_ydata() for line in axis.get_lines()]
    assert len(heights) == 4
    assert list(heights[-1]) == pytest.approx(np.mean(heights[:-1], axis=0))


def test_no_title_of_the_figure_is_cut_off(links: list[Link]) -> None:
    column = replace(links[0].column, protocol="mix", databases=("chapman", "ningbo", "ptbxl"))
    with style():
        figure = chain_figure([links[0], replace(links[0], column=column)])
        FigureCanvasAgg(figure)
        boxes = [axis.title.get_window_extent() for axis in figure.axes]
    assert figure.axes[1].get_title() == "Chapman + Ningbo +\nPTB-XL\n5 % labelled"
    assert boxes[0].x1 < boxes[1].x0
    assert all(figure.bbox.contains(*corner) for box in boxes for corner in (box.min, box.max))


def test_the_spread_of_labelled_sets_widens_the_interval() -> None:
    same, apart = np.full((5, 100), 0.02), np.linspace(-0.03, 0.07, 5)[:, None] + np.zeros((5, 100))
    assert np.ptp(over_sets_and_recordings(list(same))) == 0
    spread = over_sets_and_recordings(list(apart))
    assert spread.mean() == pytest.approx(0.02, abs=0.002)
    assert spread.std() == pytest.approx(apart[:, 0].std() / np.sqrt(5), rel=0.1)


def test_more_labels_are_forecast_from_runs_with_several_numbers_of_labels(tmp_path: Path) -> None:
    for ratio, quality in ((0.01, 0.6), (0.05, 1.2), (0.1, 1.5), (0.2, 1.7)):
        for seed in (19, 20):
            factory.write_run(tmp_path, "ecgmatch", seed=seed, ratio=ratio, quality=quality)
    found, problems = find_runs(tmp_path, tmp_path / "report")
    outlooks = find_outlooks(find_studies(found), split_sizes(found, problems))
    (outlook,) = outlooks
    assert outlook.fit is not None
    most = max(outlook.labels)
    assert len(set(outlook.labels)) == 4
    assert outlook.fit.score(10 * most).value > outlook.fit.score(most).value
    row = outlook_table(outlooks).blocks[0].rows[0]
    assert row[2].text == f"{min(outlook.labels):,} to {most:,}"
    assert row[-1].value is not None
    assert row[-1].value >= outlook.scores[-1] - 0.1
    with style():
        figure = outlook_figure(outlooks)
    assert figure.axes[0].get_xlim()[1] >= 10 * most


def test_two_numbers_of_labels_are_too_few_for_a_forecast(tmp_path: Path) -> None:
    for ratio in (0.01, 0.05):
        factory.write_run(tmp_path, "ecgmatch", ratio=ratio)
    found, problems = find_runs(tmp_path, tmp_path / "report")
    (outlook,) = find_outlooks(find_studies(found), split_sizes(found, problems))
    assert outlook.fit is None
    assert outlook_table([outlook]).blocks[0].rows[0][-1].text == "–"


def test_what_a_run_answers_with_its_trees_is_a_link(tmp_path: Path) -> None:
    """As good as a better run: the same recordings, other probabilities, read from the folder beside the network's."""
    for seed in (19, 20, 21):
        run = factory.write_run(tmp_path, "ecgmatch", seed=seed, quality=0.8)
        better = factory.write_run(tmp_path / "better", "ecgmatch", seed=seed, quality=2.0)
        result = json.loads((better / "result.json").read_text())
        (run / "opinion").mkdir()
        shutil.copytree(better / "predictions", run / "opinion" / "predictions")
        together = {name: result[name] for name in ("thresholds", "validation", "test")} | {"share": 0.5}
        (run / "opinion" / "opinion.json").write_text(json.dumps(together))
    shutil.rmtree(tmp_path / "better")
    found, problems = find_runs(tmp_path, tmp_path / "report")
    answers = with_trees(found, problems)
    assert not problems
    assessed = {
        folder: each
        for run in found
        for folder, each in assess([run, *(a for a in answers if a.seed == run.seed)], 100).items()
    }
    assert not any(each.contradiction or each.unreadable for each in assessed.values())
    (link,) = find_links(found, answers)
    assert (link.label, link.ends) == ("ECGMatch → with its trees", ("ECGMatch", "with its trees"))
    assert link.mean("map", 1) > link.mean("map", 0) + 0.05
    (block,) = [block for block in chain_table([link], assessed).blocks if block.title.startswith("MAP")]
    assert block.rows[0][-1].bold
    damaged = found[0].folder / "opinion" / "opinion.json"
    damaged.write_text("{}")
    assert len(with_trees(found, problems)) == 2
    assert "left out" in problems[0].reason
