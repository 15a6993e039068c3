"""The network of a run: the backbone that `model.backbone` names, with initial weights from the run's seed alone.

So every rank builds the same network.
"""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

import torch

from ecgmatch_dist import config
from ecgmatch_dist.network.backbones.base import Backbone

_GENERATOR = Lock()  # torch has one random generator per process; ranks can be threads


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Inside, torch's random numbers follow the seed alone; the generator's state is restored after it. Threads take turns."""
    with _GENERATOR, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def build_model(classes: int, settings: config.Model, seed: int) -> Backbone:
    """The network with initial weights drawn from the seed alone, on the CPU."""
    importlib.import_module(f"ecgmatch_dist.network.backbones.{settings.backbone}")  # registers its class
    with seeded(seed):
        return Backbone.registered[settings.backbone](classes, settings)
