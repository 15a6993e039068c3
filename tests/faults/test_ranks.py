"""A rank without memory says so, and ends all."""

from pathlib import Path
from typing import Any

import pytest

from ecgmatch_dist.data.stream import Stream
from tests.support.ranks import run_processes
from tests.support.training import run, tiny


def _train(rank: int, world: int, data: Path, runs: Path) -> None:
    read = Stream._read

    def failing(self: Stream, g: int, pool: Any = None) -> Any:
        if rank == 1 and g == 3:
            raise MemoryError("Unable to allocate 9 TiB")
        return read(self, g, pool)

    Stream._read = failing  # type: ignore[method-assign]
    run(tiny(data, runs, init="scratch"))


@pytest.mark.slow
def test_a_rank_without_memory_says_so_and_ends_all(data: Path, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"UserError: out of memory \(Unable to allocate 9 TiB\): on more ranks"):
        run_processes(2, _train, data, tmp_path, timeout=200)
