"""A random permutation of the rows of all ranks, for mixing. Ranks exchange only the rows that move."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch import distributed as dist

from ecgmatch_dist.data.order import Permutation
from ecgmatch_dist.distributed import collectives
from ecgmatch_dist.distributed.session import to_device


def global_numbers(sizes: Sequence[int], rank: int, world: int) -> NDArray[np.int64]:
    """The numbers of a rank's rows among the rows of all ranks: part by part, each in the order of the ranks.

    A row has the same number on any number of ranks, so it is mixed with the same row.
    """
    starts = np.concatenate([[0], np.cumsum([size * world for size in sizes])])
    return np.concatenate([starts[i] + rank * size + np.arange(size) for i, size in enumerate(sizes)])


def permute_rows(tensors: Sequence[Tensor], sizes: Sequence[int], seed: int, step: int) -> list[Tensor]:
    """Permute the rows of all ranks, of each tensor alike: [n, ...] -> this rank's new rows [n, ...], without gradient.

    A tensor's rows are parts of `sizes`, concatenated; every rank has the same sizes.
    """
    rank, world = collectives.rank(), collectives.world()
    n = sum(sizes)
    numbers = [global_numbers(sizes, r, world) for r in range(world)]
    place = np.empty(n * world, np.int64)  # global number -> rank * n + local row
    place[np.concatenate(numbers)] = np.arange(n * world)
    permutation = Permutation(n * world, seed, step, part=1)
    sources = [place[permutation(numbers[r])] for r in range(world)]  # per rank: where its new rows come from
    if world == 1:
        return [tensor[to_device(sources[0], tensor.device)] for tensor in tensors]

    send = np.concatenate([s[s // n == rank] % n for s in sources])
    send_sizes = [int((s // n == rank).sum()) for s in sources]
    receive_sizes = np.bincount(sources[rank] // n, minlength=world).tolist()
    arrival_order = np.argsort(sources[rank] // n, kind="stable")  # rows arrive sorted by the rank that sends them
    arrival = np.empty(n, np.int64)  # new local row -> position among the arrivals
    arrival[arrival_order] = np.arange(n)
    out = []
    for tensor in tensors:
        rows = tensor.detach()[to_device(send, tensor.device)].contiguous()
        arrived = torch.empty_like(tensor)
        dist.all_to_all_single(arrived, rows, receive_sizes, send_sizes)
        collectives.traffic.add("mixing", (n - receive_sizes[rank]) * (tensor.nbytes // n))
        out.append(arrived[to_device(arrival, tensor.device)])
    return out
