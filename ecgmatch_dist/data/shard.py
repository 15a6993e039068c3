"""Building one shard from a list of recordings, in any process, on any machine.

The shard's .csv is written last. A shard without it is built again: so a killed build continues where it stopped."""

import csv
import hashlib
import io
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
import webdataset as wds
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]
from xxhash import xxh3_64_digest

from ecgmatch_dist.data.annotations import Annotation
from ecgmatch_dist.data.databases import Signals
from ecgmatch_dist.data.header_limits import check_length
from ecgmatch_dist.data.index import COLUMNS, file_sha256, read_rows
from ecgmatch_dist.data.labels import LabelScheme
from ecgmatch_dist.data.preprocess import LEADS, Preprocess, preprocess
from ecgmatch_dist.data.recordings import Recording, RecordRef, Rejected, read_recording
from ecgmatch_dist.data.segments import cut, recording_of
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.files.atomic import sync_folder, write_text
from ecgmatch_dist.files.plain import plain_cell


@dataclass(frozen=True)
class ShardJob:
    """One shard to build."""

    number: int
    folder: Path
    database: str
    scheme: LabelScheme
    keep_unlabelled: bool
    settings: Preprocess
    refs: tuple[RecordRef, ...]
    annotations: dict[str, Annotation] | None
    strict: bool
    strangers: tuple[str, ...] = ()
    """Names in the table of labels that no recording has."""
    signals: Signals = Signals()

    @property
    def name(self) -> str:
        return f"{self.database}-{self.number:06d}"


Digests = bytes


@dataclass(frozen=True)
class BuiltShard:
    """A finished shard. `bytes` is 0 if no recording was kept: there is no tar then. Pieces of a long recording count as
    recordings, but one that is rejected counts once."""

    name: str
    sha256: str
    bytes: int
    recordings: int
    rejected: int
    xxh3: Digests = b""
    """Of each recording: eight bytes, checked at its first reading in a run."""


def build_shard(job: ShardJob, done: Callable[[int], None] = lambda _: None) -> BuiltShard:
    """Write one shard, unless it is finished. `done` is called with the number of recordings done."""
    table, tar = job.folder / f"{job.name}.csv", job.folder / f"{job.name}.tar"
    if table.exists() and (tar.exists() or read_rows(table).empty):
        done(len(job.refs))
    else:
        # One thread: the last bit of a matrix product depends on their number, and workers do not compete for cores.
        with threadpool_limits(1):
            _write_shard(job, done)
    rows = read_rows(table)
    if rows.empty:
        return BuiltShard(f"{job.name}.tar", "", 0, 0, len(job.refs))
    rejected = len(job.refs) - len({recording_of(key) for key in rows["key"]})
    quick = _read_back(tar, rows, len(LEADS) * job.settings.length * 2)
    return BuiltShard(tar.name, file_sha256(tar), tar.stat().st_size, len(rows), rejected, quick)


def _read_back(tar: Path, rows: pd.DataFrame, size: int) -> bytes:
    """Compare what is on the disk with its checksums. Returns the quick ones, which are made here: never of other bytes."""
    quick = []
    with tar.open("rb") as stream:
        for key, offset, sha256 in zip(rows["key"], rows["offset"], rows["sha256"], strict=True):
            data = os.pread(stream.fileno(), size, offset)
            if hashlib.sha256(data).hexdigest() != sha256:
                raise UserError(
                    f"{tar}: {key} is not what was written; remove {tar.stem}.csv and build again: only this shard is "
                    f"written anew"
                )
            quick.append(xxh3_64_digest(data))
    return b"".join(quick)


