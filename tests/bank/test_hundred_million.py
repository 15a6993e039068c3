"""A hundred million ECGs on 1,024 ranks, simulated: each rank in turn holds its block, writes its rows of a batch and searches.

What the ranks exchange is handed over by the test; tests/bank/test_memory.py has real collectives. Features are drawn again
wherever they are needed, so that no process holds them all.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from ecgmatch_dist.bank.memory import MemoryBank
from ecgmatch_dist.bank.search import best_order, normalise
from ecgmatch_dist.data.stream import Stream

N, W, D, C, K = 100_000_000, 1024, 16, 2, 5
BATCH = 4 * W
STEP = 60_000  # in the third epoch
QUERIES = 8


class NoSignals:
    """Stands for a store: the order asks for no signal."""

    def read(self, rows: object, out: object = None, pool: object = None) -> np.ndarray:
        raise AssertionError("no signal is read here")


@contextmanager
def one_of_many(rank: int) -> Iterator[None]:
    dist.init_process_group("fake", rank=rank, world_size=W, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def features(rank: int, rows: int) -> Tensor:
    """Of the block of this rank, before the step: [rows, D]."""
    return normalise(torch.rand(rows, D, generator=torch.Generator().manual_seed(rank)) - 0.5)


def ids_of_the_batch() -> Tensor:
    """What the ranks' streams give, one after the other."""
    rows = np.broadcast_to(np.int64(0), N)  # the order needs their number alone
    streams = (Stream(NoSignals(), rows, BATCH, seed=20, rank=rank, world=W) for rank in range(W))  # type: ignore[arg-type]
    return torch.from_numpy(np.concatenate([stream.ids(STEP) for stream in streams]))


def best_of(scores: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The K best of all candidates [q, n]; ties go to the lower row."""
    order = best_order(scores, rows, K)
    return scores.gather(1, order), rows.gather(1, order)


@pytest.mark.slow
def test_a_step_with_a_hundred_million_rows_on_1024_ranks() -> None:
    ids = ids_of_the_batch()
    assert len(ids.unique()) == BATCH  # each recording once an epoch
    assert ids.min() >= 0
    assert ids.max() < N

    generator = torch.Generator().manual_seed(W)
    written, queries = (normalise(torch.rand(n, D, generator=generator) - 0.5) for n in (BATCH, QUERIES))
    queries[0] = written[7]  # finds its own row
    block = -(-N // W)
    found, truth, covered = [], [], 0
    for rank in range(W):
        with one_of_many(rank):
            bank = MemoryBank(N, D, C, K, BATCH, shard_group=W, backend="torch", overlap=False)
            assert bank.start == covered
            covered = bank.stop
            bank.z[: bank.length] = features(rank, bank.length)
            bank._write(bank._pack(ids, written, torch.zeros(BATCH, C)), STEP)
            candidates = bank.searcher.search(queries, bank.z[: bank.length], K)
            found.append((candidates.scores, candidates.rows + bank.start))

        # The slow, obvious way: the block, with the batch written row by row, all scores in fp64.
        z = features(rank, min(N, (rank + 1) * block) - rank * block)
        for place in torch.nonzero((ids >= rank * block) & (ids < (rank + 1) * block)).flatten().tolist():
            z[ids[place] - rank * block] = written[place]
        scores = queries.double() @ z.double().T
        best = scores.topk(2 * K).indices
        truth.append((scores.gather(1, best), best + rank * block))
    assert covered == N

    scores, rows = best_of(*(torch.cat(parts, 1) for parts in zip(*found, strict=True)))
    expected_scores, expected_rows = best_of(*(torch.cat(parts, 1) for parts in zip(*truth, strict=True)))
    assert rows[0, 0] == ids[7]
    assert torch.equal(rows, expected_rows)
    torch.testing.assert_close(scores, expected_scores, rtol=0, atol=1e-12)
