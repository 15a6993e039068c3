"""The first sentences of the page: fair, complete, and silent about who is better where that is not known."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tests.support.run_factory as factory
from ecgmatch_dist.report.arrange import find_studies
from ecgmatch_dist.report.assess import assess
from ecgmatch_dist.report.header import make_header
from ecgmatch_dist.report.run_files import split_sizes
from ecgmatch_dist.report.runs import find_runs


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "result.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def sentence(root: Path) -> str:
    """The headline of the only comparison."""
    runs, problems = find_runs(root, root / "report")
    assessed = {
        folder: found
        for split in {run.split_sha256 for run in runs}
        for folder, found in assess([run for run in runs if run.split_sha256 == split], 100).items()
    }
    ((text, _),) = make_header(runs, find_studies(runs), split_sizes(runs, problems), assessed).headlines
    return text


def test_one_seed_after_a_few_steps_calls_nobody_better(tmp_path: Path) -> None:
    start = factory.write_run(tmp_path, "supervised", sizes=1000, steps=60, quality=0.5)
    ours = factory.write_run(tmp_path, "ecgmatch", sizes=1000, steps=60, quality=2.0)
    edit(start, best_step=60)
    edit(ours, best_step=60, started_from=start.name)
    text = sentence(tmp_path)
    assert "Seed 20. ECGMatch: 60 steps after a supervised start of 60; Supervised: 60 steps." in text
    assert "ECGMatch and Supervised were still improving at the end." in text
    reasons = "one seed, Supervised was still improving, Supervised had fewer steps"
    assert text.endswith(f"Which is better cannot be said: {reasons}.")
    assert " is better" not in text.replace("Which is better", "")


def test_a_fair_difference_has_a_winner(tmp_path: Path) -> None:
    for seed in (19, 20):
        factory.write_run(tmp_path, "fixmatch", seed=seed, sizes=2000, quality=0.5)
        factory.write_run(tmp_path, "ecgmatch", seed=seed, sizes=2000, quality=2.0)
        factory.write_run(tmp_path, "fully_supervised", seed=seed, sizes=2000, quality=3.0)  # no rival
    text = sentence(tmp_path)
    assert "Seeds 19, 20. ECGMatch: 200 steps; FixMatch: 200 steps. Neither was still improving at the end." in text
    assert text.endswith("On these recordings ECGMatch is better.")
    assert "Fully supervised" not in text


@pytest.mark.parametrize(
    ("best", "end"),
    [
        (500, "Whether as many further steps of Supervised would do the same was not tried."),
        (800, "Which is better cannot be said: Supervised had fewer steps."),
    ],
)
def test_a_start_that_had_settled_is_a_fair_start(best: int, end: str, tmp_path: Path) -> None:
    """A chain has more steps than its start by its nature."""
    for seed in (19, 20):
        start = factory.write_run(tmp_path, "supervised", seed=seed, sizes=2000, quality=0.5, steps=900)
        ours = factory.write_run(tmp_path, "ecgmatch", seed=seed, sizes=2000, quality=2.0, steps=600)
        edit(start, best_step=best + seed, stopped="steps")
        edit(ours, started_from=start.name)
    text = sentence(tmp_path)
    assert text.endswith(end)
    said = (
        "On these recordings ECGMatch is better. It began with the weights of Supervised, which was no longer improving"
    )
    assert (f"{said}: its best validation was at step 519 to 520 of 900." in text) == (best == 500)


def test_another_methods_settled_run_is_no_start(tmp_path: Path) -> None:
    """Rivals can have equal steps, so they must."""
    for seed in (19, 20):
        for method, steps in (("fixmatch", 400), ("ecgmatch", 600)):
            quality = {"fixmatch": 0.5, "ecgmatch": 2.0}[method]
            run = factory.write_run(tmp_path, method, seed=seed, sizes=2000, quality=quality, steps=steps)
            edit(run, best_step=100, stopped="steps")
    assert sentence(tmp_path).endswith("Which is better cannot be said: FixMatch had fewer steps.")


def test_several_databases_with_settled_starts(tmp_path: Path) -> None:
    for database in ("chapman", "ptbxl"):
        for seed in (19, 20):
            place = {"database": database, "seed": seed, "sizes": 600}
            start = factory.write_run(tmp_path, "supervised", quality=0.5, steps=900, **place)
            ours = factory.write_run(tmp_path, "ecgmatch", quality=2.0, steps=600, **place)
            edit(start, best_step=500, stopped="steps")
            edit(ours, started_from=start.name)
    text = sentence(tmp_path)
    assert "highest test MAP on 2 of 2 databases" in text
    assert "No method is called better" not in text
    assert "its best validation was at step 500 of 900. Whether" in text


@pytest.mark.parametrize("better", ["fixmatch", "ecgmatch"])
def test_who_is_behind_must_have_had_the_same_chance(better: str, tmp_path: Path) -> None:
    for seed in (19, 20):
        for method in ("fixmatch", "ecgmatch"):
            ahead = method == better
            run = factory.write_run(tmp_path, method, seed=seed, sizes=2000, quality=2.0 if ahead else 0.5)
            edit(run, **({"steps": 400} if ahead else {"stopped": "steps"}))
    name = {"fixmatch": "ECGMatch", "ecgmatch": "FixMatch"}[better]
    assert sentence(tmp_path).endswith(f"Which is better cannot be said: {name} had fewer steps.")


def test_ecgmatch_stands_beside_the_mean_of_its_committee(tmp_path: Path) -> None:
    """The tables show only the first member; the mean of all predictions is what the bank began with."""
    members = [factory.write_run(tmp_path, "supervised", sizes=1000, quality=1.0)]
    members += [
        factory.write_run(tmp_path, "supervised", sizes=1000, quality=1.0, tag=f"member{i}", change={"member": i - 1})
        for i in (2, 3)
    ]
    ours = factory.write_run(tmp_path, "ecgmatch", sizes=1000, quality=1.2)
    edit(ours, started_from=members[0].name, committee=[member.name for member in members[1:]])
    files = [np.load(member / "predictions" / "test.npz") for member in members]
    mean = np.mean([file["probabilities"] for file in files], axis=0)
    reference = factory.measure(files[0]["labels"], mean, np.full(len(factory.CLASSES), 0.4))["map"]
    text = sentence(tmp_path)
    alone = [json.loads((member / "result.json").read_text())["test"]["map"] for member in members]
    assert f"alone they reach {min(alone):.3f} to {max(alone):.3f}, on average {np.mean(alone):.3f}" in text
    assert f"the mean of their predictions reaches {reference:.3f}" in text
    assert reference > max(alone)  # so the difference from one of them would flatter
    assert "against it, 95 % interval" in text


def test_settings_unlike_the_papers(tmp_path: Path) -> None:
    """The signal is one; random weights of a supervised run and fp32 are not."""
    for method in ("supervised", "ecgmatch"):
        run = factory.write_run(tmp_path, method, sizes=300, change={"optim.lr": 0.01})
        config = json.loads((run / "config.json").read_text())
        config |= {"init": "scratch"} if method == "supervised" else {}
        (run / "config.json").write_text(json.dumps(config))
    runs, problems = find_runs(tmp_path, tmp_path / "report")
    header = make_header(runs, find_studies(runs), split_sizes(runs, problems), {})
    assert header.settings_unlike_paper == [
        "signal = 100 Hz, 12 × 1024 (paper: 500 Hz, 12 × 6144)",
        "optim.lr = 0.01 (paper: 0.03)",
    ]
    assert header.settings_unlike_across_methods == []
    assert header.dataset_rows[0][1][2] == "the paper's five classes"
