"""The runs that a run starts from: how many, and which exist. They are found by their fingerprint, whatever their name."""

import dataclasses
import glob
from collections.abc import Iterator

from torch import distributed as dist

from ecgmatch_dist.config import Config
from ecgmatch_dist.distributed.session import Ranks
from ecgmatch_dist.record.config_file import read_config


class Chain:
    """A run and all that it starts from, which are trained one after the other: each is told which one of how many it is."""

    def __init__(self, config: Config) -> None:
        self.total = len(set(fingerprints(config)))
        self.passed: set[str] = set()

    def place(self, config: Config) -> str:
        """ "2 of 5" for the second run that asks; empty if it is the only one, or shared by several and asked for before."""
        before, self.passed = (
            self.passed,
            self.passed | set(fingerprints(config)),
        )  # a finished run needs its starts no more
        return f"{len(self.passed)} of {self.total}" if self.total > 1 and self.passed != before else ""


def fingerprints(config: Config) -> Iterator[str]:
    """Of the run and of all that it starts from, some more than once."""
    yield config.fingerprint()
    for member in range(config.starts):
        yield from fingerprints(config.start(member))


def starts_of(config: Config, split: str, ranks: Ranks) -> Iterator[Config]:
    """The runs that `config` starts from. A generator: each is searched for when the previous one has finished."""
    for member in range(config.starts):
        yield find_start(config, split, ranks, member)


def find_start(config: Config, split: str, ranks: Ranks, member: int = 0) -> Config:
    """An existing run with the wanted fingerprint, or else a new one, with the run's tag or name if the plain name is taken.
    Rank 0 searches and broadcasts."""
    start = config.start(member)
    if ranks.main:
        found = config.runs.glob(f"{glob.escape(split)}.{start.method.name}*/config.json")
        # Finished runs first: another with the same fingerprint may be running in a job of its own.
        paths = sorted(found, key=lambda path: not (path.parent / "result.json").is_file())
        saved = [read_config(path) for path in paths]
        same = [run.settings for run in saved if run.fingerprint == start.fingerprint()]
        if same:
            start = dataclasses.replace(start, name=same[0]["name"], tag=same[0]["tag"])
        elif any((run.settings["tag"], run.settings["name"]) == (start.tag, "") for run in saved):
            start = dataclasses.replace(start, tag=",".join(filter(None, [config.tag or config.name, start.tag])))
    names = [start.name, start.tag]
    if ranks.world > 1:
        dist.broadcast_object_list(names, src=0)
    return dataclasses.replace(start, name=names[0], tag=names[1])