def _write_shard(job: ShardJob, done: Callable[[int], None]) -> None:
    rows: list[list[str | int]] = []
    rejects: list[list[str | int]] = []
    tar = job.folder / f"{job.name}.tar"
    partial = job.folder / f".{tar.name}.{os.getpid()}.partial"
    try:
        with partial.open("wb", buffering=2**20) as stream:  # webdataset writes in small pieces
            # Owner, mode and time are fixed: the same recordings give the same bytes.
            with wds.TarWriter(stream, encoder=False, user="", group="", mode=0o444, mtime=0) as writer:
                for ref in job.refs:
                    try:
                        for piece in _prepare(job, ref):
                            rows.append([len(rows), *_add_recording(writer, job, piece)])
                    except Rejected as fault:
                        if job.strict and fault.kind != "no class":
                            raise UserError(f"{ref.path}: {fault} (--strict)") from None
                        rejects.append([plain_cell(ref.key), plain_cell(str(fault))])
                    done(1)
            stream.flush()
            os.fsync(stream.fileno())
        if rows:
            partial.replace(tar)
            sync_folder(job.folder)
    finally:
        partial.unlink(missing_ok=True)
    if rejects:
        write_text(job.folder / f"{job.name}.rejects.csv", _csv(("key", "reason"), rejects))
    write_text(job.folder / f"{job.name}.csv", _csv(COLUMNS, rows))


class Prepared(NamedTuple):
    """A recording, or a piece of one, that can be written."""

    recording: Recording
    label: NDArray[np.uint8]  # [C]
    data: bytes
    flags: tuple[str, ...]


def _prepare(job: ShardJob, ref: RecordRef) -> list[Prepared]:
    """Read, label and preprocess one recording, or its pieces. Whatever is in it, it does not stop the build."""
    try:
        recording = read_recording(ref, job.annotations, job.keep_unlabelled, job.signals)
        label = job.scheme.encode(recording.codes)
        if not label.any() and not job.keep_unlabelled:
            raise Rejected("no class", f"of {job.scheme.name} in {' '.join(recording.codes) or 'no codes'}")
        check_length(recording.signal.shape[1], recording.rate, job.settings.rate)
        pieces = cut(recording, job.settings) if job.signals.segments == "all" else [recording]
        return [_preprocess(job, piece, label) for piece in pieces]
    except (Rejected, UserError):
        raise
    except MemoryError:
        raise UserError(f"{ref.path}: out of memory; try fewer --workers, the same command continues") from None
    except Exception as error:
        raise Rejected("unexpected", f"{type(error).__name__}: {str(error)[:200]}") from None


def _preprocess(job: ShardJob, recording: Recording, label: NDArray[np.uint8]) -> Prepared:
    signal, found = preprocess(recording.signal, recording.rate, job.settings)
    half = torch.from_numpy(signal).half().numpy()  # numpy rounds to 16 bits twenty times more slowly
    if not np.isfinite(half).all():
        raise Rejected("not finite", "values that do not fit into 16 bits after preprocessing")
    return Prepared(recording, label, half.tobytes(), (*recording.flags, *found))


def _add_recording(writer: Any, job: ShardJob, prepared: Prepared) -> list[str | int]:
    """Append one recording. Returns its row of the manifest without the row number."""
    recording, label, data, flags = prepared
    about = _about(job, recording, job.scheme.names(label), flags)
    header = npy_header(job.settings.length)
    writer.write({"__key__": recording.key, "ecg.npy": header + data})
    # The tar's position is now after this member, which fills whole blocks of 512 bytes.
    offset = writer.tarstream.offset - -(-(len(header) + len(data)) // 512) * 512 + len(header)
    writer.write({"__key__": recording.key, "json": json.dumps(about, sort_keys=True).encode()})
    return [
        recording.key, job.database, " ".join(about["labels"]), " ".join(recording.codes), recording.patient, recording.fold,
        recording.age, recording.sex, round(recording.rate), about["samples"], " ".join(flags), f"{job.name}.tar", offset,
        hashlib.sha256(data).hexdigest(),
    ]  # fmt: skip


def _about(job: ShardJob, recording: Recording, labels: Sequence[str], flags: Sequence[str]) -> dict[str, Any]:
    return {
        "key": recording.key,
        "database": job.database,
        "labels": list(labels),
        "codes": list(recording.codes),
        "patient": recording.patient,
        "age": recording.age,
        "sex": recording.sex,
        "fold": recording.fold,
        "rate": recording.rate,
        "samples": recording.signal.shape[1],
        "flags": list(flags),
    }


@lru_cache
def npy_header(length: int) -> bytes:
    """The bytes before the data in `<key>.ecg.npy`."""
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        stream, {"descr": "<f2", "fortran_order": False, "shape": (len(LEADS), length)}
    )
    return stream.getvalue()


def _csv(columns: Sequence[str], rows: Sequence[Sequence[str | int]]) -> str:
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return stream.getvalue()
