"""The plan of a sweep and the results of its runs, as if all had been trained."""

import json
from collections.abc import Callable
from pathlib import Path

import tests.support.run_factory as factory
from ecgmatch_dist.launch import expand
from ecgmatch_dist.launch.sweep_plan import write_plan


def write_finished_sweep(
    name: str, runs: Path, measured: Callable[[expand.PlannedRun], tuple[float, float]] = lambda run: (0.5, 0.5)
) -> None:
    """`measured`: MAP of a run on validation and test."""
    sweep = expand.load_sweep(name)
    plan = expand.plan_runs(sweep, expand.base_config(sweep, "", "shards", runs, ()), Path("splits"))
    write_plan(name, runs, plan)
    for run in plan:
        validation, test = measured(run)
        result = factory.example_result(map=test)
        result["validation"] = result["validation"] | {"map": validation}
        (runs / run.name).mkdir(parents=True, exist_ok=True)
        (runs / run.name / "result.json").write_text(json.dumps(result | {"name": run.name}))
