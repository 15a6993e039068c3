"""Shards as a Slurm array: `ecgmatch shards build ... --cluster slurm`. Each task writes its share of the shards."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import submitit

from ecgmatch_dist.data.writer import ShardJob, build_shard
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.launch import slurm
from ecgmatch_dist.launch.site import Site


class ShardTask:
    """Some shards, one after the other; those that are finished are left alone, so a restart goes on."""

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
    """A function that has the shards written by an array of jobs and returns when they are there."""

    def build(jobs: Sequence[ShardJob]) -> None:
        missing = [job for job in jobs if not (job.folder / f"{job.name}.csv").exists()]
        if not missing:
            return
        place = folder.resolve() / "jobs" / f"{time.time_ns():x}"
        executor = submitit.SlurmExecutor(place, max_num_timeout=site.requeues)
        # One process for each share: what a site says of GPUs and ranks is meant for training.
        one = Site(**{**vars(site), "nodes": 1, "ranks_per_node": 1, "gpus_per_node": 0})
        executor.update_parameters(**one.parameters(f"ecgmatch-shards-{jobs[0].database}", place))
        count = min(site.parallel, len(missing))
        tasks = [ShardTask(missing[number::count]) for number in range(count)]
        if count > 1:
            with executor.batch():
                submitted = [executor.submit(task) for task in tasks]
        else:
            submitted = [executor.submit(tasks[0])]
        ids = {job.job_id for job in submitted}
        print(
            f"{jobs[0].database}: {len(missing)} shards in {count} jobs, {submitted[0].job_id.split('_')[0]}",
            flush=True,
        )
        try:
            while slurm.living(ids):
                time.sleep(2)
        except KeyboardInterrupt:
            slurm.cancel(ids)
            raise
        if left := [job.name for job in missing if not (job.folder / f"{job.name}.csv").exists()]:
            raise UserError(
                f"{len(left)} shards were not written ({left[0]} ...): see {place}; the same command goes on"
            )

    return build


def refuse_if_at_work(database: str) -> None:
    """An array of an earlier command that was killed would still be writing."""
    if found := slurm.named(f"ecgmatch-shards-{database}"):
        raise UserError(f"{database}: its shards are being written by job {found[0]}; wait for it, or scancel it")
