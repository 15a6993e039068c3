"""Which shards a run reads, and how."""

from dataclasses import dataclass
from typing import Literal

from ecgmatch_dist.config.roles import added, execution
from ecgmatch_dist.errors import require


@dataclass(frozen=True)
class Data:
    """Which shards the settings are for, and how they are read. `cache` and `cache_gib` are for shards behind a URL."""

    rate: int = execution(0)
    """Sampling rate that the other settings are meant for: shards of another one are refused; 0: any."""
    length: int = execution(0)
    """Samples that the other settings are meant for; 0: any."""

    window: int = 0
    """Shuffle within this many shards at a time, so that the cache need not hold all of them; 0: shuffle all."""
    unlabelled: int = added(0)
    """Train with at most so many recordings of the split's unlabelled part, drawn by its seed; a larger number adds to those of
    a smaller one; 0: all."""
    cache: str = execution("")
    """Folder on a local disk for downloaded shards; empty: ecgmatch/ in the user's cache folder."""
    cache_gib: float = execution(32.0)
    """Largest size of the cache."""

    reader: Literal["own", "webdataset"] = added("own")
    """How unlabelled signals are read. own: random access, the same batches on any number of ranks. webdataset: the library's
    pipeline, tar after tar through a shuffle buffer; other ranks or workers give other batches."""
    archive: str = added("")
    """More unlabelled recordings, for the reader webdataset: a folder of tars without an index, or a pattern of paths or URLs
    with braces, as https://host/x-{000..099}.tar. They must be preprocessed like the shards."""
    workers: int = added(1)
    """Pipelines per rank of the reader webdataset; each needs a tar of its own."""
    buffer: int = added(1000)
    """Recordings in the shuffle buffer of each of them."""

    def __post_init__(self) -> None:
        if self.reader == "webdataset":
            require(self.window == 0, "data.window", self.window, "0: the reader webdataset has data.buffer instead")
            remedy = "0: the reader webdataset takes whole tars"
            require(self.unlabelled == 0, "data.unlabelled", self.unlabelled, remedy)
        else:
            for name in ("archive", "workers", "buffer"):
                value, default = getattr(self, name), getattr(Data, name)
                require(value == default, f"data.{name}", value, f"{default!r}, or choose data.reader = webdataset")
        require(self.workers > 0, "data.workers", self.workers, "at least 1")
        require(self.buffer > 0, "data.buffer", self.buffer, "at least 1 recording")
        require(self.unlabelled >= 0, "data.unlabelled", self.unlabelled, "a number of recordings, or 0 for all")
        require(self.window >= 0, "data.window", self.window, "a number of shards, or 0 for all")
        require(self.cache_gib > 0, "data.cache_gib", self.cache_gib, "greater than 0")
