"""A sweep on other splits: the paper's studies on its three protocols, without a file for each."""

from pathlib import Path

import pytest

from ecgmatch_dist.errors import UserError
from ecgmatch_dist.launch import expand
from ecgmatch_dist.launch.where import elsewhere
from ecgmatch_dist.methods.ecgmatch import ECGMatchSettings

STUDIES = ("ablation", "similarity", "sensitivity", "augmentation", "neighbours")


def planned(sweep: expand.Sweep) -> list[expand.PlannedRun]:
    base = expand.base_config(sweep, "", "data/shards", Path("runs"), ())
    return expand.plan_runs(sweep, base, Path("splits"))


@pytest.mark.parametrize("name", STUDIES)
def test_every_study_runs_on_the_three_protocols(name: str) -> None:
    own = planned(expand.load_sweep(name))
    for protocol, split, share in (("within", "within-ptbxl@0.05.s20", 1), ("mix", "mix@0.01.s20", 4)):
        sweep = elsewhere(expand.load_sweep(name), protocol)
        found = planned(sweep)
        assert sweep.name == f"{name}-{protocol}"
        assert len(found) * share == len(own)
        assert f"{split}.ecgmatch" in {run.name for run in found}
    same = elsewhere(expand.load_sweep(name), "cross")
    assert same.name == name
    assert {run.name for run in planned(same)} == {run.name for run in own}


def test_databases_ratios_and_seeds_replace_the_files() -> None:
    found = planned(elsewhere(expand.load_sweep("similarity"), "within", ("chapman",), (0.05, 0.1), (7,)))
    assert {run.name.split(".s7.")[0] for run in found} == {"within-chapman@0.05", "within-chapman@0.1"}
    found = planned(elsewhere(expand.load_sweep("cross"), databases=("ptbxl",), ratios=(0.05,), seeds=(19,)))
    assert {run.config.split.stem for run in found} == {"cross-ptbxl@0.05.s19"}
    assert len(found) == 9


def test_what_a_sweep_cannot_take_is_refused() -> None:
    with pytest.raises(UserError, match="name no database"):
        elsewhere(expand.load_sweep("mix"), databases=("ptbxl",))
    with pytest.raises(UserError, match="each value once"):
        elsewhere(expand.load_sweep("mix"), seeds=(19, 19))


@pytest.mark.parametrize("protocol", ["within", "cross", "mix"])
def test_sensitivity_is_the_papers(protocol: str) -> None:
    """Each weight from 0 to 1.6 by 0.4 while the other one is 0.8; the zeros are points of this sweep."""
    points = set()
    for run in planned(elsewhere(expand.load_sweep("sensitivity"), protocol)):
        if isinstance(run.config.method, ECGMatchSettings):
            points.add((run.config.method.lambda_u, run.config.method.lambda_f))
    steps = (0, 0.4, 0.8, 1.2, 1.6)
    assert points == {(0.8, f) for f in steps} | {(u, 0.8) for u in steps}
