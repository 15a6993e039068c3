"""From recordings to webdataset shards, the work of `ecgmatch shards build`: plan the shards, write them, join their tables.

`shards/README.md` describes the format."""

import errno
import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pandas as pd

from ecgmatch_dist.data.annotations import Annotation, check_statements, read_annotations
from ecgmatch_dist.data.databases import LabelSource, Recipe, Signals
from ecgmatch_dist.data.formats.read import stem
from ecgmatch_dist.data.index import FORMAT, Dataset, ShardEntry, read_rows
from ecgmatch_dist.data.label_check import (
    codes_without_class,
    complain_about_classes,
    complain_about_codes,
    complain_about_names,
    note_only,
    some_codes,
    tell,
)
from ecgmatch_dist.data.label_file import complete_missing, told
from ecgmatch_dist.data.label_table import LabelTable
from ecgmatch_dist.data.labels import LabelScheme
from ecgmatch_dist.data.manifest import read_rejects as read_rejects_file
from ecgmatch_dist.data.preprocess import Preprocess
from ecgmatch_dist.data.recordings import find_folder, find_records
from ecgmatch_dist.data.shard import BuiltShard, ShardJob
from ecgmatch_dist.data.table import NAME, Table, collect, write_table
from ecgmatch_dist.data.workers import build_shards
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.files.atomic import write_atomic, write_json, write_text
from ecgmatch_dist.files.lock import only_one
from ecgmatch_dist.files.strict import read_object
from ecgmatch_dist.terminal.waiting import track

LOCK = ".lock"


def plan(
    recipe: Recipe, raw: Path, out: Path, settings: Preprocess, shard_size: int, labels: Path | None, strict: bool
) -> list[ShardJob]:
    """One job per shard of a database. Refuses a folder that was begun with other recordings or settings."""
    refs = find_records(recipe, raw)
    scheme = recipe.load_scheme()
    keys = {ref.key for ref in refs}
    annotations = _annotations(recipe, scheme, find_folder(recipe, raw), labels, keys)
    if annotations is not None and not any(ref.key in annotations for ref in refs):
        raise UserError(
            f"the table of labels has none of the {len(refs)} recordings: it names {next(iter(annotations), 'nothing')}, "
            f"the recordings are named {refs[0].key}; see `rename` in shards/example_own.toml"
        )
    strangers = tuple(key for key in annotations or () if key not in keys)
    keep = recipe.unlabelled == "keep" or (not recipe.unlabelled and not scheme.drop_unlabelled)
    folder = out / recipe.database
    planned: dict[str, Any] = {
        "format": FORMAT,
        "database": recipe.database,
        "scheme": scheme.name,
        "classes": {short: sorted(codes) for short, codes in zip(scheme.short, scheme.codes, strict=True)},
        "unlabelled": "keep" if keep else "drop",
        **asdict(settings),
        "shard_size": shard_size,
        **({} if recipe.signals == Signals() else {"signals": asdict(recipe.signals)}),
        "recordings": len(refs),
        "names": _digest([ref.key for ref in refs]),
        "labels": "in the headers" if annotations is None else _digest(sorted(map(str, annotations.items()))),
    }
    _check_plan(folder, json.loads(json.dumps(planned)))
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
            strangers,
            recipe.signals,
        )
        for number, start in enumerate(range(0, len(refs), shard_size))
    ]


def _annotations(
    recipe: Recipe, scheme: LabelScheme, folder: Path, labels: Path | None, keys: set[str]
) -> dict[str, Annotation] | None:
    """The table of labels: the given one, or the recipe's. None: the labels are in the headers. `keys`: the recordings."""

    def find(cell: str) -> str:
        return key if (key := recipe.key(stem(cell))) in keys else ""

    def find_columns(source: LabelSource, table: LabelTable) -> LabelSource:
        found = complete_missing(source, table, scheme, find)
        if found != source:
            print(f"note: {told(found, table, scheme)}")
        return found

    if labels is not None:
        return read_annotations(recipe, LabelSource(source="csv", file=str(labels)), labels, stem, find_columns)
    if recipe.labels.source == "header":
        return None
    if recipe.labels.statements:
        check_statements(scheme, folder / recipe.labels.statements)
    return read_annotations(recipe, recipe.labels, folder / recipe.labels.file, stem, find_columns)


def _digest(words: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(words).encode()).hexdigest()


