"""A view of ECGAugment in one Triton kernel: draws, noise and application, which in torch are 274 kernels that move 30 times as
many bytes. `augment/__init__.py` and `keyed.py` are the definition; this gives the same bits, up to the last ones of logarithm,
sine and cosine in the noise.

Box-Muller makes two numbers of two: elements j and j + 6 T, which are leads v and v + 6 of the same sample. So a program makes
one piece of two leads of one row. It draws the row's queue again: a few integers, cheaper than reading them.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import libdevice

from ecgmatch_dist import config, keyed

BLOCK = 1024  # samples per program
# The transformations and the streams, as in augment/__init__.py.
DROPOUT, FLIP, SHUFFLE, NOISE = (tl.constexpr(k) for k in range(4))
CHOICE, ORDER, WINDOW_LENGTH, WINDOW_PLACE, LEAD, ELEMENT, CROP = (
    tl.constexpr(keyed.stream_salt(stream)) for stream in (0, 1, 2, 3, 4, 5, 10)
)
TWO_PI = tl.constexpr(2 * math.pi)


@triton.jit
def _words(key, SALT: tl.constexpr):
    """The two 32-bit words of a row in a stream."""
    x = key ^ SALT
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    x = x ^ (x >> 31)
    return x.to(tl.uint32), (x >> 32).to(tl.uint32)


@triton.jit
def _bits(key, SALT: tl.constexpr, position):
    """32 random bits of a stream at a position."""
    first, second = _words(key, SALT)
    x = position.to(tl.uint32) * 0x9E3779B9 + first
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) ^ second
    x = (x ^ (x >> 15)) * 0xD35A2D97
    return x ^ (x >> 15)


@triton.jit
def _integer(key, SALT: tl.constexpr, position, high):
    """0 .. high - 1."""
    return ((_bits(key, SALT, position).to(tl.uint64) * high.to(tl.uint64)) >> 32).to(tl.int32)


@triton.jit
def _rank(key, SALT: tl.constexpr, N: tl.constexpr, index):
    """How many of the stream's first N draws come before that of each index: the inverse of `keyed.permutation`."""
    own = _bits(key, SALT, index).to(tl.int32, bitcast=True)[:, None]
    other = _bits(key, SALT, index).to(tl.int32, bitcast=True)[None, :]
    before = (other < own) | ((other == own) & (index[None, :] < index[:, None]))
    return tl.sum((before & (index[None, :] < N)).to(tl.int32), 1)


@triton.jit
def _permuted(rank, index, N: tl.constexpr, place):
    """`keyed.permutation` at a place: the index that has this rank."""
    return tl.sum(tl.where((rank == place) & (index < N), index, 0), 0)


