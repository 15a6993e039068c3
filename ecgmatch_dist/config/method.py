"""The settings of a method, and the list of all methods. Importing this module does not import torch; `methods()` does."""

import importlib
import pkgutil
from dataclasses import dataclass, fields
from functools import cache
from importlib.metadata import entry_points
from typing import ClassVar

from ecgmatch_dist.errors import require


@dataclass(frozen=True)
class MethodSettings:
    """Base class of the settings of every method; each is declared beside its method. A subclass is listed by its `name`.

    The defaults are what the method's authors recommend. Where nobody published how a method works with several labels per
    recording, the choice is a field, and docs/methods.md says what is a reconstruction.
    """

    name: ClassVar[str] = ""
    """Name of the method in commands and run folders."""
    title: ClassVar[str] = ""
    """Name in tables and figures."""
    place: ClassVar[int] = 50
    """Position in tables: lower numbers first."""
    uses_unlabelled: ClassVar[bool] = True
    """Whether it trains on unlabelled signals."""
    knows_all_labels: ClassVar[bool] = False
    """Whether it also gets the labels of the unlabelled part: an upper bound."""
    needs_labels: ClassVar[bool] = True
    """Whether it trains on labels. If not, it sees the signals of the labelled part as unlabelled ones."""
    is_start: ClassVar[bool] = False
    """Whether other methods start from its weights. Its optimiser is `pretrain`; without labels, `contrast`."""
    known: ClassVar[dict[str, type["MethodSettings"]]] = {}

    def __post_init__(self) -> None:
        for name in (field.name for field in fields(self) if field.name.startswith("lambda_")):
            value = getattr(self, name)
            require(value >= 0, f"method.{name}", value, "0 or more: it is the weight of a loss")

    def __init_subclass__(cls) -> None:
        if cls.name:  # a class without a name only shares fields
            cls.known[cls.name] = cls

    @property
    def starts(self) -> int:
        """Number of supervised runs that this method starts from."""
        return 0 if self.is_start else 1

    @property
    def asks_trees(self) -> bool:
        """Whether it gets the opinion of trees on ECG measurements (`measurements/`)."""
        return False

    def check_size(self, labelled: int, unlabelled: int, batch: int) -> None:
        """Refuse a split that is too small for the method, or for its global batch of unlabelled recordings. Called before the
        runs that this one starts from, which can take hours."""


@cache
def _import_methods() -> None:
    for module in pkgutil.iter_modules(importlib.import_module("ecgmatch_dist.methods").__path__):
        importlib.import_module(f"ecgmatch_dist.methods.{module.name}")
    for entry in entry_points(group="ecgmatch_dist.methods"):
        entry.load()


def methods() -> dict[str, type[MethodSettings]]:
    """The settings class of every method, by name, in the order of tables.

    A method is found if its file is in methods/, if an installed package has an entry point in the group
    `ecgmatch_dist.methods`, or if the program has imported it.
    """
    _import_methods()
    return dict(sorted(MethodSettings.known.items(), key=lambda item: (item[1].place, item[0])))


def method_settings(name: str) -> type[MethodSettings]:
    """The settings class of the method with this name."""
    known = methods()
    require(name in known, "method", name, f"one of {', '.join(known)}")
    return known[name]