def _check_plan(folder: Path, planned: dict[str, Any]) -> None:
    """Write the plan to build.json, or compare it with the one that is there."""
    path = folder / "build.json"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_json(path, planned)
        return
    begun = read_object(path, "remove that folder to build it anew")
    for key in planned:
        if begun.get(key) != planned[key]:
            raise UserError(
                f"{folder} was begun with other {key} ({_brief(begun.get(key))}, now {_brief(planned[key])}): "
                f"give another --out, or remove that folder to build it anew"
            )


def _brief(value: object) -> str:
    text = str(value)
    return text if len(text) <= 40 else text[:37] + "..."


def finish(jobs: Sequence[ShardJob], shards: Sequence[BuiltShard], recipe: Recipe) -> Table:
    """Join the shards' tables into manifest.csv, manifest.safetensors and rejects.csv, then write dataset.json."""
    folder, settings, scheme = jobs[0].folder, jobs[0].settings, jobs[0].scheme
    rejects = read_rejects(jobs)
    write_text(folder / "rejects.csv", rejects.to_csv(index=False, lineterminator="\n"))
    if not sum(shard.recordings for shard in shards):
        first = f"{rejects['key'][0]}: {rejects['reason'][0]}" if len(rejects) else "there are none"
        raise UserError(f"not one recording could be kept ({first}); all reasons are in {folder / 'rejects.csv'}")
    table, digest = join(jobs, folder / "manifest.csv")
    table.arrays["xxh3"] = np.frombuffer(b"".join(shard.xxh3 for shard in shards), np.uint8).reshape(-1, 8)
    write_table(folder / NAME, table, digest)
    dataset = Dataset(
        database=recipe.database,
        title=recipe.title or recipe.database,
        scheme=recipe.scheme,
        classes=scheme.short,
        class_names=scheme.classes,
        annotates=recipe.annotates,
        rate=settings.rate,
        length=settings.length,
        preprocess=settings,
        recordings=len(table),
        rejected=sum(shard.rejected for shard in shards),
        expected=recipe.expected,
        shards=tuple(ShardEntry(s.name, s.sha256, s.bytes, s.recordings) for s in shards if s.recordings),
        manifest_sha256=digest,
    )
    write_json(folder / "dataset.json", dataset.to_json())
    return table


def join(jobs: Sequence[ShardJob], path: Path) -> tuple[Table, str]:
    """Write the rows of all shards to manifest.csv, one shard after the other. Returns them, and the file's checksum."""
    digest, tables = hashlib.sha256(), []

    def rows(stream: BinaryIO) -> Iterator[pd.DataFrame]:
        first = 0
        for job in track(jobs, "join the tables", len(jobs)):
            shard = read_rows(job.folder / f"{job.name}.csv")
            shard["row"] += first
            text = shard.to_csv(index=False, header=job is jobs[0], lineterminator="\n").encode()
            digest.update(text)
            stream.write(text)
            first += len(shard)
            yield shard

    def write(temporary: Path) -> None:
        with temporary.open("wb") as stream:
            tables.append(collect(rows(stream)))

    write_atomic(path, write)
    return tables[0], digest.hexdigest()


def read_rejects(jobs: Sequence[ShardJob]) -> pd.DataFrame:
    """Columns key, reason."""
    files = [job.folder / f"{job.name}.rejects.csv" for job in jobs]
    parts = [read_rejects_file(file) for file in files if file.exists()]
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame({"key": [], "reason": []})


def summary(table: Table, rejects: pd.DataFrame, scheme: LabelScheme) -> str:
    """Counts per class, per reason and per kind of flag."""
    unknown, unlabelled = table.counts("codes").get("", 0), table.counts("labels").get("", 0)
    kept = max(len(table) - unknown, 1)
    classes: Counter[str] = Counter()
    for labels, n in table.counts("labels").items():
        classes.update(dict.fromkeys(labels.split(), n))
    reasons = Counter(reason.partition(":")[0] for reason in rejects["reason"])
    flags: Counter[str] = Counter()
    for joined, n in table.counts("flags").items():
        flags.update({flag.partition(":")[0]: n for flag in joined.split()})
    _, ignored = codes_without_class(all_codes(table, rejects), scheme)
    lines = [
        f"labels    {len(table) - unknown:,} with a diagnosis ({unlabelled - unknown:,} of no class), {unknown:,} unknown",
        "classes   " + ", ".join(f"{name} {classes[name]:,} ({classes[name] / kept:.1%})" for name in scheme.short),
        "rejected  " + (", ".join(f"{kind} {count:,}" for kind, count in reasons.most_common()) or "none"),
        "ignored   " + (some_codes(ignored) or "none"),
        "flagged   " + (", ".join(f"{kind} {count:,}" for kind, count in flags.most_common()) or "none"),
    ]
    return "\n".join(lines)


