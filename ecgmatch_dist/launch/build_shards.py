"""`ecgmatch shards build`: on this machine, or as a Slurm array whose tasks write some shards each."""

import os
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import submitit
import tyro
from rich.console import Console

from ecgmatch_dist.data.build import build_table
from ecgmatch_dist.data.databases import Recipe, load_recipe
from ecgmatch_dist.data.preprocess import PRESETS
from ecgmatch_dist.data.shard import ShardJob, build_shard
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.files.plain import plain_line
from ecgmatch_dist.launch import slurm
from ecgmatch_dist.launch.site import Site, load_site
from ecgmatch_dist.terminal.waiting import make_bar


class ShardTask:
    """Builds some shards, one after the other. Finished ones are skipped, so a restart continues."""

    def __init__(self, jobs: Sequence[ShardJob]) -> None:
        self.jobs = list(jobs)

    def __call__(self) -> int:
        for job in self.jobs:
            build_shard(job)
        return len(self.jobs)

    def checkpoint(self) -> object:
        """Called by submitit before a time limit or a pre-emption."""
        return submitit.helpers.DelayedSubmission(self)


def on_slurm(site: Site, folder: Path) -> Callable[[Sequence[ShardJob]], None]:
    """A function that builds shards in an array of jobs and waits for them."""

    def build_on_slurm(jobs: Sequence[ShardJob]) -> None:
        missing = unfinished(jobs)
        if not missing:
            return
        output = folder.resolve() / "jobs" / f"{time.time_ns():x}"
        count = min(site.parallel, len(missing))
        tasks = [ShardTask(missing[number::count]) for number in range(count)]
        # A site's nodes, GPUs and ranks are meant for training; here each task is one process.
        one_process = replace(site, nodes=1, ranks_per_node=1, gpus_per_node=0)
        ids = one_process.submit(f"ecgmatch-shards-{jobs[0].database}", output, tasks)
        print(f"{jobs[0].database}: {len(missing)} shards in {count} jobs, {ids[0].split('_')[0]}", flush=True)
        try:
            with make_bar(Console(stderr=True)) as bar:
                task = bar.add_task(jobs[0].database, total=len(missing))
                while slurm.alive_among(ids):
                    bar.update(task, completed=len(missing) - len(unfinished(missing)))
                    time.sleep(2)
        except KeyboardInterrupt:
            slurm.cancel(ids)
            raise
        if left := unfinished(missing):
            raise UserError(
                f"{len(left)} shards were not written ({left[0].name} ...): see {output}; the same command continues"
            )

    return build_on_slurm


def unfinished(jobs: Sequence[ShardJob]) -> list[ShardJob]:
    """The shards that lack their table, which is written last."""
    return [job for job in jobs if not (job.folder / f"{job.name}.csv").exists()]


def refuse_if_running(database: str) -> None:
    """Refuse while jobs write these shards: those of a killed command go on."""
    if found := slurm.jobs_named(f"ecgmatch-shards-{database}"):
        raise UserError(f"{database}: its shards are being written by job {found[0]}; wait for it, or scancel it")


def main(
    name: tyro.conf.Positional[str],
    /,
    raw: Path,
    out: Path,
    workers: int = 0,
    preset: Literal["paper", "official_code", "cpu", "few_labels", "demo"] = "paper",
    rate: int | None = None,
    length: int | None = None,
    shard_size: int = 1000,
    labels: Path | None = None,
    strict: bool = False,
    cluster: Literal["local", "slurm"] = "local",
    site: str = "",
) -> None:
    """Recordings -> preprocessed webdataset shards, in OUT/<database>/. After a kill the same command continues.

    Args:
        name: Recipe in shards/ (g12ec, ptbxl, ningbo, chapman, cpsc2018, ptbxl_release) or the path of a .toml file.
        raw: Folder of the recordings, or of the whole release.
        out: Root of the shards.
        workers: Processes; 0: one per core.
        preset: The paper's preprocessing (500 Hz, 6144 samples), the official code's order, or 100 Hz and 1024 (cpu, and the
            same for few_labels and demo): the shards for the preset of this name of `ecgmatch train`.
        rate: Sampling rate instead of the preset's.
        length: Samples instead of the preset's.
        shard_size: Recordings per shard, rejected ones included.
        labels: Table of labels instead of the recipe's; its columns are called record and dx, or found by what they hold.
        strict: Stop at the first bad recording instead of noting it in rejects.csv.
        cluster: local: on this machine; slurm: in an array of jobs, which the command waits for.
        site: For slurm: site in slurm/ or the path of a .toml file; `parallel` is the number of jobs.
    """
    if shard_size < 1 or workers < 0:
        raise UserError(f"--shard-size {shard_size} --workers {workers}: at least 1 and 0")
    settings = PRESETS[preset]
    settings = replace(settings, rate=settings.rate if rate is None else rate)
    settings = replace(settings, length=settings.length if length is None else length)
    recipe, on_cluster = load_recipe(name), None
    if cluster == "slurm":
        refuse_if_running(recipe.database)
        raw, out = raw.resolve(), out.resolve()
        on_cluster = on_slurm(load_site(site), out / "slurm" / recipe.database)
    workers = workers or len(os.sched_getaffinity(0))
    table = build_table(recipe, raw, out, settings, workers, shard_size, labels, strict, on_cluster)
    print(plain_line(f"next        {next_command(recipe, out, any(table.values('codes')))}"))


def next_command(recipe: Recipe, out: Path, labelled: bool) -> str:
    """What comes after the build: a split, or labels if there are none."""
    if labelled:
        return shlex.join(["ecgmatch", "split", "within", "--database", recipe.database, "--shards", str(out)])
    label = ["ecgmatch", "label", "--shards", str(out), "--databases", recipe.database, "--scheme", recipe.scheme]
    return shlex.join([*label, "--to", "labels.csv"])
