"""result.json: the result of a finished run. Its presence means that the run is finished."""

import math
from dataclasses import dataclass, field
from pathlib import Path

from ecgmatch_dist.errors import UserError
from ecgmatch_dist.files.strict import check_format, convert, read_object
from ecgmatch_dist.metrics import Metrics

FORMAT = 2
REMEDY = "the run must be trained again, or reported by the version that made it"


@dataclass(frozen=True, kw_only=True, eq=False)
class Result:
    """A finished run."""

    name: str
    split: str
    split_sha256: str
    protocol: str
    databases: tuple[str, ...]
    test_database: str | None
    ratio: float
    seed: int
    scheme: str
    classes: tuple[str, ...]
    method: str
    tag: str
    steps: int
    """Number of training steps."""
    best_step: int
    """The step whose weights were kept."""
    stopped: str
    """Why the training ended: "steps" or "patience"."""
    seconds: float
    world_size: int
    precision: str = ""
    """Precision of the forward pass; empty: not recorded (format 1)."""
    thresholds: tuple[float, ...]
    started_from: str | None = None
    """The run whose weights were the initial ones."""
    committee: tuple[str, ...] = ()
    """Further runs that it started from."""
    fingerprint: str
    """Of the settings that decide the result."""
    validation: Metrics
    test: Metrics
    format: int = field(default=FORMAT)

    def __post_init__(self) -> None:
        for name in ("ratio", "seconds"):
            if not math.isfinite(getattr(self, name)):
                raise UserError(f"{name} is {getattr(self, name)}, not a finite number; {REMEDY}")
        if not self.classes or len(self.thresholds) != len(self.classes):
            raise UserError(f"{len(self.thresholds)} thresholds for {len(self.classes)} classes; {REMEDY}")


def read_result(path: Path) -> Result:
    """Read and check a result."""
    value = read_object(path, REMEDY)
    if value.get("format", 1) == 1:  # the fingerprint had another name, and the precision was not recorded
        value["fingerprint"] = value.pop("config_meaning", None)
        value["format"] = FORMAT
    check_format(value, FORMAT, path, REMEDY)
    return convert(value, Result, str(path))
