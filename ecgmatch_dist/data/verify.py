"""`ecgmatch shards verify`: check every byte of the shards against the manifest, and the counts against the recipe."""

import errno
import hashlib
import json
import os
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import repeat
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import tyro
from numpy.typing import NDArray
from xxhash import xxh3_64_digest

from ecgmatch_dist.data.card import render_card
from ecgmatch_dist.data.index import Dataset, ShardEntry, file_sha256, manifest_chunks, read_dataset, read_table
from ecgmatch_dist.data.label_check import complain_about_classes, complain_about_codes
from ecgmatch_dist.data.labels import load_scheme
from ecgmatch_dist.data.modes import compare_modes, table
from ecgmatch_dist.data.shard import npy_header
from ecgmatch_dist.data.table import NAME, Ints, Table
from ecgmatch_dist.data.tars import tar_samples
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.files.atomic import write_text
from ecgmatch_dist.files.plain import plain_line
from ecgmatch_dist.terminal.waiting import track


@dataclass(frozen=True)
class Verification:
    recordings: int
    problems: list[str]
    """What is wrong with the shards, one line each."""
    differences: list[str]
    """Counts that are not the recipe's."""
    doubts: list[str]
    """Codes of no class and classes without recordings: right for the scheme, perhaps not for its author."""
    card: Path | None
    """None: it could not be written beside the shards."""


class Sample(NamedTuple):
    """A recording as webdataset reads it from a tar; empty where the tar lacks the file."""

    key: str
    npy: bytes
    json: bytes


class Entry(NamedTuple):
    """The part of a recording's row in manifest.csv that is checked against the tar."""

    offset: int
    sha256: str
    xxh3: bytes
    """Of manifest.safetensors; empty: it has none."""
    labels: str
    codes: str


def verify(folder: Path, cards: Path | None = None) -> Verification:
    """Check the shards of one database and write card.html, or <cards>/<database>.html."""
    dataset = read_dataset(folder)
    table = read_table(folder, dataset)
    scheme = load_scheme(dataset.scheme)
    codes = table.values("codes")
    labels = scheme.states_all(codes)[table.codes("codes")]
    problems = _check_table(folder, dataset, table)
    if dataset.classes and (dataset.classes, dataset.class_names) != (scheme.short, scheme.classes):
        problems.append(
            f"dataset.json: its classes are {' '.join(dataset.classes)}, the scheme's {' '.join(scheme.short)}"
        )
    dataset = replace(dataset, classes=scheme.short, class_names=scheme.classes)
    problems += _check_labels(table, [" ".join(scheme.names(label)) for label in scheme.encode_all(codes)])
    doubts = complain_about_codes(table.counts("codes"), scheme, keep=not scheme.drop_unlabelled)
    doubts += complain_about_classes(labels, scheme.short)
    if (folder / NAME).exists() and table.path is None:
        doubts.append(f"{NAME} is of another manifest.csv and is not used; make it again with `ecgmatch shards index`")
    rows_of = _rows_by_shard(table)
    for shard in track(dataset.shards, dataset.database, len(dataset.shards)):
        problems += _check_shard(folder, shard, table, rows_of.get(shard.name, np.zeros(0, np.int64)), dataset.length)
    differences = _differences(dataset, labels, table.recordings())
    page = render_card(folder, dataset, table, labels, problems, [*differences, *doubts])
    card = cards / f"{dataset.database}.html" if cards else folder / "card.html"
    try:
        card.parent.mkdir(parents=True, exist_ok=True)
        write_text(card, page)
    except OSError as error:
        if cards or error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        return Verification(len(table), problems, differences, doubts, None)  # shards of a cluster may only be read
    return Verification(len(table), problems, differences, doubts, card)


