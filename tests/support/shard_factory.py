"""Tiny shard folders with random signals, in the format of `ecgmatch shards build`, made in milliseconds."""

import hashlib
import io
import json
import tarfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from ecgmatch_dist.data.labels import load_scheme
from ecgmatch_dist.data.preprocess import LEADS

# One code of each class of the five: conduction, rhythm, ST/T, other, normal.
CODES = ("59118001", "164889003", "164934002", "39732003", "426783006")


def random_codes(n: int, seed: int = 0) -> list[str]:
    """Space-joined SNOMED codes of n recordings: one or two abnormalities, or a normal one."""
    rng = np.random.default_rng(seed)
    chosen = [rng.choice(4, rng.integers(1, 3), replace=False) if rng.random() < 0.7 else [4] for _ in range(n)]
    return [" ".join(CODES[c] for c in sorted(some)) for some in chosen]


def make_shards(
    folder: Path,
    database: str,
    n: int,
    length: int = 64,
    codes: Sequence[str] | None = None,
    *,
    patients: Sequence[str] | None = None,
    folds: Sequence[str] | None = None,
    signals: np.ndarray | None = None,
    per_shard: int = 7,
    rate: int = 100,
    scheme: str = "ecgmatch5",
    seed: int = 0,
) -> np.ndarray:
    """Write `folder/database/` with n recordings and return their signals, float16 [n, 12, length].

    `codes`: space-joined SNOMED codes of each recording; `patients`: its patient; `folds`: its published fold; `signals`:
    [n, 12, length].
    """
    place = folder / database
    place.mkdir(parents=True)
    rng = np.random.default_rng([seed, *database.encode()])
    x = rng.standard_normal((n, 12, length)).astype(np.float16) if signals is None else signals.astype(np.float16)
    codes = random_codes(n, seed) if codes is None else codes
    short = load_scheme(scheme).short
    labels = load_scheme(scheme).encode_all(codes)
    rows, shards = [], []
    for start in range(0, n, per_shard):
        name = f"{database}-{start // per_shard:06d}.tar"
        for i, offset in write_tar(place / name, database, x, range(start, min(start + per_shard, n))):
            row = {
                "row": i,
                "key": f"{database}{i:05d}",
                "database": database,
                "labels": " ".join(s for s, y in zip(short, labels[i], strict=True) if y),
                "codes": codes[i],
                "patient": patients[i] if patients is not None else "",
                "fold": folds[i] if folds is not None else "",
                "age": str(40 + i % 40),
                "sex": "FM"[i % 2],
                "rate": rate,
                "samples": length,
                "flags": "",
                "shard": name,
                "offset": offset,
                "sha256": hashlib.sha256(x[i].tobytes()).hexdigest(),
            }
            rows.append(row)
        data = (place / name).read_bytes()
        count = min(start + per_shard, n) - start
        digest = hashlib.sha256(data).hexdigest()
        shards.append({"name": name, "sha256": digest, "bytes": len(data), "recordings": count})
        pd.DataFrame(rows[start:]).to_csv(place / name.replace(".tar", ".csv"), index=False, lineterminator="\n")
    pd.DataFrame(rows).to_csv(place / "manifest.csv", index=False, lineterminator="\n")
    dataset = {
        "format": 1,
        "database": database,
        "scheme": scheme,
        "rate": rate,
        "length": length,
        "leads": list(LEADS),
        "dtype": "float16",
        "preprocess": {"rate": rate, "length": length, "low": 1.0, "high": 47.0},
        "recordings": n,
        "rejected": 0,
        "shards": shards,
        "manifest_sha256": hashlib.sha256((place / "manifest.csv").read_bytes()).hexdigest(),
    }
    (place / "dataset.json").write_text(json.dumps(dataset, indent=1))
    (place / "rejects.csv").write_text("key,reason\n")
    return x


def write_tar(path: Path, database: str, x: np.ndarray, numbers: range) -> list[tuple[int, int]]:
    """The recordings of these numbers as a webdataset tar; each with the offset of its array's data."""
    offsets = []
    with tarfile.open(path, "w") as tar:
        for i in numbers:
            array = io.BytesIO()
            np.save(array, x[i])
            for suffix, data in ((".ecg.npy", array.getvalue()), (".json", json.dumps({"row": i}).encode())):
                info = tarfile.TarInfo(f"{database}{i:05d}{suffix}")
                info.size = len(data)
                if suffix == ".ecg.npy":
                    offsets.append((i, tar.offset + 512 + len(data) - x[i].nbytes))
                tar.addfile(info, io.BytesIO(data))
    return offsets
