"""The same sweep on other splits: another protocol, other databases, ratios or seeds, without another file."""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from ecgmatch_dist.data.splits import RATIO
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.launch.expand import Sweep, placeholders

TEMPLATES = {
    "within": "within-{database}@{ratio}.s{seed}",
    "cross": "cross-{test}@{ratio}.s{seed}",
    "mix": "mix@{ratio}.s{seed}",
}
DATABASE_AXES = ("database", "test")
DATABASES = ["g12ec", "ptbxl", "ningbo", "chapman"]


def elsewhere(
    sweep: Sweep,
    protocol: str = "",
    databases: Sequence[str] = (),
    ratios: Sequence[float] = (),
    seeds: Sequence[int] = (),
) -> Sweep:
    """The sweep on the splits that were asked for; what is not given stays as it is in its file.

    A sweep on another protocol has its own name, so that `status` and `choose` keep the two apart."""
    if protocol:
        sweep = with_protocol(sweep, protocol)
    grid = dict(sweep.grid)
    axis = next((name for name in DATABASE_AXES if name in placeholders(sweep.split)), "")
    if databases:
        if not axis:
            raise UserError(f"--databases: the splits `{sweep.split}` name no database; --splits chooses their folder")
        grid[axis] = list(databases)
    if ratios:
        sweep = dataclasses.replace(sweep, split=re.sub(r"@[\d.]+(?=\.s)", "@{ratio}", sweep.split))
        require_axis(sweep, "ratio", "--ratios")
        grid["ratio"] = list(ratios)
    if seeds:
        require_axis(sweep, "seed", "--seeds")
        grid["seed"] = list(seeds)
    for key, values in grid.items():
        if len(set(values)) < len(values):
            raise UserError(f"{key} = {values}: each value once")
    return dataclasses.replace(sweep, grid=first_axes_first(sweep, grid))


def with_protocol(sweep: Sweep, protocol: str) -> Sweep:
    """On the paper's ratio for this protocol, and on the databases and seeds that the file has."""
    split = TEMPLATES[protocol]
    old = placeholders(sweep.split)
    found: list[Any] = next((sweep.grid[name] for name in DATABASE_AXES if name in old), DATABASES)
    if "seed" not in old:
        raise UserError(
            f"--protocol: the splits `{sweep.split}` of this sweep have no {{seed}}; write a file of its own"
        )
    where = {"seed": sweep.grid["seed"], "ratio": sweep.grid["ratio"] if "ratio" in old else [RATIO[protocol]]}
    where |= {name: found for name in DATABASE_AXES if name in placeholders(split)}
    grid = {key: values for key, values in sweep.grid.items() if key not in old} | where
    same = split == sweep.split.replace(f"@{RATIO[protocol]}", "@{ratio}")
    return dataclasses.replace(sweep, name=sweep.name if same else f"{sweep.name}-{protocol}", split=split, grid=grid)


def require_axis(sweep: Sweep, name: str, option: str) -> None:
    if name not in placeholders(sweep.split):
        raise UserError(f"{option}: the splits `{sweep.split}` of this sweep have no {{{name}}}")


def first_axes_first(sweep: Sweep, grid: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Axes of the splits before those of the settings, as in the files: runs of one split follow each other."""
    axes = placeholders(sweep.split)
    return {k: grid[k] for k in sorted(grid, key=lambda key: (key not in axes, list(grid).index(key)))}
