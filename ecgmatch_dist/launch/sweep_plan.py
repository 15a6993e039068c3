"""plan.json: the runs of a submitted sweep, in the sweep's folder."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ecgmatch_dist.errors import UserError
from ecgmatch_dist.files.atomic import write_json
from ecgmatch_dist.files.strict import check_format, convert
from ecgmatch_dist.launch.expand import PlannedRun
from ecgmatch_dist.launch.submissions import sweep_folder

FORMAT = 2
REMEDY = "the same `ecgmatch sweep` command writes it again"


@dataclass(frozen=True)
class PlanEntry:
    """One run of the plan."""

    run: str
    starts: tuple[str, ...]
    config: dict[str, Any]
    """`Config.to_json()`. It stays JSON, so that sweeps of versions with other settings can be read."""
    steps: int = 0
    """That the run takes on its split; 0: not known when the plan was written."""

    @property
    def most_steps(self) -> int:
        return self.steps or int(self.config["optim"]["steps"])

    @property
    def method(self) -> str:
        return str(self.config["method"]["name"])

    @property
    def tag(self) -> str:
        return str(self.config["tag"])


@dataclass(frozen=True)
class SweepPlan:
    """The whole file."""

    runs: tuple[PlanEntry, ...]
    format: int = FORMAT


def write_plan(sweep: str, runs: Path, planned: Sequence[PlannedRun]) -> None:
    folder = sweep_folder(runs, sweep)
    folder.mkdir(parents=True, exist_ok=True)
    plan = SweepPlan(tuple(PlanEntry(run.name, run.starts, run.config.to_json(), run.steps) for run in planned))
    write_json(folder / "plan.json", asdict(plan))


def read_plan(sweep: str, runs: Path) -> tuple[PlanEntry, ...]:
    """The runs of a sweep that was submitted into `runs`."""
    path = sweep_folder(runs, sweep) / "plan.json"
    if not path.is_file():
        known = sorted(p.parent.name for p in runs.glob("sweeps/*/plan.json"))
        raise UserError(f"{runs}: no sweep `{sweep}` was submitted here; known are {', '.join(known) or 'none'}")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({error}); {REMEDY}") from None
    if isinstance(value, list):  # format 1 was the bare list
        value = {"format": FORMAT, "runs": value}
    if isinstance(value, dict):
        check_format(value, FORMAT, path, REMEDY)
    return convert(value, SweepPlan, str(path)).runs