def _check_table(folder: Path, dataset: Dataset, table: Table) -> list[str]:
    problems = []
    if len(table) != dataset.recordings:
        problems.append(f"manifest.csv: {len(table)} rows, but dataset.json has {dataset.recordings} recordings")
    if name := table.repeated():
        problems.append(f"manifest.csv: {name} is there twice")
    if {*table.values("database")} - {dataset.database}:
        problems.append(f"manifest.csv: recordings of another database than {dataset.database}")
    listed = [shard.name for shard in dataset.shards]
    for name in sorted({*table.values("shard")} - {*listed}):
        problems.append(f"{name}: in manifest.csv, but not in dataset.json")
    for path in sorted(folder.glob("*.tar")):
        if path.name not in listed:
            problems.append(f"{path.name}: in the folder, but not in dataset.json")
    return problems + _compare(folder, dataset, table)


def _compare(folder: Path, dataset: Dataset, table: Table) -> list[str]:
    """A mapped table must say what manifest.csv says."""
    first = 0
    for chunk in manifest_chunks(folder, dataset) if table.path else ():
        own = table.frame(slice(first, first + len(chunk)))
        same = len(own) == len(chunk) and (own.to_numpy() == chunk.to_numpy()).all(1)
        if not np.all(same):
            row = first + int(np.argmin(same))
            return [f"{NAME}: row {row} is not that of manifest.csv; make it again with `ecgmatch shards index`"]
        first += len(chunk)
    return [f"{NAME}: it has more rows than manifest.csv"] if table.path and first != len(table) else []


def _check_labels(table: Table, given: list[str]) -> list[str]:
    """`given`: the labels that the codes give, for each of the table's values of `codes`."""
    stored, codes = table.codes("labels"), table.codes("codes")
    names = table.values("labels")
    number = {name: n for n, name in enumerate(names)}
    expected = np.array([number.get(name, -1) for name in given] or [-1])
    wrong = np.flatnonzero(expected[codes] != stored)
    pairs = zip(table.names(wrong), stored[wrong].tolist(), codes[wrong].tolist(), strict=True)
    return [f"{key}: labelled `{names[label]}`, but its codes give `{given[code]}`" for key, label, code in pairs]


def _rows_by_shard(table: Table) -> dict[str, Ints]:
    codes, names = table.codes("shard"), table.values("shard")
    order = np.argsort(codes, kind="stable")
    ends = np.searchsorted(codes[order], np.arange(len(names)), side="right")
    return dict(zip(names, np.split(order, ends[:-1]), strict=True)) if names else {}


def _check_shard(folder: Path, shard: ShardEntry, table: Table, rows: Ints, length: int) -> list[str]:
    """Check the tar's checksum, and each recording both as webdataset reads it and as `pread` does at its offset."""
    name, keys = shard.name, table.names(rows)
    remedy = f"remove {Path(name).stem}.csv and build again: only this shard is written anew"
    try:
        if file_sha256(folder / name) != shard.sha256:
            return [f"{name}: its checksum is not the one in dataset.json; {remedy}"]
        with (folder / name).open("rb") as stream:
            samples = list(_read_tar(stream))
            if [sample.key for sample in samples] != keys:
                return [f"{name}: its {len(samples)} recordings are not the {len(rows)} that manifest.csv puts there"]
            pairs = zip(samples, _entries(table, rows), strict=True)
            faults = [_check_sample(stream.fileno(), sample, entry, length) for sample, entry in pairs]
    except OSError as error:
        return [f"{name}: cannot be read ({error.strerror}); {remedy}"]
    except (tarfile.TarError, ValueError, EOFError) as error:
        return [f"{name}: not a webdataset tar ({error}); {remedy}"]
    return [f"{name}: {key}: {fault}" for key, fault in zip(keys, faults, strict=True) if fault]


def _entries(table: Table, rows: Ints) -> Iterator[Entry]:
    labels, codes = (table.texts(name, rows) for name in ("labels", "codes"))
    digests = (digest.tobytes().hex() for digest in table.sha256[rows])
    quick = repeat(b"") if table.xxh3 is None else (digest.tobytes() for digest in table.xxh3[rows])
    return map(Entry, table.offset[rows].tolist(), digests, quick, labels, codes)


