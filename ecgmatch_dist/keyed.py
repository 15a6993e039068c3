"""Counter-based random numbers: a draw is a pure function of (seed, step, view, row, stream, position).

There is no generator and no state. A row gets the same numbers on every rank, on every device and in every batch, and a resumed
run needs only its step. Streams separate the uses: 0-15 augment, 16 network/model.py, 17-31 methods.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

GOLDEN_64 = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: the increment of splitmix64
GOLDEN_32 = 0x9E3779B9
# On a CPU, a block of this many elements stays in the cache during all passes of the hash: 3 times faster than all at once.
CPU_BLOCK = 1 << 18


def row_keys(seed: int, step: int, view: int, rows: Tensor) -> Tensor:
    """The key of each row in a step and view: rows int64 [b] -> int64 [b]. Different rows have different keys."""
    base = 0
    for word in (seed, step, view):
        base = _mix64_int((base + word + 1) * GOLDEN_64)
    return _mix64(rows * _signed(GOLDEN_64, 64) + _signed(base, 64))


def batch_key(seed: int, step: int, view: int, device: torch.device | str | None = None) -> Tensor:
    """A key for the whole batch: int64 [1]. No row has it: it is the key of row -1."""
    return row_keys(seed, step, view, torch.full((1,), -1, dtype=torch.int64, device=device))


def uniform(keys: Tensor, n: int, stream: int) -> Tensor:
    """Uniform numbers in the open interval (0, 1), odd multiples of 2^-24: keys [b] -> float32 [b, n]."""
    out = torch.empty(len(keys), n, dtype=torch.float32, device=keys.device)
    for rows, bits in _blocks(keys, n, stream):
        _to_unit(bits, out[rows])
    return out


def normal(keys: Tensor, n: int, stream: int) -> Tensor:
    """Standard normal numbers (Box-Muller): keys [b] -> float32 [b, n], at most 5.8 in size."""
    half = (n + 1) // 2
    out = torch.empty(len(keys), 2 * half, dtype=torch.float32, device=keys.device)
    for rows, bits in _blocks(keys, 2 * half, stream):
        cosine, sine = out[rows, :half], out[rows, half:]
        radius = _to_unit(bits[:, :half], torch.empty_like(cosine)).log_().mul_(-2).sqrt_()
        angle = _to_unit(bits[:, half:], torch.empty_like(cosine)).mul_(2 * math.pi)
        torch.mul(angle.cos(), radius, out=cosine)
        torch.mul(angle.sin_(), radius, out=sine)
    return out[:, :n]


def integers(keys: Tensor, n: int, high: int | Tensor, stream: int) -> Tensor:
    """Uniform integers 0 .. high - 1: keys [b] -> int64 [b, n]; high may be a tensor that broadcasts to [b, n].

    Computed as (32 random bits * high) / 2^32, so the bias is below high / 2^32.
    """
    bits = _bits(keys, n, stream).to(torch.int64) & 0xFFFFFFFF
    return (bits * high) >> 32


def permutation(keys: Tensor, n: int, stream: int) -> Tensor:
    """A permutation of 0 .. n - 1 per key: keys [b] -> int64 [b, n]."""
    return _bits(keys, n, stream).argsort(dim=1, stable=True)


def _bits(keys: Tensor, n: int, stream: int) -> Tensor:
    """32 random bits per element: keys [b] -> int32 [b, n]."""
    return torch.cat([bits.clone() for _, bits in _blocks(keys, n, stream)])


def _blocks(keys: Tensor, n: int, stream: int) -> Iterator[tuple[slice, Tensor]]:
    """32 random bits per element in blocks of rows: (rows, int32 [rows, n]). The memory is reused by the next block.

    Key and stream give two 32-bit words per row. The row's counter starts at the first. The second enters after the first round
    of the hash, so that two rows with overlapping counters do not share numbers.
    """
    words = _mix64(keys ^ _signed(stream_salt(stream), 64))[:, None]
    first, second = ((words << 32) >> 32).to(torch.int32), (words >> 32).to(torch.int32)
    counter = torch.arange(n, dtype=torch.int32, device=keys.device).mul_(_signed(GOLDEN_32, 32))
    block = max(1, CPU_BLOCK // max(1, n)) if keys.device.type == "cpu" else max(1, len(keys))
    block = min(block, max(1, len(keys)))
    x, scratch = torch.empty(2, block, n, dtype=torch.int32, device=keys.device)
    for start in range(0, max(1, len(keys)), block):
        rows = slice(start, min(start + block, len(keys)))
        x, scratch = x[: rows.stop - start], scratch[: rows.stop - start]
        torch.add(counter, first[rows], out=x)
        _xor_shift(x, 16, scratch).mul_(_signed(0x21F0AAAD, 32)).bitwise_xor_(second[rows])
        _xor_shift(x, 15, scratch).mul_(_signed(0xD35A2D97, 32))
        yield rows, _xor_shift(x, 15, scratch)


def stream_salt(stream: int) -> int:
    """What a stream mixes into the keys, 0 .. 2^64 - 1."""
    return _mix64_int((stream + 1) * GOLDEN_64)


def _to_unit(bits: Tensor, out: Tensor) -> Tensor:
    """int32 bits (overwritten) -> (k + 1/2) 2^-23, k their upper 23 bits, written to the float32 `out`."""
    # With 24 bits, the largest k + 1/2 would not be exact in float32 and would round up to 1.
    out.copy_(bits.bitwise_right_shift_(9).bitwise_and_(0x7FFFFF))
    return out.add_(0.5).mul_(2.0**-23)


def _xor_shift(x: Tensor, shift: int, scratch: Tensor) -> Tensor:
    """x ^= x >>> shift, in place, for int32. Torch's shift copies the sign bit; the mask removes the copies."""
    torch.bitwise_right_shift(x, shift, out=scratch)
    return x.bitwise_xor_(scratch.bitwise_and_((1 << (32 - shift)) - 1))


def _mix64(x: Tensor) -> Tensor:
    """The finaliser of splitmix64 on int64: a bijection that mixes all bits."""
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _signed(0xBF58476D1CE4E5B9, 64)
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _signed(0x94D049BB133111EB, 64)
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def _mix64_int(x: int) -> int:
    """`_mix64` of one Python integer -> 0 .. 2^64 - 1."""
    x &= (1 << 64) - 1
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & ((1 << 64) - 1)
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & ((1 << 64) - 1)
    return x ^ (x >> 31)


def _signed(value: int, bits: int) -> int:
    """The signed integer with the same `bits` bits as an unsigned one (two's complement)."""
    return value - (1 << bits) if value >> (bits - 1) else value
