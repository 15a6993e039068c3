"""A large archive: what opening and splitting it costs a rank, through manifest.safetensors and through manifest.csv.

The archive is made up: its rows are true, but thousands of shards are links to one file of small recordings. Each measurement
is a new process. The ranks of a node are two processes that have the archive open at the same time; memory is what each adds to
the node (PSS: shared pages are divided by those who share them)."""

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from ecgmatch_dist.bench import Comparison, show
from ecgmatch_dist.data.index import Dataset, ShardEntry, file_sha256, read_manifest
from ecgmatch_dist.data.make_split import make_split
from ecgmatch_dist.data.modes import peak_memory
from ecgmatch_dist.data.preprocess import Preprocess
from ecgmatch_dist.data.shard import npy_header
from ecgmatch_dist.data.store import ShardStore
from ecgmatch_dist.data.table import NAME, TEXTS, Table, as_bytes, pieces, write_table
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.files.atomic import write_json

SHARD = 10_000  # recordings
CODES = ("", "164889003", "164934002", "39732003", "426783006", "59118001")  # none, and one of each class of ecgmatch5
LABELS = ("", "Rhythm", "ST/T", "Other", "Normal", "Conduction")
SCHEME, DATABASE = "ecgmatch5", "archive"


def make_archive(root: Path, rows: int, labelled: int, length: int, with_csv: bool) -> None:
    """`root`/archive: so many recordings of 12 x `length` random samples, two per patient, some with a label."""
    folder = root / DATABASE
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    count = min(SHARD, rows)
    signals = random.standard_normal((count, 12, length)).astype(np.float16)
    # Not a tar that others could read, but arrays at the places where a tar would have them.
    step = -(-(128 + signals[0].nbytes) // 512) * 512 + 512
    content = np.zeros((count, step), np.uint8)
    content[:, 512 : 512 + 128] = np.frombuffer(npy_header(length), np.uint8)
    content[:, 640 : 640 + signals[0].nbytes] = signals.view(np.uint8).reshape(count, -1)
    digests = np.stack([np.frombuffer(hashlib.sha256(x.tobytes()).digest(), np.uint8) for x in signals])
    shards = -(-rows // count)
    names = [f"{DATABASE}-{i:06d}.tar" for i in range(shards)]
    content.tofile(folder / names[0])
    for name in names[1:]:
        os.link(folder / names[0], folder / name)
    number, inside = np.divmod(np.arange(rows), count)
    codes = np.zeros(rows, np.uint8)
    codes[random.choice(rows, min(labelled, rows), replace=False)] = random.integers(1, len(CODES), min(labelled, rows))
    texts: dict[str, Any] = {name: (np.zeros(rows, np.uint8), [""]) for name in TEXTS}
    texts |= {"codes": (codes, CODES), "labels": (codes, LABELS), "database": (np.zeros(rows, np.uint8), [DATABASE])}
    arrays: dict[str, Any] = {
        "key": digits(b"r", np.arange(rows)),
        "sha256": digests[inside],
        "rate": np.full(rows, 100),
        "samples": np.full(rows, length),
        "offset": inside * step + 640,
        "patient": (np.arange(rows) // 2).astype(np.int32),
        "patient.values": digits(b"p", np.arange(-(-rows // 2))),
        "shard": number.astype(np.uint8 if shards <= 256 else np.int32),
        "shard.values": as_bytes(np.array(names, "S")),
    }
    for name in set(TEXTS) - {"patient", "shard"}:
        number, values = texts[name]
        order = np.argsort(np.array(values, "S"))
        arrays[name] = np.argsort(order).astype(np.uint8)[number]
        arrays[f"{name}.values"] = as_bytes(np.array(values, "S")[order])
    table = Table(arrays)
    digest = write_csv(table, folder / "manifest.csv") if with_csv else hashlib.sha256(arrays["key"].data).hexdigest()
    write_table(folder / NAME, table, digest)
    last = rows - (shards - 1) * count
    entry = (file_sha256(folder / names[0]), content.nbytes)
    dataset = Dataset(
        database=DATABASE, scheme=SCHEME, rate=100, length=length, preprocess=Preprocess(rate=100, length=length),
        recordings=rows, manifest_sha256=digest,
        shards=tuple(ShardEntry(name, *entry, last if name == names[-1] else count) for name in names),
    )  # fmt: skip
    write_json(folder / "dataset.json", dataset.to_json())


def digits(letter: bytes, numbers: "np.ndarray[Any, np.dtype[np.int64]]") -> "np.ndarray[Any, np.dtype[np.uint8]]":
    """Names of a letter and nine digits, uint8 [n, 10]."""
    places = [np.full(len(numbers), letter[0], np.uint8)]
    places += [(numbers // 10**k % 10 + ord("0")).astype(np.uint8) for k in range(8, -1, -1)]
    return np.column_stack(places)


def write_csv(table: Table, path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("wb") as stream:
        for piece in pieces(len(table)):
            text = table.frame(piece).to_csv(index=False, header=piece.start == 0, lineterminator="\n").encode()
            digest.update(text)
            stream.write(text)
    return digest.hexdigest()


def start(what: str, root: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "ecgmatch_dist.bench.archive", what, str(root)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def measure(what: str, root: Path, processes: int) -> dict[str, float]:
    """The first of so many processes that do it together: seconds, memory."""
    started = [start(what, root) for _ in range(processes)]
    for process in started:
        assert process.stdout is not None
        if process.stdout.readline().strip() != "done":  # all have it open before one measures
            raise UserError(f"bench archive: the measurement `{what}` failed")
    found = [process.communicate("\n")[0] for process in started]
    values: dict[str, float] = json.loads(found[0])
    return values


def work(what: str, root: Path) -> None:
    """In the process that is measured."""
    before, peak, begin = pss(), peak_memory(), time.perf_counter()
    kept: Any = None
    if what == "csv":
        kept = read_manifest(root / DATABASE)
    else:
        kept = ShardStore(root, [DATABASE])
        kept.read(np.random.default_rng(0).integers(len(kept), size=1000))
    if what == "split":
        begin, peak = time.perf_counter(), peak_memory()
        split = make_split(kept, "within", 1.0, 20, SCHEME)
        split.save(root / f"{split.name}.json")
    seconds = time.perf_counter() - begin
    print("done", flush=True)
    sys.stdin.readline()
    print(json.dumps({"seconds": seconds, "pss": pss() - before, "peak": peak_memory() - peak}))
    del kept


def against(what: str, other: str, ours: float, theirs: float, unit: str) -> Comparison:
    return Comparison(what, other, ours, theirs, unit, theirs / ours)


def pss() -> float:
    """MiB of this process, of which shared pages count in part."""
    found = re.search(r"Pss:\s+(\d+) kB", Path("/proc/self/smaps_rollup").read_text())
    assert found
    return int(found[1]) / 1024


def main(
    rows: float = 1e6,
    labelled: int = 20_000,
    length: int = 32,
    csv: bool = True,
    to: Path | None = None,
    json: Path | None = None,
) -> None:
    """Opening and splitting a large archive, through manifest.safetensors and through manifest.csv.

    Args:
        rows: Recordings of the archive.
        labelled: Recordings with a label.
        length: Samples per lead.
        csv: Also write manifest.csv, and read it as before there was the other file: slow, and a kilobyte per recording.
        to: Keep the archive in this folder, for `ecgmatch split` and `ecgmatch train`.
        json: Write the numbers to this file.
    """
    if rows < 1000 or length < 1 or (to and to.exists()):
        raise UserError(
            f"--rows {rows:g} --length {length}: at least 1000 and 1; --to: a folder that does not exist yet"
        )
    with nullcontext(str(to)) if to else tempfile.TemporaryDirectory(prefix="ecgmatch-bench-") as folder:
        root = Path(folder)
        begin = time.perf_counter()
        make_archive(root, int(rows), labelled, length, csv)
        print(f"archive of {int(rows):,} recordings made in {time.perf_counter() - begin:.1f} s", flush=True)
        opened, split = measure("open", root, 2), measure("split", root, 1)
        alone = measure("open", root, 1)
        lines = [against("memory of a rank, two on a node", "one rank alone", opened["pss"], alone["pss"], "MiB")]
        if csv:
            texts, other = measure("csv", root, 1), "manifest.csv as texts"
            lines += [
                against("opening, two ranks at once", other, opened["seconds"], texts["seconds"], "s"),
                against("memory of a rank, two on a node", other, opened["pss"], texts["pss"], "MiB"),
                against("peak of a rank", other, opened["peak"], texts["peak"], "MiB"),
            ]
        show(f"archive of {int(rows):,} recordings, {labelled:,} with a label", lines, json)
        print(
            f"opened in {opened['seconds']:.1f} s; split in {split['seconds']:.1f} s with {split['peak']:,.0f} MiB more"
        )


if __name__ == "__main__":
    work(sys.argv[1], Path(sys.argv[2]))
