"""From recordings to webdataset shards: `ecgmatch shards build`. Plan shards, write them in parallel, join tables.

The shards' format is described in `shards/README.md`."""

import errno
import fcntl
import hashlib
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from ecgmatch_dist.data.databases import LabelSource, Recipe, load_recipe
from ecgmatch_dist.data.labels import LabelScheme
from ecgmatch_dist.data.manifest import FORMAT, read_rows
from ecgmatch_dist.data.records import Annotation, check_statements, find_folder, find_records, read_annotations
from ecgmatch_dist.data.signals import LEADS, PRESETS, Preprocess
from ecgmatch_dist.data.writer import Shard, ShardJob, build_shard
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.files import write_text


def plan(
    recipe: Recipe, raw: Path, out: Path, settings: Preprocess, shard_size: int, labels: Path | None, strict: bool
) -> list[ShardJob]:
    """The jobs that make a database's shards. Refuses a folder that was begun with other recordings or settings."""
    refs = find_records(recipe, raw)
    scheme = recipe.load_scheme()
    annotations = _annotations(recipe, scheme, find_folder(recipe, raw), labels)
    if annotations is not None and not any(ref.key in annotations for ref in refs):
        raise UserError(
            f"the table of labels has none of the {len(refs)} recordings: it names {next(iter(annotations), 'nothing')}, "
            f"the recordings are named {refs[0].key}; see `rename` in shards/example_own.toml"
        )
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
        try:
            begun = json.loads(path.read_text())
        except ValueError as error:
            raise UserError(f"{path}: cannot be read ({error}); remove that folder to build it anew") from None
        for key in described:
            if begun.get(key) != described[key]:
                raise UserError(
                    f"{folder} was begun with other {key} ({_brief(begun.get(key))}, now {_brief(described[key])}): "
                    f"give another --out, or remove that folder to build it anew"
                )
        return
    folder.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(described, indent=1) + "\n")


def _brief(value: object) -> str:
    text = str(value)
    return text if len(text) <= 40 else text[:37] + "..."


