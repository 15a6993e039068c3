"""Distributed semi-supervised learning on multi-label 12-lead ECGs.

    import ecgmatch_dist as em

    em.build_shards("chapman", "data/raw", "data/shards")
    split = em.make_split("data/shards", "within", database="chapman")
    run = em.train(em.Config(split=split, shards="data/shards"))
    model = em.load(run.path)

A name is imported when it is first used; torch is imported when it is needed.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"
__all__ = ["Config", "build_report", "build_shards", "load", "make_split", "train"]

if TYPE_CHECKING:
    from ecgmatch_dist.api import build_report, build_shards, load, make_split, train
    from ecgmatch_dist.config import Config


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module("ecgmatch_dist.config" if name == "Config" else "ecgmatch_dist.api")
    return getattr(module, name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
