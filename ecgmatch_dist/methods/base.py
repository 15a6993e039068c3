"""What every method sees of a step, and the one signature that all of them share.

Legend: B labelled rows, U unlabelled rows (this rank's share of the global batches), V = 12 leads, T samples, C classes.
"""

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ecgmatch_dist import keyed
from ecgmatch_dist.augment import ECGAugment
from ecgmatch_dist.bank import MemoryBank
from ecgmatch_dist.student import Student
from ecgmatch_dist.teacher import Teacher


class View(NamedTuple):
    """One augmented batch, and the keys from which its dropout is drawn."""

    x: Tensor  # [b, V, T]
    keys: Tensor  # [b]


Pass = Callable[[], Iterator[tuple[Tensor, Tensor]]]
"""One pass over the unlabelled part: this rank's ids [b] (-1: padding) and signals [b, V, T], equally often on all ranks."""


class Views:
    """The labelled and unlabelled batch of a step, and the views of them that a method asks for, each made once.

    All randomness is keyed by (seed, step, view, row of the split): it does not depend on the rank that draws it.
    """

    def __init__(
        self,
        x_b: Tensor,
        y_b: Tensor,
        ids_b: Tensor,
        x_u: Tensor,
        ids_u: Tensor,
        augment: ECGAugment,
        seed: int,
        step: int,
    ) -> None:
        self.x_b, self.y_b, self.ids_b = x_b, y_b, ids_b  # [B, V, T], [B, C], [B]
        self.x_u, self.ids_u = x_u, ids_u  # [U, V, T], [U]
        self.augment, self.seed, self.step = augment, seed, step

    def keys(self, view: int, ids: Tensor) -> Tensor:
        return keyed.row_keys(self.seed, self.step, view, ids)

    def _view(self, number: int, x: Tensor, ids: Tensor, strong: bool) -> View:
        keys = self.keys(number, ids)
        batch_key = self.keys(number, torch.full_like(ids[:1], -1))
        transform = self.augment.strong if strong else self.augment.weak
        return View(transform(x, keys, batch_key), keys)

    @cached_property
    def labelled(self) -> View:
        """w(x_b), or g(x_b) where the settings say so."""
        return self._view(0, self.x_b, self.ids_b, strong=self.augment.settings.labelled == "strong")

    @cached_property
    def weak(self) -> View:
        """w(x_u)."""
        return self._view(1, self.x_u, self.ids_u, strong=False)

    @cached_property
    def strong(self) -> View:
        """g(x_u)."""
        return self._view(2, self.x_u, self.ids_u, strong=True)

    @cached_property
    def weak_again(self) -> View:
        """A second, independent w(x_u)."""
        return self._view(3, self.x_u, self.ids_u, strong=False)

    @cached_property
    def clean(self) -> View:
        """x_u itself."""
        return View(self.x_u, self.keys(4, self.ids_u))


class Method(Protocol):
    """One way to learn from labelled and unlabelled batches.

    `losses` returns scalars by name: "loss" is what is minimised, "loss/..." its parts, anything else is only logged.
    Three entries are [U, C], without gradient, and serve the comparison of methods: "pseudo_labels", their "weights" (0 where
    not selected), and the student's own "predictions" of the same rows.
    """

    uses_unlabelled: bool
    uses_bank: bool
    counts_from: int
    """Validations before this step choose nothing and count for nothing."""
    auxiliary: nn.Module | None
    """What is trained with the network and discarded after training."""

    def prepare(self, step: int, student: Student, bank: MemoryBank | None, unlabelled: Pass) -> None:
        """Called before every step: for what needs a look at the whole unlabelled part."""
        ...

    def losses(
        self, views: Views, student: Student, teacher: Teacher, bank: MemoryBank | None
    ) -> dict[str, Tensor]: ...

    def state_dict(self) -> dict[str, Tensor]:
        """What must survive a restart beside the networks and the bank; the same on every rank."""
        ...

    def load_state_dict(self, state: dict[str, Tensor]) -> None: ...


class Simple:
    """What most methods have in common: nothing to prepare, nothing to remember, every validation counts."""

    counts_from = 0
    auxiliary: nn.Module | None = None

    def prepare(self, step: int, student: Student, bank: MemoryBank | None, unlabelled: Pass) -> None:
        pass

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        assert not state
