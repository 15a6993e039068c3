"""The data path: building, reading (in all three modes) and memory, against the official recipe, webdataset and wfdb."""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import pandas as pd
import webdataset
import wfdb
from numpy.typing import NDArray
from scipy.signal import butter, filtfilt
from sklearn.preprocessing import StandardScaler
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]
from xxhash import xxh3_64_digest

from ecgmatch_dist.bench import Comparison, faster, interleave, show
from ecgmatch_dist.data.build import build, plan
from ecgmatch_dist.data.databases import Recipe, load_recipe
from ecgmatch_dist.data.index import read_dataset, read_manifest
from ecgmatch_dist.data.modes import compare_modes, peak_memory
from ecgmatch_dist.data.preprocess import PRESETS, Preprocess, pad_or_crop, preprocess
from ecgmatch_dist.data.recordings import RecordRef, find_records, read_recording
from ecgmatch_dist.data.shard import ShardJob, build_shard
from ecgmatch_dist.data.store import ShardStore, _File
from ecgmatch_dist.data.stream import Stream
from ecgmatch_dist.data.synthetic.databases import make_databases
from ecgmatch_dist.errors import UserError

BATCH = 64
TIMED = 64  # recordings per turn of preprocessing and building
TIMES = 8  # size of the larger database in the memory measurement
SHARE, LATENCIES = 56, (0.5e-3, 5e-3)  # recordings of one rank of eight; seconds until storage on a network answers


Coefficients = tuple[NDArray[np.float64], NDArray[np.float64]]


def design(settings: Preprocess, rate: float) -> Coefficients:
    """Coefficients b, a of the official code's filter."""
    b, a = butter(settings.order, (settings.low, settings.high), "bandpass", fs=rate)
    return b, a


design_once: Callable[[Preprocess, float], Coefficients] = lru_cache(design)


def official_recipe(
    signal: NDArray[np.floating], rate: float, settings: Preprocess, design: Callable[[Preprocess, float], Coefficients]
) -> NDArray[np.float32]:
    """[12, n] -> [12, length] lead by lead: filtfilt of a Butterworth band-pass, StandardScaler, zeros at the end."""
    leads = [StandardScaler().fit_transform(filtfilt(*design(settings, rate), lead)[:, None])[:, 0] for lead in signal]
    return pad_or_crop(np.stack(leads), settings.length).astype(np.float32)


def bench_preprocessing(refs: Sequence[RecordRef], settings: Preprocess, repeats: int) -> Comparison:
    """From signals in memory to the arrays of the shards, on one core."""
    signals = [read_recording(ref).signal for ref in refs]

    def ours() -> None:
        for signal in signals:
            preprocess(signal, settings.rate, settings)

    def official() -> None:
        for signal in signals:
            official_recipe(signal, settings.rate, settings, design_once)

    with threadpool_limits(1):
        seconds = interleave({"ours": ours, "official": official}, repeats)
    other = "official recipe, filter designed once"
    return faster("preprocessing, one core", other, len(refs), seconds["ours"], seconds["official"])


def bench_building(job: ShardJob, repeats: int) -> list[Comparison]:
    """From files to a shard, as each worker of `ecgmatch shards build` does it; on one core."""

    def ours() -> None:
        (job.folder / f"{job.name}.csv").unlink(missing_ok=True)  # without its table a shard is built again
        build_shard(job)

    def official(design: Callable[[Preprocess, float], Coefficients]) -> None:
        for ref in job.refs:
            signal, fields = wfdb.rdsamp(str(ref.path.with_suffix("")))
            official_recipe(signal.T, fields["fs"], job.settings, design)

    ways: dict[str, Callable[[], object]] = {
        "ours": ours,
        "each": lambda: official(design),
        "once": lambda: official(design_once),
    }
    with threadpool_limits(1):
        seconds = interleave(ways, repeats)
    others = {
        "each": "official recipe, filter designed anew for each lead",
        "once": "the same, filter designed once",
    }
    note = (
        "ours reads, preprocesses, hashes, and writes and syncs the tar; the official recipe reads with wfdb, "
        "preprocesses lead by lead, and does not write"
    )
    count = len(job.refs)
    return [
        faster("building shards, one core", other, count, seconds["ours"], seconds[way], note if way == "each" else "")
        for way, other in others.items()
    ]


def job_to_time(recipe: Recipe, raw: Path, out: Path, manifest: pd.DataFrame) -> ShardJob:
    """One shard of the first recordings with the most frequent sampling rate, which stays: no resampling."""
    rate = int(manifest["rate"].mode()[0])
    settings = next((preset for preset in PRESETS.values() if preset.rate == rate), Preprocess(rate=rate))
    kept = set(manifest["key"][manifest["rate"] == rate][:TIMED])
    job = plan(recipe, raw, out, settings, len(manifest), None, False)[0]
    return replace(job, refs=tuple(ref for ref in find_records(recipe, raw) if ref.key in kept))