@triton.jit
def _unit(bits):
    """(k + 1/2) 2^-23, k the upper 23 bits."""
    return ((bits >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07


@triton.jit
def _view(
    x, out, keys, choices, choice_stride, length, source_length, sigma,
    STRONG: tl.constexpr, SEQUENTIAL: tl.constexpr, PER_LEAD: tl.constexpr, LIBDEVICE: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    row, pair = tl.program_id(0).to(tl.int64), tl.program_id(1)
    t = tl.program_id(2) * SIZE + tl.arange(0, SIZE)
    key = tl.load(keys + row).to(tl.uint64)
    choice = tl.load(choices + row * choice_stride).to(tl.uint64)

    # the row's queue
    index = tl.arange(0, 16)
    if SEQUENTIAL:  # NOISE, DROPOUT, FLIP, SHUFFLE
        noisy = row >= 0
        dropped = noisy & STRONG
        flips, shuffles, noise_first, before_flip, before_shuffle = dropped, dropped, dropped, dropped, dropped
    else:
        drawn = _integer(choice, CHOICE, index, (index * 0 + 4))
        drawn = tl.where(index < (4 if STRONG else 1), drawn, -1)
        dropped = tl.sum((drawn == DROPOUT).to(tl.int32), 0) > 0
        flips = tl.sum((drawn == FLIP).to(tl.int32), 0) > 0
        shuffles = tl.sum((drawn == SHUFFLE).to(tl.int32), 0) > 0
        noisy = tl.sum((drawn == NOISE).to(tl.int32), 0) > 0
        rank = _rank(choice, ORDER, 4, index)
        place = _permuted(rank, index, 4, DROPOUT)
        before_flip = dropped & flips & (place < _permuted(rank, index, 4, FLIP))
        before_shuffle = dropped & shuffles & (place < _permuted(rank, index, 4, SHUFFLE))
        noise_first = noisy & dropped & (_permuted(rank, index, 4, NOISE) < place)
    leads = _rank(choice, LEAD, 12, index)
    first = _integer(key, CROP, row * 0, (source_length - length + 1).to(tl.int64))
    first = tl.where(source_length > length, first, 0)

    # standard normal noise of leads `pair` and `pair + 6`
    radius = _unit(_bits(key, ELEMENT, pair * length + t))
    angle = _unit(_bits(key, ELEMENT, (pair + 6) * length + t)) * TWO_PI
    if LIBDEVICE:  # what torch's own kernels use; Triton's are approximations
        radius = tl.sqrt_rn(libdevice.log(radius) * -2.0)
        cosine, sine = libdevice.cos(angle) * radius, libdevice.sin(angle) * radius
    else:
        radius = tl.sqrt(tl.log(radius) * -2.0)
        cosine, sine = tl.cos(angle) * radius, tl.sin(angle) * radius

    for half in tl.static_range(2):
        lead = pair + 6 * half
        noise = sine if half else cosine
        moved = _permuted(leads, index, 12, lead)
        # the zeroed window, which a later flip or shuffle moves
        window = tl.where(before_shuffle, moved, lead) if PER_LEAD else lead * 0
        size = _integer(choice, WINDOW_LENGTH, window, (length // 2) + window * 0) * 2
        start = _integer(choice, WINDOW_PLACE, window, length - size)
        stop = tl.where(dropped, start + size, start)
        begin = tl.where(before_flip, length - stop, start)
        end = tl.where(before_flip, length - start, stop)
        kept = ((t < begin) | (t >= end)).to(tl.float32)
        scale = tl.where(noisy, sigma, 0.0)
        scale = tl.where(noise_first, scale * kept, scale)
        # the signal
        source = tl.where(shuffles, moved, lead)
        at = first + tl.where(flips, length - 1 - t, t)
        value = tl.load(x + (row * 12 + source) * source_length + at, mask=t < length, other=0.0)
        tl.store(out + (row * 12 + lead) * length + t, value * kept + noise * scale, mask=t < length)


def view(settings: config.Augment, x: Tensor, keys: Tensor, choice: Tensor, *, strong: bool) -> Tensor:
    """The weak or strong view of float32 x [b, 12, T], of pipeline "ecgaugment" or "sequential". keys, choice [b]: of each row,
    and of its queue."""
    assert x.dtype == torch.float32, x.dtype
    assert x.shape[1] == 12, x.shape
    length = min(x.shape[2], settings.crop or x.shape[2])
    out = x.new_empty(len(x), 12, length)
    options = {"enable_fp_fusion": False} if x.device.type == "cuda" else {}  # the reference multiplies, rounds, adds
    if len(x):
        _view[(len(x), 6, triton.cdiv(length, BLOCK))](
            x.contiguous(),
            out,
            keys.contiguous(),
            choice,
            choice.stride(0),
            length,
            x.shape[2],
            settings.noise_strong if strong else settings.noise_weak,
            STRONG=strong,
            SEQUENTIAL=settings.pipeline == "sequential",
            PER_LEAD=settings.dropout_window == "per_lead",
            LIBDEVICE=x.device.type == "cuda",
            SIZE=BLOCK,
            **options,
        )
    return out
