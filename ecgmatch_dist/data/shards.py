"""From recordings to webdataset shards: `ecgmatch shards build`. The unit of work is a list of recordings -> one shard.

A shard is finished when its .csv is there, which is written last: a killed build goes on where it stopped."""

import csv
import errno
import fcntl
import hashlib
import io
import json
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import tyro
import webdataset as wds
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ecgmatch_dist.data.databases import LabelSource, Recipe, load_recipe
from ecgmatch_dist.data.labels import LabelScheme
from ecgmatch_dist.data.manifest import COLUMNS, FORMAT, file_sha256, read_rows, sync_folder, write_atomically
from ecgmatch_dist.data.records import (
    Annotation, Recording, RecordRef, Rejected, check_statements, find_folder, find_records, read_annotations, read_recording,
)  # fmt: skip
from ecgmatch_dist.data.signals import LEADS, PRESETS, Preprocess, preprocess
from ecgmatch_dist.errors import UserError


@dataclass(frozen=True)
class ShardJob:
    """The unit of work: these recordings -> the shard of this number."""

    number: int
    folder: Path
    database: str
    scheme: LabelScheme
    keep_unlabelled: bool
    settings: Preprocess
    refs: tuple[RecordRef, ...]
    annotations: dict[str, Annotation] | None
    strict: bool

    @property
    def name(self) -> str:
        return f"{self.database}-{self.number:06d}"


@dataclass(frozen=True)
class Shard:
    """A finished shard; `bytes` is 0 where no recording was kept and there is no tar."""

    name: str
    sha256: str
    bytes: int
    recordings: int
    rejected: int


def build_shard(job: ShardJob, tick: Callable[[int], None] = lambda _: None) -> Shard:
    """Write one shard, unless it is finished already. Called in any process; `tick` is told of recordings done."""
    table = job.folder / f"{job.name}.csv"
    if not table.exists():
        _write_shard(job, tick)
    else:
        tick(len(job.refs))
    kept, tar = len(read_rows(table)), job.folder / f"{job.name}.tar"
    if kept == 0:
        return Shard(f"{job.name}.tar", "", 0, 0, len(job.refs))
    return Shard(tar.name, file_sha256(tar), tar.stat().st_size, kept, len(job.refs) - kept)


def _write_shard(job: ShardJob, tick: Callable[[int], None]) -> None:
    rows: list[list[str | int]] = []
    rejects: list[list[str | int]] = []
    tar = job.folder / f"{job.name}.tar"
    partial = job.folder / f".{tar.name}.{os.getpid()}.partial"
    try:
        with partial.open("wb") as stream:
            # Owner, mode and time are fixed: the same recordings give the same bytes.
            with wds.TarWriter(stream, encoder=False, user="", group="", mode=0o444, mtime=0) as writer:
                for ref in job.refs:
                    try:
                        rows.append([len(rows), *_add_recording(writer, job, ref)])
                    except Rejected as fault:
                        if job.strict and fault.kind != "no class":
                            raise UserError(f"{ref.path}: {fault} (--strict)") from None
                        rejects.append([ref.key, str(fault)])
                    tick(1)
            stream.flush()
            os.fsync(stream.fileno())
        if rows:
            partial.replace(tar)
            sync_folder(job.folder)
    finally:
        partial.unlink(missing_ok=True)
    if rejects:
        write_atomically(job.folder / f"{job.name}.rejects.csv", _csv(("key", "reason"), rejects))
    write_atomically(job.folder / f"{job.name}.csv", _csv(COLUMNS, rows))


