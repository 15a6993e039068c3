"""Named configurations. A preset is a function that returns one; any field can still be changed on the command line."""

from collections.abc import Callable
from dataclasses import replace

from ecgmatch_dist.config import Augment, Config


def paper() -> Config:
    """The paper's settings: 500 Hz, 12 x 6144, width 128, B = 64, B_u = 448. Meant for GPUs."""
    return Config()


def official_code() -> Config:
    """The authors' code where it differs from the paper (docs/faithfulness.md lists how)."""
    return replace(paper(), augment=Augment(granularity="batch", dropout_window="per_lead"))


PRESETS: dict[str, Callable[[], Config]] = {"paper": paper, "official_code": official_code}
