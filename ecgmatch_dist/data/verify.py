"""`ecgmatch shards verify`: is every byte what the manifest says, and is the database what the recipe says?"""

import hashlib
import json
import os
import sys
import tarfile
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pandas as pd
import tyro
import webdataset as wds
from numpy.typing import NDArray
from rich.progress import track

from ecgmatch_dist.data.card import write_card
from ecgmatch_dist.data.labels import load_scheme
from ecgmatch_dist.data.manifest import file_sha256, read_dataset, read_manifest
from ecgmatch_dist.data.writer import npy_header
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.files import write_text


@dataclass(frozen=True)
class Findings:
    recordings: int
    problems: list[str]
    """What is wrong with the shards, one line each."""
    differences: list[str]
    """Counts that are not the recipe's."""


def verify(folder: Path) -> Findings:
    """Check the shards of one database and write card.html."""
    dataset, manifest = read_dataset(folder), read_manifest(folder)
    labels = load_scheme(dataset["scheme"]).encode_all(manifest["codes"])
    problems = _check_table(folder, dataset, manifest) + _check_labels(dataset, manifest, labels)
    by_shard = dict(list(manifest.groupby("shard", sort=False)))
    for shard in track(dataset["shards"], dataset["database"], transient=True, disable=not sys.stderr.isatty()):
        problems += _check_shard(folder, shard, by_shard.get(shard["name"], manifest.iloc[:0]), dataset["length"])
    findings = Findings(len(manifest), problems, _differences(dataset, labels))
    card = write_card(folder, dataset, manifest, labels, findings.problems, findings.differences)
    write_text(folder / "card.html", card)
    return findings


def _check_table(folder: Path, dataset: dict[str, Any], manifest: pd.DataFrame) -> list[str]:
    problems = []
    if manifest["row"].tolist() != list(range(dataset["recordings"])):
        problems.append(f"manifest.csv: rows are not 0 to {dataset['recordings'] - 1}, the recordings of dataset.json")
    if manifest["key"].duplicated().any():
        problems.append(f"manifest.csv: {manifest['key'][manifest['key'].duplicated()].iloc[0]} stands there twice")
    if (manifest["database"] != dataset["database"]).any():
        problems.append(f"manifest.csv: recordings of another database than {dataset['database']}")
    listed = [shard["name"] for shard in dataset["shards"]]
    for name in sorted({*manifest["shard"]} - {*listed}):
        problems.append(f"{name}: in manifest.csv, but not in dataset.json")
    for path in sorted(folder.glob("*.tar")):
        if path.name not in listed:
            problems.append(f"{path.name}: in the folder, but not in dataset.json")
    return problems


def _check_labels(dataset: dict[str, Any], manifest: pd.DataFrame, labels: NDArray[np.uint8]) -> list[str]:
    short = np.array(dataset["classes"])
    return [
        f"{key}: labelled `{stored}`, but its codes give `{' '.join(short[label == 1])}`"
        for key, stored, label in zip(manifest["key"], manifest["labels"], labels, strict=True)
        if stored != " ".join(short[label == 1])
    ]


def _check_shard(folder: Path, shard: dict[str, Any], rows: pd.DataFrame, length: int) -> list[str]:
    """Checksum of the tar; and each recording as webdataset reads it, and as `pread` at its offset does."""
    name = shard["name"]
    remedy = f"remove {Path(name).stem}.csv and build again: only this shard is written anew"
    try:
        if file_sha256(folder / name) != shard["sha256"]:
            return [f"{name}: its checksum is not the one in dataset.json; {remedy}"]
        with (folder / name).open("rb") as stream:
            samples = list(_read_tar(stream))
            if [sample["__key__"] for sample in samples] != rows["key"].tolist():
                return [f"{name}: its {len(samples)} recordings are not the {len(rows)} that manifest.csv puts there"]
            pairs = zip(samples, rows.to_dict("records"), strict=True)
            faults = [_check_sample(stream.fileno(), sample, row, length) for sample, row in pairs]
    except OSError as error:
        return [f"{name}: cannot be read ({error.strerror}); {remedy}"]
    except (tarfile.TarError, ValueError) as error:
        return [f"{name}: not a webdataset tar ({error}); {remedy}"]
    return [f"{name}: {row_key}: {fault}" for row_key, fault in zip(rows["key"], faults, strict=True) if fault]


def _read_tar(stream: BinaryIO) -> Iterator[dict[str, Any]]:
    """Samples as webdataset reads them; by its inner functions, as braces in a file's name are no pattern here."""
    yield from wds.tariterators.group_by_keys(wds.tariterators.tar_file_expander([{"url": "", "stream": stream}]))


def _check_sample(descriptor: int, sample: dict[str, Any], row: dict[Hashable, Any], length: int) -> str:
    """What is wrong with one recording; empty if nothing."""
    header = npy_header(length)
    member = os.pread(descriptor, len(header) + 2 * 12 * length, max(row["offset"] - len(header), 0))
    if not member.startswith(header) or member != sample.get("ecg.npy"):
        return f"at offset {row['offset']} there is no float16 array [12, {length}] of this recording"
    if hashlib.sha256(member[len(header) :]).hexdigest() != row["sha256"]:
        return "its checksum is not the one in manifest.csv"
    if not np.isfinite(np.frombuffer(member, "<f2", offset=len(header))).all():
        return "holds numbers that are not finite"
    about = json.loads(sample.get("json", b"{}"))
    if (about.get("labels"), about.get("codes")) != (row["labels"].split(), row["codes"].split()):
        return "labels or codes in its .json are not those in manifest.csv"
    return ""


def _differences(dataset: dict[str, Any], labels: NDArray[np.uint8]) -> list[str]:
    """Counts that are not the recipe's."""
    expected = dataset["expected"]
    counts = {
        "recordings read": (dataset["recordings"] + dataset["rejected"], expected["recordings"]),
        "kept": (dataset["recordings"], expected["kept"]),
        **{
            f"of class {short}": (int(count), expected["classes"].get(short))
            for short, count in zip(dataset["classes"], labels.sum(axis=0), strict=True)
        },
    }
    return [f"{what}: {n:,}, expected {m:,}" for what, (n, m) in counts.items() if m is not None and n != m]


def main(folder: tyro.conf.Positional[Path], /, expect: bool = False) -> None:
    """Check every checksum, offset and label of shards, compare counts with the recipe, and write card.html.

    Args:
        folder: The shards of one database, or the root of several.
        expect: Counts other than the recipe's are an error, not a remark.
    """
    folders = (
        [folder] if (folder / "dataset.json").exists() else sorted(p.parent for p in folder.glob("*/dataset.json"))
    )
    if not folders:
        raise UserError(f"{folder}: no shards there (no dataset.json in it, nor in a folder below)")
    bad = 0
    for one in folders:
        found = verify(one)
        problems = found.problems + (found.differences if expect else [])
        bad += len(problems)
        print(f"{one}: {found.recordings:,} recordings, {len(problems) or 'no'} problems; see {one / 'card.html'}")
        for difference in [] if expect else found.differences:
            print(f"  {difference}")
        for problem in problems[:20]:
            print(f"{one}: {problem}", file=sys.stderr)
    if bad:
        raise UserError(f"{folder}: {bad} problems (see above, and card.html)")
