"""The batches of a step, and their augmented views.

Shapes: B labelled rows, U unlabelled rows (this rank's share of the global batches), V = 12 leads, T samples, C classes.
"""

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import NamedTuple

from torch import Tensor

from ecgmatch_dist import keyed
from ecgmatch_dist.augment import ECGAugment


class View(NamedTuple):
    """One augmented batch, and the keys of its dropout."""

    x: Tensor  # [b, V, T]
    keys: Tensor  # [b]


Pass = Callable[[], Iterator[tuple[Tensor, Tensor]]]
"""One pass over the unlabelled part: this rank's ids [b] (-1: padding) and signals [b, V, T]; as many batches on all ranks."""


class Views:
    """The labelled and the unlabelled batch of a step. A view is made when a method first uses it.

    All randomness is keyed by (seed, step, view, row of the split), so it is the same on any number of ranks.
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
        weight_b: Tensor | None = None,
    ) -> None:
        self.x_b, self.y_b, self.ids_b = x_b, y_b, ids_b  # [B, V, T], [B, C], [B]
        # [B, C], for `bce` beside y_b: 0 where nobody has looked for the class and y_b is NaN. None: all labels are known.
        self.weight_b = weight_b
        self.x_u, self.ids_u = x_u, ids_u  # [U, V, T], [U]
        self.augment, self.seed, self.step = augment, seed, step

    def keys(self, view: int, ids: Tensor) -> Tensor:
        return keyed.row_keys(self.seed, self.step, view, ids)

    def _view(self, number: int, x: Tensor, ids: Tensor, strong: bool) -> View:
        keys = self.keys(number, ids)
        transform = self.augment.strong if strong else self.augment.weak
        return View(transform(x, keys, self._batch_key(number, ids)), keys)

    def _batch_key(self, view: int, ids: Tensor) -> Tensor | None:
        """If it is needed: a dozen small operations."""
        needed = self.augment.settings.granularity == "batch"
        return keyed.batch_key(self.seed, self.step, view, ids.device) if needed else None

    @cached_property
    def labelled(self) -> View:
        """w(x_b); g(x_b) with `augment.labelled = "strong"`."""
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
    def pair(self) -> tuple[View, View]:
        """Two independent views of x_u that are contrasted."""
        keys = self.keys(2, self.ids_u), self.keys(5, self.ids_u)
        batch = [self._batch_key(number, self.ids_u) for number in (2, 5)]
        one, other = (View(self.augment.pair(self.x_u, k, b), k) for k, b in zip(keys, batch, strict=True))
        return one, other

    @cached_property
    def clean(self) -> View:
        """x_u itself."""
        return View(self.x_u, self.keys(4, self.ids_u))
