"""Webdataset tars, ours or anybody's, read in sequence by the webdataset library; also behind http(s)://, s3:// and the like.

Only .npy and .json are decoded, never pickles, and no URL reaches a shell.
"""

import io
import json
import tarfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import braceexpand
import fsspec
import numpy as np
import webdataset
from numpy.typing import NDArray

from ecgmatch_dist.data.remote import ATTEMPTS, PAUSE, connection_options, network_errors, scheme_of
from ecgmatch_dist.data.tars import tar_samples
from ecgmatch_dist.errors import UserError

Sample = dict[str, Any]


def plain_webdataset(urls: str | Sequence[str], shuffle: int = 0, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Any webdataset shards, without our manifest: {"key", "x" [12, T], and the fields of the .json}, in sequence.

    `shuffle` is the size of a shuffle buffer; 0: none.
    """
    samples = (sample for url in expand(urls) for sample in read_tar(url))
    mixed = webdataset.shuffle(shuffle, seed=seed)(samples) if shuffle else samples
    return ({**fields(sample), "key": sample["__key__"], "x": array(sample)} for sample in mixed)


def expand(urls: str | Sequence[str]) -> list[str]:
    """The tars of a pattern with braces, as in "x-{000..003}.tar"; of a local folder, all its tars. Refuses other schemes than
    those of data/remote.py."""
    found: list[str] = []
    for url in braceexpand.braceexpand(urls) if isinstance(urls, str) else urls:
        folder = not scheme_of(url) and Path(url).is_dir()
        found += sorted(map(str, Path(url).glob("*.tar"))) if folder else [url]
    return found


def read_tar(url: str) -> Iterator[Sample]:
    """The samples of a tar that hold an array, in its order. If a connection breaks, it is opened again where it broke."""
    seen, failures = 0, 0
    while True:
        try:
            for number, sample in enumerate(tar_samples(opened(url))):
                if number >= seen:
                    seen, failures = number + 1, 0
                    if array_name(sample):
                        yield sample
            return
        except FileNotFoundError as error:
            raise UserError(f"{url}: no such shard") from error
        except network_errors(tarfile.TarError, ValueError) as error:
            failures += 1
            if not scheme_of(url) or failures == ATTEMPTS:
                reason = str(error.args[0] if error.args else "") or type(error).__name__
                raise UserError(f"{url}, after {seen} recordings: not a shard of ECGs: {reason}") from error
            time.sleep(PAUSE * failures)


def opened(url: str) -> Iterator[tuple[str, BinaryIO]]:
    """The tar's name and stream. The library's own opener would pass URLs to a shell."""
    try:
        with fsspec.open(url, "rb", **connection_options(scheme_of(url))) as stream:
            yield url, stream
    except ImportError as error:
        raise UserError(f"{url}: {error} (pip install 'ecgmatch-dist[s3]' for s3://)") from error


def array_name(sample: Sample) -> str:
    """`ecg.npy`, or the sample's only other .npy; empty without one."""
    names = [name for name in sample if name.rpartition(".")[2] == "npy"]
    if "ecg.npy" in names:
        return "ecg.npy"
    if len(names) > 1:
        raise UserError(f"{place(sample)}: which of {', '.join(names)} is the ECG? call it {sample['__key__']}.ecg.npy")
    return names[0] if names else ""


def array(sample: Sample, length: int | None = None) -> NDArray[Any]:
    """The signal of a sample. With `length`: refused unless it is [12, length] and finite; as float16."""
    try:
        x: NDArray[Any] = np.load(io.BytesIO(sample[array_name(sample)]), allow_pickle=False)
    except (ValueError, EOFError, MemoryError) as error:
        raise UserError(f"{place(sample)}: not an array of numbers: {error}") from error
    if length is None:
        return x
    if x.shape != (12, length) or x.dtype.kind not in "fiu":
        raise UserError(f"{place(sample)}: {x.dtype} {list(x.shape)}, expected numbers [12, {length}]")
    half = x.astype(np.float16)
    if not np.isfinite(half).all():
        raise UserError(f"{place(sample)}: holds numbers that are not finite, or too large for float16")
    return half


def fields(sample: Sample) -> dict[str, Any]:
    """The content of the sample's .json, if it has one."""
    try:
        found = json.loads(sample.get("json", b"{}"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place(sample)}: its .json cannot be read: {error}") from error
    return found if isinstance(found, dict) else {}


def place(sample: Sample) -> str:
    return f"{sample['__url__']}, at {sample['__key__']}"
