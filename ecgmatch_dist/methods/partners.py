"""Rows of other ranks to mix with: one permutation of the global rows, and an exchange of just the rows that it asks for."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch import distributed as dist

from ecgmatch_dist import distributed
from ecgmatch_dist.data.order import Permutation


def canonical(sizes: Sequence[int], rank: int, world: int) -> NDArray[np.int64]:
    """The numbers of a rank's rows among all ranks' rows: parts one after the other, each in the order of the ranks.

    They do not depend on how the global batch is cut, so neither does what a row is mixed with.
    """
    starts = np.concatenate([[0], np.cumsum([size * world for size in sizes])])
    return np.concatenate([starts[i] + rank * size + np.arange(size) for i, size in enumerate(sizes)])


def partners(tensors: Sequence[Tensor], sizes: Sequence[int], seed: int, step: int) -> list[Tensor]:
    """For every local row (parts of `sizes`, concatenated) the row that a global permutation pairs it with, of each tensor."""
    rank, world = distributed.rank(), distributed.world()
    n = sum(sizes)
    numbers = [canonical(sizes, r, world) for r in range(world)]
    place = np.empty(n * world, np.int64)  # canonical number -> rank * n + local row
    place[np.concatenate(numbers)] = np.arange(n * world)
    permutation = Permutation(n * world, seed, step, part=1)
    wanted = [place[permutation(numbers[r])] for r in range(world)]  # of each rank, where its partners are
    if world == 1:
        return [tensor[distributed.to_device(wanted[0], tensor.device)] for tensor in tensors]

    send = np.concatenate([w[w // n == rank] % n for w in wanted])
    send_sizes = [int((w // n == rank).sum()) for w in wanted]
    order = np.argsort(wanted[rank] // n, kind="stable")  # arrivals come sorted by the rank that sends them
    receive_sizes = np.bincount(wanted[rank] // n, minlength=world).tolist()
    back = np.empty(n, np.int64)
    back[order] = np.arange(n)
    out = []
    for tensor in tensors:
        rows = tensor.detach()[distributed.to_device(send, tensor.device)].contiguous()
        arrived = torch.empty_like(tensor)
        dist.all_to_all_single(arrived, rows, receive_sizes, send_sizes)
        distributed.traffic.add("partners", (n - receive_sizes[rank]) * (tensor.nbytes // n))
        out.append(arrived[distributed.to_device(back, tensor.device)])
    return out