def _add_recording(writer: Any, job: ShardJob, ref: RecordRef) -> list[str | int]:
    """Read, label, preprocess and append one recording; returns its manifest row without the number."""
    recording = read_recording(ref, job.annotations)
    label = job.scheme.encode(recording.codes)
    if not label.any() and not job.keep_unlabelled:
        raise Rejected("no class", f"of {job.scheme.name} in {' '.join(recording.codes) or 'no codes'}")
    signal, flags = preprocess(recording.signal, recording.rate, job.settings)
    data = signal.astype("<f2").tobytes()
    about = _about(job, recording, job.scheme.names(label), flags)
    writer.write({"__key__": ref.key, "ecg.npy": npy_header(job.settings.length) + data})
    end = writer.tarstream.offset  # of the member's last block; the data stand before it, padded to blocks of 512
    offset = end - _blocks(len(npy_header(job.settings.length)) + len(data)) + len(npy_header(job.settings.length))
    writer.write({"__key__": ref.key, "json": json.dumps(about, sort_keys=True).encode()})
    return [
        ref.key, job.database, " ".join(about["labels"]), " ".join(recording.codes), recording.patient, recording.age,
        recording.sex, round(recording.rate), about["samples"], " ".join(flags), f"{job.name}.tar", offset,
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


def npy_header(length: int) -> bytes:
    """What stands before the data in `<key>.ecg.npy`."""
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        stream, {"descr": "<f2", "fortran_order": False, "shape": (len(LEADS), length)}
    )
    return stream.getvalue()


def _blocks(size: int) -> int:
    return -(-size // 512) * 512


def _csv(columns: Sequence[str], rows: Sequence[Sequence[str | int]]) -> str:
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return stream.getvalue()


def plan(
    recipe: Recipe, raw: Path, out: Path, settings: Preprocess, shard_size: int, labels: Path | None, strict: bool
) -> list[ShardJob]:
    """The jobs that make a database's shards. Refuses to go on in a folder that was begun with other recordings or settings."""
    refs = find_records(recipe, raw)
    scheme = recipe.load_scheme()
    annotations = _annotations(recipe, scheme, find_folder(recipe, raw), labels)
    keep = recipe.unlabelled == "keep" or (not recipe.unlabelled and not scheme.drop_unlabelled)
    folder = out / recipe.database
    described: dict[str, Any] = {
        "format": FORMAT,
        "database": recipe.database,
        "scheme": scheme.name,
        "classes": {short: sorted(codes) for short, codes in zip(scheme.short, scheme.codes, strict=True)},
        "unlabelled": "keep" if keep else "drop",
        **json.loads(json.dumps(asdict(settings))),
        "shard_size": shard_size,
        "recordings": len(refs),
        "names": _digest([ref.key for ref in refs]),
        "labels": "in the headers" if annotations is None else _digest(sorted(map(str, annotations.items()))),
    }
    _check_plan(folder, described)
    return [
        ShardJob(
            number,
            folder,
            recipe.database,
            scheme,
            keep,
            settings,
            part := tuple(refs[start : start + shard_size]),
            None if annotations is None else {r.key: annotations[r.key] for r in part if r.key in annotations},
            strict,
        )
        for number, start in enumerate(range(0, len(refs), shard_size))
    ]


def _annotations(
    recipe: Recipe, scheme: LabelScheme, folder: Path, labels: Path | None
) -> dict[str, Annotation] | None:
    """The table of labels: the one given, or the recipe's; None: the labels stand in the headers."""
    if labels is not None:
        return read_annotations(recipe, LabelSource(source="csv", file=str(labels)), labels)
    if recipe.labels.source == "header":
        return None
    if recipe.labels.statements:
        check_statements(scheme, folder / recipe.labels.statements)
    return read_annotations(recipe, recipe.labels, folder / recipe.labels.file)


def _digest(words: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(words).encode()).hexdigest()


def _check_plan(folder: Path, described: dict[str, Any]) -> None:
    """Write what is to be built to build.json, or compare with what was begun there."""
    path = folder / "build.json"
    if path.exists():
        begun = json.loads(path.read_text())
        for key in described:
            if begun.get(key) != described[key]:
                raise UserError(
                    f"{folder} was begun with other {key} ({_brief(begun.get(key))}, now {_brief(described[key])}): "
                    f"give another --out, or remove that folder to build it anew"
                )
        return
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(described, indent=1) + "\n")


