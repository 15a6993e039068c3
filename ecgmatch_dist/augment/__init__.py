"""ECGAugment: the weak view w(x) and the strong view g(x) of a batch of ECGs, drawn per signal.

A view is drawn from the rows' keys (`draw_*`), then applied in one pass over the batch (`apply_*`): no loop over rows, no host
synchronisation. The input x is never changed. This is the definition, and what a CPU computes; `kernel.py` is it for GPUs.
"""

import importlib.util
import os
import shutil
import sysconfig
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from ecgmatch_dist import config, keyed

# The paper's four transformations, in its order.
DROPOUT, FLIP, SHUFFLE, NOISE = range(4)
# The fixed sequence that ECGAugment is compared with. The paper says only that number and order are fixed. Ours begins with
# noise, like CLOCS, which the paper cites. The weak view is the first transformation, the strong view all four.
SEQUENCE = (NOISE, DROPOUT, FLIP, SHUFFLE)
# Streams of keyed.py.
CHOICE, ORDER, WINDOW_LENGTH, WINDOW_PLACE, LEAD, ELEMENT, SHIFT, GAIN, LOST_COUNT, LOST_ORDER, CROP = range(11)


@dataclass(frozen=True)
class Magnitude:
    """Strength of a mild view."""

    window: float
    """Largest length of the zeroed window, as a share of T."""
    gain: float
    """Standard deviation of a lead's gain, whose mean is 1."""
    noise: float
    """Standard deviation of the noise."""
    lost: int
    """Largest number of leads set to zero."""


MILD_WEAK = Magnitude(window=0.25, gain=0.2, noise=0.05, lost=0)
MILD_STRONG = Magnitude(window=0.5, gain=0.4, noise=0.1, lost=4)
MILD_PAIR = Magnitude(window=0.0, gain=0.4, noise=0.1, lost=4)  # a zeroed window made contrastive features worse


@dataclass(frozen=True)
class Queue:
    """The transformations of each row, their order and their parameters."""

    used: Tensor
    """bool [b, 4]"""
    order: Tensor
    """int64 [b, 4]: the used ones are applied in increasing order."""
    start: Tensor
    stop: Tensor
    """int64 [b, 12], or [b, 1] for all leads: signal dropout zeroes samples start to stop - 1."""
    lead: Tensor
    """int64 [b, 12]: after the shuffle, position v holds lead[v]."""
    noise: Tensor
    """float32 [b, 12, T], standard normal, as it is in the result: flip and shuffle do not move it."""
    sigma: float
    """Standard deviation of the noise."""


@dataclass(frozen=True)
class Mild:
    """Circular shift, gain, noise, zeroed window and lost leads of each row, applied in this order."""

    shift: Tensor
    """int64 [b]"""
    gain: Tensor
    """float32 [b, 12]"""
    noise: Tensor
    """float32 [b, 12, T]"""
    start: Tensor
    stop: Tensor
    """int64 [b, 12]: samples start to stop - 1 are zeroed; of a lost lead, all."""


class ECGAugment:
    """The weak and the strong view. The same keys give the same view in any batch."""

    def __init__(self, settings: config.Augment) -> None:
        self.settings = settings

    def weak(self, x: Tensor, keys: Tensor, batch_key: Tensor | None = None) -> Tensor:
        """w(x): x [b, 12, T], keys int64 [b] -> [b, 12, T], or as long as `augment.crop`. Granularity "batch" also needs
        `keyed.batch_key`."""
        return self._view(x, keys, batch_key, strong=False)

    def strong(self, x: Tensor, keys: Tensor, batch_key: Tensor | None = None) -> Tensor:
        """g(x), as `weak`."""
        return self._view(x, keys, batch_key, strong=True)

    def pair(self, x: Tensor, keys: Tensor, batch_key: Tensor | None = None) -> Tensor:
        """One of the two views that are contrasted, as `weak`: g(x), but for "mild" without the zeroed window."""
        return self._view(x, keys, batch_key, strong=True, magnitude=MILD_PAIR)

    def _view(
        self, x: Tensor, keys: Tensor, batch_key: Tensor | None, *, strong: bool, magnitude: Magnitude | None = None
    ) -> Tensor:
        choice = keys
        if self.settings.granularity == "batch":
            assert batch_key is not None, 'granularity "batch" needs the key of the batch'
            choice = batch_key.expand(len(keys))
        if self.settings.pipeline != "mild" and has_kernel(x.device, x.dtype):
            from ecgmatch_dist.augment import kernel  # needs Triton

            return kernel.view(self.settings, x, keys, choice, strong=strong)
        if self.settings.crop:
            x = random_crop(x, keys, self.settings.crop)
        # Crop and noise are drawn per row in both granularities.
        noise = keyed.normal(keys, x.shape[1] * x.shape[2], ELEMENT).view(x.shape)
        if self.settings.pipeline == "mild":
            magnitude = magnitude or (MILD_STRONG if strong else MILD_WEAK)
            return apply_mild(x, draw_mild(choice, noise, magnitude, shifted=not self.settings.crop))
        return apply_queue(x, draw_queue(self.settings, choice, noise, strong=strong))


