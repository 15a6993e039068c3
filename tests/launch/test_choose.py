"""From a finished search to a file of choices, and from the file to the runs of a comparison."""

from pathlib import Path

import pytest

import tests.support.run_factory as factory
from ecgmatch_dist.config import Config
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.launch import expand
from ecgmatch_dist.launch.choose import apply_choices, choose, read_choices
from ecgmatch_dist.methods.ecgmatch import ECGMatchSettings
from ecgmatch_dist.report.arrange import find_studies
from ecgmatch_dist.report.runs import find_runs
from tests.support.finished_sweep import write_finished_sweep


@pytest.fixture
def searched(tmp_path: Path) -> Path:
    """A finished search: on G12EC (0.4, 1.6) is the best on validation, elsewhere all are equal. Test says otherwise."""
    runs = tmp_path / "runs"

    def measured(run: expand.PlannedRun) -> tuple[float, float]:
        tags = ("lambda_u=0.4,lambda_f=1.6", "lambda_u=1.2")
        return (0.9, 0.1) if run.name.startswith("cross-g12ec") and run.config.tag in tags else (0.5, 0.9)

    for name in ("search", "search_rivals"):
        write_finished_sweep(name, runs, measured)
    return runs


def test_the_best_on_validation_is_written_per_setting_and_method(searched: Path, tmp_path: Path) -> None:
    file = tmp_path / "chosen.toml"
    choose("search", runs=searched, write=file)
    choose("search_rivals", runs=searched, write=file)  # the first ones stay
    found = {(c.setting, c.method): c for c in read_choices(file)}
    assert len(found) == 4 * 7
    ours = found["cross-g12ec@0.01", "ecgmatch"]
    assert ours.settings == {"method.lambda_u": 0.4, "method.lambda_f": 1.6}
    assert (ours.validation_map, ours.seeds, ours.of) == (0.9, 1, 25)
    assert found["cross-ptbxl@0.01", "ecgmatch"].settings == {"method.lambda_u": 0.8, "method.lambda_f": 1.2}
    assert found["cross-g12ec@0.01", "softmatch"].settings == {"method.lambda_u": 1.2}
    assert found["cross-ptbxl@0.01", "mixmatch"].settings == {"method.lambda_u": 75.0}


@pytest.mark.slow
def test_a_comparison_takes_the_file(searched: Path, tmp_path: Path) -> None:
    file = tmp_path / "chosen.toml"
    choose("search", runs=searched, write=file)
    sweep, choices = expand.load_sweep("cross"), read_choices(file)
    base = expand.base_config(sweep, "", "shards", searched, ())
    found = expand.plan_runs(sweep, base, Path("splits"), lambda runs: apply_choices(runs, choices))
    by_name = {run.name: run.config.method for run in found}
    ours = by_name["cross-g12ec@0.01.s21.ecgmatch.chosen"]
    assert isinstance(ours, ECGMatchSettings)
    assert (ours.lambda_u, ours.lambda_f) == (0.4, 1.6)
    assert "cross-g12ec@0.01.s21.fixmatch" in by_name  # was not searched
    assert "cross-g12ec@0.01.s21.supervised" in by_name  # the starts are shared with everybody


@pytest.mark.slow
def test_what_cannot_be_chosen_or_taken_is_refused(searched: Path, tmp_path: Path) -> None:
    file = tmp_path / "chosen.toml"
    choose("search", runs=searched, write=file)
    choices = read_choices(file)
    mix = [(Path("splits/mix@0.01.s20.json"), Config())]
    with pytest.raises(UserError, match=r"no choice for ecgmatch on mix@0\.01; run the search there"):
        apply_choices(mix, choices)
    with pytest.raises(UserError, match="varies settings itself"):
        apply_choices([(mix[0][0], Config(tag="lambda_u=0"))], choices)
    (searched / "cross-ningbo@0.01.s20.ecgmatch" / "result.json").unlink()
    with pytest.raises(UserError, match="1 of 100 runs are not finished, the first is cross-ningbo"):
        choose("search", runs=searched, write=file)
    file.write_text("format = 9")
    with pytest.raises(UserError, match=r"chosen\.toml"):
        read_choices(file)


def test_the_report_shows_chosen_runs_as_one_method(tmp_path: Path) -> None:
    """Their weights differ between databases, and are still one recipe."""
    for database, weight in (("g12ec", 0.4), ("chapman", 1.6)):
        change = {"method.lambda_u": weight}
        factory.write_run(tmp_path, database=database, sizes=300, tag="chosen", change=change)
    (study,) = find_studies(find_runs(tmp_path, tmp_path / "report")[0])
    assert (study.kind, len(study.rows), len(study.columns)) == ("main", 1, 2)