def bench_reading(shards: Path, database: str, refs: list[RecordRef], repeats: int) -> list[Comparison]:
    """All recordings once, in random batches on one thread, against two sequential readers."""
    store = ShardStore(shards, [database])
    stream = Stream(store, np.arange(len(store)), min(BATCH, len(store)), 0, 0, 1)
    urls = [str(shards / database / shard.name) for shard in store.shards]
    batches = -(-len(store) // stream.batch)
    few = refs[: min(len(refs), 64)]

    def ours() -> None:
        for g in range(batches):
            stream[g]

    def in_sequence() -> None:
        for _ in webdataset.WebDataset(urls, shardshuffle=False).decode():
            pass

    def one_by_one() -> None:
        for ref in few:
            wfdb.rdsamp(str(ref.path.with_suffix("")))

    with threadpool_limits(1):
        seconds = interleave({"ours": ours, "webdataset": in_sequence, "wfdb": one_by_one}, repeats)
    mine = seconds["ours"] / (batches * stream.batch)
    what = f"random batches of {stream.batch}, one thread"
    return [
        faster(what, "webdataset in sequence", 1, mine, seconds["webdataset"] / len(store)),
        faster(what, "wfdb.rdsamp", 1, mine, seconds["wfdb"] / len(few)),
    ]


class DistantStore(ShardStore):
    """A store whose files answer as late as storage on a network does."""

    latency = 0.0

    def _open(self, shard: int) -> _File:
        near = super()._open(shard)
        distant = DistantFile(os.dup(near.fd), near.name)
        distant.latency = self.latency
        return distant


class DistantFile(_File):
    latency = 0.0

    def read_into(self, place: NDArray[np.uint8], offset: int) -> None:
        time.sleep(self.latency)
        super().read_into(place, offset)


def bench_distance(shards: Path, database: str, repeats: int, latency: float) -> Comparison:
    """One batch of a rank (of eight) from distant storage: by eight threads, against one recording after the other."""
    store = DistantStore(shards, [database])
    store.latency = latency
    rows = np.arange(SHARE) % len(store)
    with ThreadPoolExecutor(8) as pool:
        ways: dict[str, Callable[[], object]] = {
            "ours": partial(store.read, rows, pool=pool),
            "in turn": partial(store.read, rows),
        }
        ms = {way: 1e3 * seconds for way, seconds in interleave(ways, repeats).items()}
    what = f"a batch of {SHARE} from storage that answers after {1e3 * latency:g} ms"
    return Comparison(what, "one after the other", ms["ours"], ms["in turn"], "ms", ms["in turn"] / ms["ours"])


def bench_first_reading(shards: Path, database: str, repeats: int) -> Comparison:
    """The checksum at a recording's first reading, and what share of that reading it is: medians of single recordings."""
    store = ShardStore(shards, [database])
    rows = np.random.default_rng(0).permutation(len(store))
    x = store.read(rows)  # verifies them
    seconds: dict[str, list[float]] = {"disk": [], "cache": [], "XXH3": [], "SHA-256": []}
    for _ in range(repeats):
        for shard in store.shards:
            with (shards / database / shard.name).open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        for way in ("disk", "cache"):
            for i in range(len(rows)):
                times = [time.perf_counter()]
                for act in (partial(store.read, rows[i : i + 1], x[:1]), partial(xxh3_64_digest, x[0].data),
                            partial(hashlib.sha256, x[0].data)):  # fmt: skip
                    act()
                    times.append(time.perf_counter())
                for name, taken in zip((way, "XXH3", "SHA-256"), np.diff(times), strict=True):
                    seconds[name].append(taken)
    us = {way: 1e6 * float(np.median(times)) for way, times in seconds.items()}
    note = (
        f"one recording at a time takes {us['disk']:.0f} µs from the disk and {us['cache']:.0f} µs from the page cache, so "
        f"the checksum is {us['XXH3'] / us['disk']:.1%} of a first reading from the disk"
    )
    what, ratio = "checksum at the first reading", us["SHA-256"] / us["XXH3"]
    return Comparison(what, "SHA-256", us["XXH3"], us["SHA-256"], "µs", ratio, note)


def enlarge(shards: Path, database: str, out: Path, times: int) -> None:
    """A database with `times` as many recordings that takes no more disk: hard links to the same shards."""
    small, large = shards / database, out / database
    large.mkdir(parents=True)
    dataset, manifest = read_dataset(small), read_manifest(small)
    lines, listed = [], []
    for i in range(times):
        rename = f"copy{i}-"
        copy = manifest.assign(row=manifest["row"] + i * len(manifest), key=rename + manifest["key"])
        lines.append(
            copy.assign(shard=rename + manifest["shard"]).to_csv(index=False, header=not i, lineterminator="\n")
        )
        for shard in dataset.shards:
            os.link(small / shard.name, large / f"{rename}{shard.name}")
            listed.append(replace(shard, name=f"{rename}{shard.name}"))
    text = "".join(lines)
    (large / "manifest.csv").write_text(text)
    digest = hashlib.sha256(text.encode()).hexdigest()
    larger = replace(dataset, recordings=len(manifest) * times, shards=tuple(listed), manifest_sha256=digest)
    (large / "dataset.json").write_text(json.dumps(asdict(larger)))


def memory_of_a_rank(root: Path, database: str) -> tuple[float, float]:
    """Peak MiB of a rank beyond its imports, measured in a new process, and MiB of the database."""
    command = [sys.executable, "-m", "ecgmatch_dist.bench.data", str(root), database]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise UserError(f"the memory measurement failed: {result.stderr.strip().splitlines()[-1]}")
    peak, size = result.stdout.split()
    return float(peak), float(size)


def measure_memory(root: str, database: str) -> None:
    """The process that `memory_of_a_rank` starts: reads batches, then prints its peak memory."""
    before = peak_memory()
    store = ShardStore(root, [database])
    stream = Stream(store, np.arange(len(store)), BATCH, 0, 0, 1)
    for batch in stream.iterate(0, 50, readers=2, ahead=4):
        batch.x.max()
    print(peak_memory() - before, len(store) * 12 * store.length * 2 / 2**20)


def bench_memory(shards: Path, database: str, work: Path) -> Comparison:
    enlarge(shards, database, work / "large", TIMES)
    (small, small_size), (large, large_size) = (memory_of_a_rank(root, database) for root in (shards, work / "large"))
    batches = 6 * BATCH * 12 * ShardStore(shards, [database]).length * 2 / 2**20
    note = (
        f"the databases have {small_size:,.0f} and {large_size:,.0f} MiB, six batches of {BATCH} have {batches:.0f} MiB"
    )
    other = f"{TIMES} times the database"
    return Comparison("peak memory of a rank", other, small, large, "MiB", small / large, note)


def bench_modes(shards: Path, database: str) -> list[Comparison]:
    """Our random access against our windows through a cache and webdataset's own pipeline."""
    ours, *others = compare_modes(shards, database)
    note = (
        "window and shuffle buffer hold a quarter of the recordings; mixing: different shards in a batch, 1 is random"
    )
    rows = []
    for other in others:
        first, rate = other.first_batch / ours.first_batch, ours.per_second / other.per_second
        memory, mixing = other.memory / ours.memory, ours.mixing / other.mixing
        rows += [
            Comparison("time to the first batch", other.mode, ours.first_batch, other.first_batch, "s", first),
            Comparison("recordings per second", other.mode, ours.per_second, other.per_second, "1/s", rate),
            Comparison("memory of reading", other.mode, ours.memory, other.memory, "MiB", memory),
            Comparison("mixing", other.mode, ours.mixing, other.mixing, "", mixing),
        ]
    return [*rows[:-1], replace(rows[-1], note=note)]


def main(
    raw: Path | None = None, recipe: str = "chapman", recordings: int = 256, repeats: int = 7, json: Path | None = None
) -> None:
    """Building, reading and memory of the data path, against the official recipe, webdataset and wfdb.

    Args:
        raw: Folder of recordings, as for `ecgmatch shards build`; default: synthetic ones.
        recipe: Recipe of the database in raw.
        recordings: Synthetic recordings to make.
        repeats: Turns per measurement; the median counts.
        json: Write the numbers to this file.
    """
    if repeats < 1 or recordings < BATCH:
        raise UserError(f"--repeats {repeats} --recordings {recordings}: at least 1 and {BATCH}")
    database = load_recipe(recipe)
    with tempfile.TemporaryDirectory(prefix="ecgmatch-bench-") as folder:
        work = Path(folder)
        if raw is None:
            make_databases(work / "raw", recordings, databases=[database.database], quiet=True)
            raw = work / "raw"
        refs = find_records(database, raw)
        manifest = build(database, raw, work / "shards", Preprocess(), workers=1, shard_size=max(1, len(refs) // 4))
        job = job_to_time(database, raw, work / "timed", manifest)
        rows = [bench_preprocessing(job.refs, job.settings, repeats), *bench_building(job, repeats)]
        rows += bench_reading(work / "shards", database.database, refs, repeats)
        rows.append(bench_first_reading(work / "shards", database.database, repeats))
        rows += [bench_distance(work / "shards", database.database, repeats, latency) for latency in LATENCIES]
        rows.append(bench_memory(work / "shards", database.database, work))
        rows += bench_modes(work / "shards", database.database)
    show(f"data path, {len(refs)} recordings, medians of {repeats} turns, files in the page cache", rows, json)


if __name__ == "__main__":
    measure_memory(*sys.argv[1:])