def _read_tar(stream: BinaryIO) -> Iterator[Sample]:
    for sample in tar_samples([("", stream)]):
        yield Sample(sample["__key__"], sample.get("ecg.npy", b""), sample.get("json", b"{}"))


def _check_sample(descriptor: int, sample: Sample, entry: Entry, length: int) -> str:
    """What is wrong with one recording; empty if nothing is."""
    header = npy_header(length)
    member = os.pread(descriptor, len(header) + 2 * 12 * length, max(entry.offset - len(header), 0))
    if not member.startswith(header) or member != sample.npy:
        return f"at offset {entry.offset} there is no float16 array [12, {length}] of this recording"
    if hashlib.sha256(member[len(header) :]).hexdigest() != entry.sha256:
        return "its checksum is not the one in manifest.csv"
    if entry.xxh3 and xxh3_64_digest(member[len(header) :]) != entry.xxh3:
        return f"its quick checksum is not the one in {NAME}; make that again with `ecgmatch shards index`"
    if not np.isfinite(np.frombuffer(member, "<f2", offset=len(header))).all():
        return "holds numbers that are not finite"
    try:
        about = json.loads(sample.json)
    except (ValueError, RecursionError):
        return "its .json is not JSON"
    if not isinstance(about, dict):
        return "its .json is not an object"
    if (about.get("labels"), about.get("codes")) != (entry.labels.split(), entry.codes.split()):
        return "labels or codes in its .json are not those in manifest.csv"
    return ""


def _differences(dataset: Dataset, labels: NDArray[np.uint8], kept: int) -> list[str]:
    """Counts that are not the recipe's. The segments of a recording count as one."""
    expected = dataset.expected
    counts = {
        "recordings read": (kept + dataset.rejected, expected.recordings),
        "kept": (kept, expected.kept),
        **{
            f"of class {short}": (int(count), expected.classes.get(short))
            for short, count in zip(dataset.classes, (labels == 1).sum(axis=0), strict=True)
        },
    }
    return [f"{what}: {n:,}, expected {m:,}" for what, (n, m) in counts.items() if m is not None and n != m]


def main(
    folder: tyro.conf.Positional[Path], /, expect: bool = False, cards: Path | None = None, modes: bool = False
) -> None:
    """Check every checksum, offset and label of the shards, compare their counts with the recipe, and write card.html.

    Args:
        folder: The shards of one database, or the root of several.
        expect: Treat counts other than the recipe's as errors.
        cards: Write the cards to this folder, where the one of the shards may only be read.
        modes: Also measure the three ways to read them, side by side.
    """
    folders = (
        [folder] if (folder / "dataset.json").exists() else sorted(p.parent for p in folder.glob("*/dataset.json"))
    )
    if not folders:
        raise UserError(
            f"{folder}: no shards there (no dataset.json in it or in a folder below); make them with `ecgmatch shards build`"
        )
    bad = 0
    for database in folders:
        try:
            result = verify(database, cards)
        except UserError as error:
            if len(folders) == 1:
                raise
            bad += 1
            print(plain_line(str(error)), file=sys.stderr)
            continue
        problems = result.problems + (result.differences if expect else [])
        bad += len(problems)
        count = len(problems) or "no"
        card = f"see {result.card}" if result.card else "no card, the folder may only be read (--cards FOLDER)"
        print(f"{database}: {result.recordings:,} recordings, {count} problems; {card}")
        for note in [*([] if expect else result.differences), *result.doubts]:
            print(f"  {plain_line(note)}")
        for problem in problems[:20]:
            print(plain_line(f"{database}: {problem}"), file=sys.stderr)
        if modes and not result.problems:
            print("\n".join(table(compare_modes(database.absolute().parent, database.absolute().name))))
    if bad:
        raise UserError(f"{folder}: {bad} problems (see above)")