def _brief(value: object) -> str:
    text = str(value)
    return text if len(text) <= 40 else text[:37] + "..."


def finish(jobs: Sequence[ShardJob], shards: Sequence[Shard], recipe: Recipe) -> pd.DataFrame:
    """Join the shards' tables to manifest.csv and rejects.csv, and write dataset.json. Returns the manifest."""
    folder, settings, scheme = jobs[0].folder, jobs[0].settings, jobs[0].scheme
    manifest = pd.concat([read_rows(folder / f"{job.name}.csv") for job in jobs], ignore_index=True)
    manifest["row"] = range(len(manifest))
    content = manifest.to_csv(index=False, lineterminator="\n")
    write_atomically(folder / "manifest.csv", content)
    write_atomically(folder / "rejects.csv", read_rejects(jobs).to_csv(index=False, lineterminator="\n"))
    dataset = {
        "format": FORMAT,
        "database": recipe.database,
        "scheme": recipe.scheme,
        "classes": list(scheme.short),
        "class_names": list(scheme.classes),
        "rate": settings.rate,
        "length": settings.length,
        "leads": list(LEADS),
        "dtype": "float16",
        "preprocess": asdict(settings),
        "recordings": len(manifest),
        "rejected": sum(shard.rejected for shard in shards),
        "expected": asdict(recipe.expected),
        "shards": [
            {"name": shard.name, "sha256": shard.sha256, "bytes": shard.bytes, "recordings": shard.recordings}
            for shard in shards
            if shard.recordings
        ],
        "manifest_sha256": hashlib.sha256(content.encode()).hexdigest(),
    }
    write_atomically(folder / "dataset.json", json.dumps(dataset, indent=1) + "\n")
    for leftover in folder.glob(".*.partial"):
        leftover.unlink()
    return manifest


def read_rejects(jobs: Sequence[ShardJob]) -> pd.DataFrame:
    """Columns key, reason."""
    files = [job.folder / f"{job.name}.rejects.csv" for job in jobs]
    parts = [pd.read_csv(file, dtype=str, keep_default_na=False) for file in files if file.exists()]
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame({"key": [], "reason": []})


def summary(manifest: pd.DataFrame, rejects: pd.DataFrame, scheme: LabelScheme) -> str:
    """Counts per class, per reason and per kind of flag."""
    kept = max(len(manifest), 1)
    classes = Counter(name for labels in manifest["labels"] for name in labels.split())
    reasons = Counter(reason.partition(":")[0] for reason in rejects["reason"])
    flags = Counter(kind for flags in manifest["flags"] for kind in {flag.partition(":")[0] for flag in flags.split()})
    lines = [
        "classes   " + ", ".join(f"{name} {classes[name]:,} ({classes[name] / kept:.1%})" for name in scheme.short),
        "rejected  " + (", ".join(f"{kind} {count:,}" for kind, count in reasons.most_common()) or "none"),
        "flagged   " + (", ".join(f"{kind} {count:,}" for kind, count in flags.most_common()) or "none"),
    ]
    return "\n".join(lines)


_done: Any = None
"""In a worker process: the number of recordings done, shared with the parent."""


def _start_worker(done: Any) -> None:
    global _done
    _done = done


def _build_in_worker(job: ShardJob) -> Shard:
    return build_shard(job, _tick)


def _tick(count: int) -> None:
    with _done.get_lock():
        _done.value += count