def all_codes(table: Table, rejects: pd.DataFrame) -> Counter[str]:
    """Space-joined codes of the recordings that were kept, and of those that were rejected because of them."""
    reasons = [str(reason) for reason in rejects["reason"] if str(reason).startswith("no class")]
    rejected = Counter(reason.partition(" in ")[2] for reason in reasons if not reason.endswith("no codes"))
    return Counter(table.counts("codes")) + rejected


def check_labels(jobs: Sequence[ShardJob], table: Table) -> list[str]:
    """What a person should hear about the labels."""
    scheme, codes = jobs[0].scheme, all_codes(table, read_rejects(jobs))
    kept = jobs[0].keep_unlabelled and not scheme.drop_unlabelled  # in the shards, and in splits
    found = complain_about_codes(codes, scheme, kept)
    found += complain_about_classes(scheme.states_all(table.values("codes")), scheme.short)
    if jobs[0].annotations is not None:
        if not jobs[0].keep_unlabelled:
            found += complain_about_names("recordings are not in the table of labels", unlisted(jobs))
        found += complain_about_names("rows of the table of labels have no recording", jobs[0].strangers)
    return found


def notes_about(jobs: Sequence[ShardJob], table: Table) -> list[str]:
    """What is no mistake, but should be known: what `only = true` does, and who is unlabelled because the recipe or the scheme
    keeps recordings without a label."""
    found = note_only(all_codes(table, read_rejects(jobs)), jobs[0].scheme)
    if jobs[0].annotations is not None and jobs[0].keep_unlabelled:
        found += complain_about_names("recordings are not in the table of labels and are unlabelled", unlisted(jobs))
    return found


def unlisted(jobs: Sequence[ShardJob]) -> list[str]:
    """Recordings that the table of labels does not name."""
    listed = {key for job in jobs for key in job.annotations or ()}
    return [ref.key for job in jobs for ref in job.refs if ref.key not in listed]


def build_table(
    recipe: Recipe,
    raw: Path,
    out: Path,
    settings: Preprocess,
    workers: int = 1,
    shard_size: int = 1000,
    labels: Path | None = None,
    strict: bool = False,
    elsewhere: Callable[[Sequence[ShardJob]], None] | None = None,
) -> Table:
    """Recordings of `recipe` under `raw` -> shards in out/<database>/. Returns their table.

    `elsewhere` lets other machines write the shards. Those that it leaves out are written here.
    """
    started = time.monotonic()
    folder = out / recipe.database
    try:
        jobs = plan(recipe, raw, out, settings, shard_size, labels, strict)
        with only_one(folder / LOCK, f"{folder}: another build is running there; wait for it, or stop it"):
            for leftover in (*folder.glob(".*.partial"), *folder.glob(".*.tmp")):  # of a build that was killed
                leftover.unlink()
            if elsewhere:
                elsewhere(jobs)
            shards = build_shards(jobs, min(workers, len(jobs)))
            table = finish(jobs, shards, recipe)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(
                f"{folder}: no space left on the device; free some, and the same command continues where it stopped"
            ) from None
        raise UserError(f"{error.filename or folder}: {error.strerror or error}") from None
    seconds, count = time.monotonic() - started, sum(len(job.refs) for job in jobs)
    kept = table.recordings()
    pieces = f" as {len(table):,} segments" if len(table) > kept else ""
    print(
        f"{recipe.database}: {count:,} recordings -> {kept:,} kept{pieces} in {folder}, "
        f"{count - kept:,} rejected (rejects.csv), {seconds:.1f} s"
    )
    print(summary(table, read_rejects(jobs), jobs[0].scheme))
    tell(check_labels(jobs, table), strict, notes_about(jobs, table))
    return table


def build(*args: Any, **kwargs: Any) -> pd.DataFrame:
    """`build_table`, for Python: returns the manifest."""
    return build_table(*args, **kwargs).frame(slice(None))
