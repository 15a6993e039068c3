"""What a run is: its settings (`fields`), those of its method (`method`), and both as JSON (`saved`). No torch here."""

from ecgmatch_dist.config.backbones import backbones
from ecgmatch_dist.config.data import Data
from ecgmatch_dist.config.fields import (
    OPINION,
    Augment,
    Bank,
    Config,
    Evaluate,
    Model,
    Optim,
    Runtime,
)
from ecgmatch_dist.config.method import MethodSettings, method_settings, methods
from ecgmatch_dist.config.passes import fitted
from ecgmatch_dist.config.roles import Role, added, draw, execution
from ecgmatch_dist.config.saved import first_difference, flatten, from_json, role
from ecgmatch_dist.config.weights import DIGITS, PIN, WITH_TREES, parted, without_trees

__all__ = [
    "DIGITS",
    "OPINION",
    "PIN",
    "WITH_TREES",
    "Augment",
    "Bank",
    "Config",
    "Data",
    "Evaluate",
    "MethodSettings",
    "Model",
    "Optim",
    "Role",
    "Runtime",
    "added",
    "backbones",
    "draw",
    "execution",
    "first_difference",
    "fitted",
    "flatten",
    "from_json",
    "method_settings",
    "methods",
    "parted",
    "role",
    "without_trees",
]