def finish(jobs: Sequence[ShardJob], shards: Sequence[Shard], recipe: Recipe) -> pd.DataFrame:
    """Join the shards' tables to manifest.csv and rejects.csv, and write dataset.json. Returns the manifest."""
    folder, settings, scheme = jobs[0].folder, jobs[0].settings, jobs[0].scheme
    manifest = pd.concat([read_rows(folder / f"{job.name}.csv") for job in jobs], ignore_index=True)
    manifest["row"] = range(len(manifest))
    content = manifest.to_csv(index=False, lineterminator="\n")
    write_text(folder / "rejects.csv", read_rejects(jobs).to_csv(index=False, lineterminator="\n"))
    if manifest.empty:
        raise UserError(f"not one recording could be kept; the reasons are in {folder / 'rejects.csv'}")
    write_text(folder / "manifest.csv", content)
    dataset = {
        "format": FORMAT,
        "database": recipe.database,
        "title": recipe.title or recipe.database,
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
    write_text(folder / "dataset.json", json.dumps(dataset, indent=1) + "\n")
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
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a worker at once, without a traceback
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A build that is killed must not leave workers behind."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _build_in_worker(job: ShardJob) -> Shard:
    return build_shard(job, _tick)


def _tick(count: int) -> None:
    with _done.get_lock():
        _done.value += count


def run(jobs: Sequence[ShardJob], workers: int) -> list[Shard]:
    """All jobs, in `workers` processes (1: in this one), with a progress bar on a terminal, elsewhere one line a shard."""
    with _progress(jobs) as bar:
        if workers == 1:
            return [_reported(build_shard(job, bar.advance)) for job in jobs]
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([build_shard.__module__])  # imported once, not by each worker
        done = context.Value("q", 0)
        shards: dict[int, Shard] = {}
        with ProcessPoolExecutor(workers, context, _start_worker, (done,)) as pool:
            futures = {pool.submit(_build_in_worker, job): job.number for job in jobs}
            try:
                while futures:
                    for future in wait(futures, timeout=0.25, return_when=FIRST_COMPLETED).done:
                        shards[futures.pop(future)] = _reported(future.result())
                    bar.show(done.value)
            except BrokenProcessPool:
                raise UserError(
                    "a worker process was killed (out of memory?): the same command goes on where it stopped; "
                    "try fewer --workers"
                ) from None
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return [shards[job.number] for job in jobs]


def _reported(shard: Shard) -> Shard:
    if not sys.stderr.isatty():
        print(f"{shard.name}: {shard.recordings} kept, {shard.rejected} rejected", file=sys.stderr)
    return shard


class _Bar:
    """Recordings done, with an estimate of the time that remains; silent where there is no terminal."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress, self._task = progress, task

    def advance(self, count: int) -> None:
        self._progress.advance(self._task, count)

    def show(self, done: int) -> None:
        self._progress.update(self._task, completed=done)


@contextmanager
def _progress(jobs: Sequence[ShardJob]) -> Iterator[_Bar]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    terminal = Console(stderr=True)
    with Progress(*columns, console=terminal, disable=not terminal.is_terminal, transient=True) as progress:
        yield _Bar(progress, progress.add_task(jobs[0].database, total=sum(len(job.refs) for job in jobs)))


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
    elsewhere: Callable[[Sequence[ShardJob]], None] | None = None,
) -> pd.DataFrame:
    """Recordings of `recipe` under `raw` -> shards in out/<database>/. Returns the manifest.

    `elsewhere` has the shards written on other machines; what it leaves to be done is done here.
    """
    started = time.monotonic()
    folder = out / recipe.database
    try:
        jobs = plan(recipe, raw, out, settings, shard_size, labels, strict)
        with _locked(folder):
            for leftover in (*folder.glob(".*.partial"), *folder.glob(".*.tmp")):  # of a build that was killed
                leftover.unlink()
            if elsewhere:
                elsewhere(jobs)
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
    cluster: Literal["local", "slurm"] = "local",
    site: str = "",
) -> None:
    """Recordings -> preprocessed webdataset shards, in OUT/<database>/. After a kill the same command goes on.

    Args:
        name: Recipe in shards/ (g12ec, ptbxl, ningbo, chapman, cpsc2018, ptbxl_release) or the path of a .toml file.
        raw: Folder of the recordings, or the folder of the whole release.
        out: Root of the shards.
        workers: Processes; 0: one for each core.
        preset: The paper's preprocessing (500 Hz, 6144 samples), the official code's order, or 100 Hz and 1024.
        rate: Sampling rate instead of the preset's.
        length: Samples instead of the preset's.
        shard_size: Recordings read for one shard.
        labels: CSV table with the columns record and dx, instead of the recipe's source of labels.
        strict: Stop at the first bad recording instead of noting it in rejects.csv.
        cluster: slurm: as an array of jobs, and wait for them.
        site: slurm: site in slurm/ or the path of a .toml file; `parallel` is the number of jobs.
    """
    if shard_size < 1 or workers < 0:
        raise UserError(f"--shard-size {shard_size} --workers {workers}: at least 1 and 0")
    settings = PRESETS[preset]
    settings = replace(settings, rate=settings.rate if rate is None else rate)
    settings = replace(settings, length=settings.length if length is None else length)
    recipe, elsewhere = load_recipe(name), None
    if cluster == "slurm":
        from ecgmatch_dist.launch import shards
        from ecgmatch_dist.launch.site import load as load_site

        shards.refuse_if_at_work(recipe.database)
        raw, out = raw.resolve(), out.resolve()
        elsewhere = shards.on_slurm(load_site(site), out / "slurm" / recipe.database)
    workers = workers or len(os.sched_getaffinity(0))
    build(recipe, raw, out, settings, workers, shard_size, labels, strict, elsewhere)