def run(jobs: Sequence[ShardJob], workers: int) -> list[Shard]:
    """All jobs, in `workers` processes, with a progress bar on a terminal and one line a shard elsewhere."""
    context = multiprocessing.get_context("forkserver")
    done = context.Value("q", 0)
    shards: dict[int, Shard] = {}
    with (
        _one_thread_each(),
        ProcessPoolExecutor(workers, context, _start_worker, (done,)) as pool,
        _progress(jobs) as bar,
    ):
        futures = {pool.submit(_build_in_worker, job): job for job in jobs}
        try:
            while futures:
                for future in wait(futures, timeout=0.25, return_when=FIRST_COMPLETED).done:
                    shards[futures.pop(future).number] = shard = future.result()
                    if not sys.stderr.isatty():
                        print(f"{shard.name}: {shard.recordings} kept, {shard.rejected} rejected", file=sys.stderr)
                bar.update(bar.task_ids[0], completed=done.value)
        except BrokenProcessPool:
            raise UserError(
                "a worker process was killed (out of memory?): the same command goes on where it stopped; "
                "try fewer --workers"
            ) from None
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [shards[job.number] for job in jobs]


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Workers started inside compute with one thread: there are as many workers as cores."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        os.environ.pop("OMP_NUM_THREADS") if before is None else os.environ.update(OMP_NUM_THREADS=before)


@contextmanager
def _progress(jobs: Sequence[ShardJob]) -> Iterator[Progress]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, disable=not sys.stderr.isatty(), transient=True) as bar:
        bar.add_task(jobs[0].database, total=sum(len(job.refs) for job in jobs))
        yield bar


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Two builds of one folder at once would tread on each other's files."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{folder}: another build is at work there; wait for it, or stop it") from None
        yield


def build(
    recipe: Recipe,
    raw: Path,
    out: Path,
    settings: Preprocess,
    workers: int = 1,
    shard_size: int = 1000,
    labels: Path | None = None,
    strict: bool = False,
) -> pd.DataFrame:
    """Recordings of `recipe` under `raw` -> shards in out/<database>/. Returns the manifest."""
    started = time.monotonic()
    folder = out / recipe.database
    try:
        find_folder(recipe, raw)
        with _locked(folder):
            jobs = plan(recipe, raw, out, settings, shard_size, labels, strict)
            shards = run(jobs, min(workers, len(jobs)))
            manifest = finish(jobs, shards, recipe)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(
                f"{folder}: no space left on the device; free some and give the same command again: "
                f"it goes on where it stopped"
            ) from None
        raise UserError(f"{error.filename or folder}: {error.strerror or error}") from None
    seconds, count = time.monotonic() - started, sum(len(job.refs) for job in jobs)
    print(
        f"{recipe.database}: {count:,} recordings -> {len(manifest):,} kept in {folder}, "
        f"{count - len(manifest):,} rejected (rejects.csv), {seconds:.1f} s"
    )
    print(summary(manifest, read_rejects(jobs), jobs[0].scheme))
    return manifest


def main(
    name: tyro.conf.Positional[str],
    /,
    raw: Path,
    out: Path,
    workers: int = 0,
    preset: Literal["paper", "official_code", "cpu"] = "paper",
    rate: int | None = None,
    length: int | None = None,
    shard_size: int = 1000,
    labels: Path | None = None,
    strict: bool = False,
) -> None:
    """Recordings -> preprocessed webdataset shards, in OUT/<database>/. After a kill the same command goes on.

    Args:
        name: Recipe in shards/ (g12ec, ptbxl, ningbo, chapman, cpsc2018, ptbxl_release) or the path of a .toml file.
        raw: Folder of the recordings, or the folder of the whole release.
        out: Root of the shards.
        workers: Processes; 0: one for each core.
        preset: Preprocessing: the paper's (500 Hz, 6144 samples), the official code's order of steps, or 100 Hz, 1024 samples.
        rate: Sampling rate instead of the preset's.
        length: Samples instead of the preset's.
        shard_size: Recordings read for one shard.
        labels: CSV table with the columns record and dx, instead of the recipe's source of labels.
        strict: Stop at the first bad recording instead of noting it in rejects.csv.
    """
    if shard_size < 1 or workers < 0:
        raise UserError(f"--shard-size {shard_size} --workers {workers}: at least 1 and 0")
    settings = PRESETS[preset]
    settings = replace(settings, rate=rate or settings.rate, length=length or settings.length)
    build(load_recipe(name), raw, out, settings, workers or len(os.sched_getaffinity(0)), shard_size, labels, strict)
