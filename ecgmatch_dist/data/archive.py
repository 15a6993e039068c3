"""Tars without an index as more unlabelled recordings (`data.archive`): a first pass lists what is in them.

The bank has a row for each unlabelled recording, so all must be known before training. The pass reads every recording once and
names a bad one before any step is taken; each rank reads its share of the tars. The list is kept in the run folder: a resumed
run does not make the pass again, and trains on the same recordings. This module owns the file's format.
"""

import json
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from ecgmatch_dist.data.split_file import digest
from ecgmatch_dist.data.web_shards import array, expand, read_tar
from ecgmatch_dist.data.web_stream import WebShard
from ecgmatch_dist.distributed.collectives import gather_uneven
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.files.strict import check_format, convert, read_object

FORMAT = 1
NAME = "archive.json"
REMEDY = "remove the run folder and begin again"


@dataclass(frozen=True)
class Tar:
    """One tar of the archive."""

    url: str
    keys: tuple[str, ...]
    """Of its recordings, in its order."""


@dataclass(frozen=True)
class Archive:
    """The recordings of an archive. Their ids follow those of the split's unlabelled part, tar by tar."""

    tars: tuple[Tar, ...] = ()
    left_out: int = 0
    """Recordings with the key of one in the split: it may be the same one, and validation or test must stay unseen."""
    format: int = FORMAT

    def __len__(self) -> int:
        return sum(len(tar.keys) for tar in self.tars)

    @property
    def sha256(self) -> str:
        return digest(asdict(self))

    @property
    def names(self) -> list[str]:
        """tar/key of each recording."""
        return [f"{tar.url.rpartition('/')[2]}/{key}" for tar in self.tars for key in tar.keys]

    def shards(self, first: int) -> list[WebShard]:
        """The tars with the ids of their recordings, from `first` on."""
        out = []
        for tar in self.tars:
            out.append(WebShard(tar.url, {key: first + i for i, key in enumerate(tar.keys)}))
            first += len(tar.keys)
        return out


def list_archive(pattern: str, length: int, taken: Collection[str], rank: int = 0, world: int = 1) -> Archive:
    """The first pass over the tars of `pattern`. `taken`: keys of the split. A collective: each rank reads its share."""
    urls = expand(pattern)
    lines = []
    for number in range(rank, len(urls), world):
        keys: dict[str, None] = {}
        left_out = 0
        for sample in read_tar(urls[number]):
            key = sample["__key__"]
            array(sample, length)
            if key in keys:
                raise UserError(f"{urls[number]}: {key} is there twice; the files of a recording must lie together")
            left_out += key in taken
            keys |= {} if key in taken else {key: None}
        lines.append(json.dumps([number, list(keys), left_out]) + "\n")
    mine = np.frombuffer("".join(lines).encode(), np.uint8)
    everything = gather_uneven(torch.from_numpy(mine.copy()), name="archive")
    found = sorted(map(json.loads, everything.numpy().tobytes().decode().splitlines()))
    tars = tuple(Tar(urls[number], tuple(keys)) for number, keys, _ in found)
    if not any(tar.keys for tar in tars):
        raise UserError(f"data.archive = {pattern}: no recording in its {len(urls)} tars that the split does not have")
    return Archive(tars, sum(left_out for _, _, left_out in found))


def read_archive(path: Path) -> Archive:
    """The list that a run has kept."""
    value = read_object(path, REMEDY)
    check_format(value, FORMAT, path, REMEDY)
    return convert(value, Archive, str(path))