@cache
def has_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether views are made by `kernel.py`: in fp32 on GPUs."""
    return device.type == "cuda" and dtype == torch.float32 and not why_no_kernel()


def why_no_kernel() -> str:
    """Why Triton cannot be used here; empty if it can. Torch's builds for GPUs bring it, but not what it needs at its first
    kernel, a C compiler and the headers of Python: slim images and some nodes have none."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "Triton needs a C compiler, and there is none"
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")  # Debian's own, as Triton does
    paths = [os.environ.get(name, "").split(os.pathsep) for name in ("CPATH", "C_INCLUDE_PATH")]  # the compiler's own
    folders = [sysconfig.get_paths(scheme)["include"], *paths[0], *paths[1]]
    found = any((Path(folder) / "Python.h").is_file() for folder in folders if folder)
    return "" if found else f"Triton needs the headers of Python, and there is no {folders[0]}/Python.h"


def draw_queue(settings: config.Augment, keys: Tensor, noise: Tensor, *, strong: bool) -> Queue:
    """Draw the queues of ECGAugment or of the fixed sequence. keys [b], standard normal noise [b, 12, T]."""
    leads, length = noise.shape[1:]
    if settings.pipeline == "sequential":
        used, order = _fixed_queue(keys, strong=strong)
    else:
        # Strong: the distinct ones of four draws with replacement, in random order. Weak: one draw.
        draws = keyed.integers(keys, 4 if strong else 1, 4, CHOICE)
        used = (draws[:, :, None] == torch.arange(4, device=keys.device)).any(dim=1)
        order = keyed.permutation(keys, 4, ORDER)
    windows = leads if settings.dropout_window == "per_lead" else 1
    half = keyed.integers(keys, windows, length // 2, WINDOW_LENGTH)
    start = keyed.integers(keys, windows, length - 2 * half, WINDOW_PLACE)
    return Queue(
        used=used,
        order=order,
        start=start,
        stop=start + 2 * half,
        lead=keyed.permutation(keys, leads, LEAD),
        noise=noise,
        sigma=settings.noise_strong if strong else settings.noise_weak,
    )


def _fixed_queue(keys: Tensor, *, strong: bool) -> tuple[Tensor, Tensor]:
    """`used` and `order` of the fixed sequence: all of it, or its first transformation."""
    transformation = torch.arange(4, device=keys.device).expand(len(keys), 4)
    order = sum((transformation == k) * place for place, k in enumerate(SEQUENCE))
    assert isinstance(order, Tensor)
    return (order >= 0 if strong else order == 0), order


def apply_queue(x: Tensor, queue: Queue) -> Tensor:
    """Apply each row's queue: x [b, 12, T] -> [b, 12, T].

    Any queue is one move of leads and time, one zeroed window and one noise. A flip or shuffle after the dropout moves its
    window. Noise before the dropout is zeroed with the signal.
    """
    leads, length = x.shape[1:]
    used, order = queue.used, queue.order

    def before(first: int, second: int) -> Tensor:
        """bool [b, 1]: are both used, and the first before the second?"""
        return (used[:, first] & used[:, second] & (order[:, first] < order[:, second]))[:, None]

    start, stop = queue.start, torch.where(used[:, DROPOUT, None], queue.stop, queue.start)
    flipped = before(DROPOUT, FLIP)
    start, stop = torch.where(flipped, length - stop, start), torch.where(flipped, length - start, stop)
    unmoved = torch.arange(leads, device=x.device)
    if start.shape[1] == leads:
        lead = torch.where(before(DROPOUT, SHUFFLE), queue.lead, unmoved)
        start, stop = start.gather(1, lead), stop.gather(1, lead)
    kept = _outside(start, stop, length, x.dtype)
    sigma = used[:, NOISE, None, None].to(x.dtype) * queue.sigma
    sigma = torch.where(before(NOISE, DROPOUT)[:, :, None], sigma * kept, sigma)

    lead = torch.where(used[:, SHUFFLE, None], queue.lead, unmoved)
    t = torch.arange(length, device=x.device)
    t = torch.where(used[:, FLIP, None], length - 1 - t, t)
    # Not one fused operation: its rounding depends on where in the batch a row is.
    return _move(x, lead, t).mul_(kept).add_(queue.noise.to(x.dtype) * sigma)


def random_crop(x: Tensor, keys: Tensor, crop: int) -> Tensor:
    """A random piece of each signal: x [b, 12, T], keys [b] -> [b, 12, crop]. Signals that are not longer stay whole."""
    if x.shape[2] <= crop:
        return x
    start = keyed.integers(keys, 1, x.shape[2] - crop + 1, CROP)
    t = start + torch.arange(crop, device=x.device)
    return x.gather(2, t[:, None].expand(-1, x.shape[1], -1))


def draw_mild(keys: Tensor, noise: Tensor, magnitude: Magnitude, *, shifted: bool = True) -> Mild:
    """Draw views that keep the diagnosis. keys [b], standard normal noise [b, 12, T]. Crops are not `shifted`: they begin at a
    random place anyway, and a circular shift would join their ends."""
    leads, length = noise.shape[1:]
    size = keyed.integers(keys, 1, int(magnitude.window * length) + 1, WINDOW_LENGTH)
    start = keyed.integers(keys, 1, length - size + 1, WINDOW_PLACE)
    rank = keyed.permutation(keys, leads, LOST_ORDER)
    lost = rank < keyed.integers(keys, 1, magnitude.lost + 1, LOST_COUNT)
    return Mild(
        shift=keyed.integers(keys, 1, length if shifted else 1, SHIFT)[:, 0],
        gain=1 + magnitude.gain * keyed.normal(keys, leads, GAIN),
        noise=noise * magnitude.noise,
        start=torch.where(lost, 0, start),
        stop=torch.where(lost, length, start + size),
    )


def apply_mild(x: Tensor, view: Mild) -> Tensor:
    """x [b, 12, T] -> [b, 12, T]."""
    length = x.shape[-1]
    t = (torch.arange(length, device=x.device) + view.shift[:, None]) % length
    out = x.gather(2, t[:, None].expand(x.shape))
    out.mul_(view.gain.to(x.dtype)[:, :, None]).add_(view.noise.to(x.dtype))
    return out.mul_(_outside(view.start, view.stop, length, x.dtype))


def _move(x: Tensor, lead: Tensor, t: Tensor) -> Tensor:
    """out[i, v, s] = x[i, lead[i, v], t[i, s]]: x [b, 12, T], lead [b, 12], t [b, T]."""
    b, leads, length = x.shape
    # First whole leads, then samples: three times as fast on a CPU as one gather of both.
    row = torch.arange(b, device=x.device)[:, None] * leads + lead
    moved = x.reshape(b * leads, length).index_select(0, row.flatten()).view(x.shape)
    return moved.gather(2, t[:, None].expand(x.shape))


def _outside(start: Tensor, stop: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """0 for start <= t < stop, 1 elsewhere: start, stop int64 [b, v] -> [b, v, T]."""
    t = torch.arange(length, device=start.device)
    return ((t < start[:, :, None]) | (t >= stop[:, :, None])).to(dtype)
