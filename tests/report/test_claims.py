"""The paper's claims: each verdict from runs that were made to deserve it, and the intervals against a slow reference."""

import json
from pathlib import Path

import numpy as np
import pytest
import tyro

import tests.support.run_factory as factory
from ecgmatch_dist.report import claims, main, paper
from ecgmatch_dist.report.arrange import find_studies
from ecgmatch_dist.report.assess import assess
from ecgmatch_dist.report.runs import find_runs

SEEDS = (19, 20, 21)


def judged(root: Path) -> dict[str, claims.Judgement]:
    runs, _ = find_runs(root, root / "report")
    assessed = {
        folder: found
        for split in {run.split_sha256 for run in runs}
        for folder, found in assess([run for run in runs if run.split_sha256 == split], 200).items()
    }
    found = claims.judge_all(find_studies(runs), assessed, {run.name: run for run in runs})
    return {judgement.claim: judgement for judgement in found}


@pytest.fixture(scope="module")
def studies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, claims.Judgement]:
    """ECGMatch without NAM is worse, without alignment better; pearson is worse, euclidean is not there; K does nothing."""
    root = tmp_path_factory.mktemp("runs")
    qualities = {
        "method.refine": (False, 0.6),
        "method.lambda_f": (0.0, 3.0),
        "method.similarity": ("pearson", 0.6),
        "augment.pipeline": ("sequential", 0.6),
    }
    for seed in SEEDS:
        base = factory.write_run(root, seed=seed, sizes=3000, quality=1.5)
        for key, (value, quality) in qualities.items():
            factory.write_run(root, seed=seed, sizes=3000, tag=key, change={key: value}, quality=quality)
        for K in (2, 10):  # the same predictions: nothing changes
            other = factory.write_run(root, seed=seed, sizes=3000, tag=f"k{K}", change={"method.neighbours": K})
            result, same = (json.loads((folder / "result.json").read_text()) for folder in (other, base))
            (other / "result.json").write_text(json.dumps(result | {"test": same["test"]}))
            file = Path("predictions") / "test.npz"
            (other / file).write_bytes((base / file).read_bytes())
    return judged(root)


@pytest.mark.parametrize(
    ("claim", "verdict", "why"),
    [
        ("neighbour agreement (NAM) helps", "supported", ""),
        ("label correlation alignment helps", "contradicted", ""),
        ("cosine similarity is the best", "cannot tell", "no runs: euclidean"),
        ("ECGAugment beats the fixed sequence", "supported", ""),
        ("K hardly matters", "supported", ""),
        ("pseudo-labels help", "cannot tell", "no runs that test it"),
        ("ECGMatch leads", "cannot tell", "no runs that test it"),
    ],
)
def test_each_verdict(studies: dict[str, claims.Judgement], claim: str, verdict: str, why: str) -> None:
    assert (studies[claim].verdict, studies[claim].why) == (verdict, why)


def test_evidence_is_the_mean_of_paired_differences(studies: dict[str, claims.Judgement]) -> None:
    found = studies["neighbour agreement (NAM) helps"].evidence
    assert len(found.runs) == 2 * len(SEEDS)
    by_seed = {(run.seed, run.settings["method.refine"]): run.test.map for run in found.runs}
    differences = [by_seed[seed, True] - by_seed[seed, False] for seed in SEEDS]
    assert found.mean == pytest.approx(np.mean(differences))
    assert found.bounds is not None
    assert found.bounds[0] < np.mean(differences) < found.bounds[1]
    assert found.bounds[1] - found.bounds[0] >= 0.5 * np.std(differences)  # the spread over seeds is in it


def test_a_lead_needs_every_rival_and_one_winner_contradicts_it(tmp_path: Path) -> None:
    for seed in (19, 20):
        for method in paper.METHODS:
            factory.write_run(tmp_path, method, seed=seed, sizes=2000, quality=1.8 if method == "ecgmatch" else 0.6)
    assert judged(tmp_path)["ECGMatch leads"].verdict == "supported"
    for folder in tmp_path.glob("*.ups"):
        (folder / "result.json").unlink()
    missing = judged(tmp_path)["ECGMatch leads"]
    assert (missing.verdict, missing.why) == ("cannot tell", "no runs: UPS")
    for seed in (19, 20):
        factory.write_run(tmp_path / "better", "ups", seed=seed, sizes=2000, quality=3.0)
    found = judged(tmp_path)["ECGMatch leads"]
    assert (found.verdict, found.evidence.about) == ("contradicted", "UPS")


def test_one_seed_cannot_tell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And the command prints it, with the number of runs, and shows it on the page."""
    factory.write_run(tmp_path / "runs", sizes=1000, quality=2.0)
    factory.write_run(tmp_path / "runs", sizes=1000, quality=0.5, tag="x", change={"method.refine": False})
    tyro.cli(main, args=[str(tmp_path / "runs"), "--out", str(tmp_path / "page"), "--check", "paper"])
    out = capsys.readouterr().out
    line = next(line for line in out.splitlines() if "NAM" in line)
    assert "| cannot tell |" in line
    assert line.endswith("| 2 | one seed |")
    assert 'id="claims"' in (tmp_path / "page" / "index.html").read_text(encoding="utf-8")
