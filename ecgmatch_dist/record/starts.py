"""The runs that a run starts from: existing ones are found by their fingerprint, whatever their name."""

import dataclasses
import glob
from collections.abc import Iterator

from torch import distributed as dist

from ecgmatch_dist.config import Config
from ecgmatch_dist.distributed.session import Ranks
from ecgmatch_dist.record.config_file import read_config


def starts_of(config: Config, split: str, ranks: Ranks) -> Iterator[Config]:
    """The runs that `config` starts from. A generator: each is searched for when the previous one has finished."""
    for member in range(config.starts):
        yield find_start(config, split, ranks, member)


def find_start(config: Config, split: str, ranks: Ranks, member: int = 0) -> Config:
    """An existing run with the wanted fingerprint, or else a new one, with the run's tag if the plain name is taken.
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
            start = dataclasses.replace(start, tag=",".join(filter(None, [config.tag, start.tag])))
    names = [start.name, start.tag]
    if ranks.world > 1:
        dist.broadcast_object_list(names, src=0)
    return dataclasses.replace(start, name=names[0], tag=names[1])
