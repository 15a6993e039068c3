"""What a job of a sweep does on each of its ranks.

Slurm warns with SIGUSR2, on every rank. submitit's own handler would call `checkpoint()` on rank 0 inside the signal handler,
while the other ranks go on training: a collective save there deadlocks. So the trainer's handler stands before it while it
trains: it only raises a flag, all ranks agree on a step, save together and leave the loop. Then submitit's handler is in
its place again, and rank 0 calls it: it stores the job and asks Slurm to queue it again.
"""

import os
import signal
import sys
import time
import zlib
from collections.abc import Sequence
from typing import Any

from ecgmatch_dist.config import Config, from_json
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.fence import Superseded
from ecgmatch_dist.launch import slurm
from ecgmatch_dist.launch.submissions import finished, latest
from ecgmatch_dist.watchdog import LOST, failed_collective

CACHED = 60  # seconds for which NFS may still not show a file that was written on another node
PORTS = (20000, 32000)  # below those that the system hands out by itself


class TrainJob:
    """One run. Holds plain data only: submitit pickles it when it is submitted."""

    def __init__(self, name: str, config: dict[str, Any], starts: Sequence[str]) -> None:
        """`starts`: the supervised runs that this one starts from."""
        self.name, self.config, self.starts = name, config, starts

    def __call__(self) -> str:
        from ecgmatch_dist.train import Stopped, execute

        config = from_json(self.config)
        rank = export_ranks()
        try:
            self.await_starts(config)
            execute(config)
        except Stopped as stopped:
            if stopped.warned:
                queue_again(rank)
            raise
        except Superseded as error:
            # Neither a result nor a restart: both belong to the newer copy, which has the same job id.
            print(f"ecgmatch: {error}", file=sys.stderr, flush=True)
            raise SystemExit(1) from None
        except Exception as error:
            if not failed_collective(error):
                raise
            print(f"ecgmatch: another rank is gone: {error}", file=sys.stderr, flush=True)
            os._exit(LOST)  # the job is queued again (site.py)
        return self.name

    def checkpoint(self) -> Any:
        """Called by submitit: the same job again. What it goes on from lies in the run folder."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)

    def await_starts(self, config: Config) -> None:
        """Each supervised run has a job of its own, which two runs must not do at the same time. The dependency between the
        jobs makes this wait short: Slurm can take a restart of such a job for its end. Which jobs they are is on record,
        since those of the same array had no number yet when this one was pickled."""
        jobs = latest(config.runs).get(self.name, {}).get("starts", {})
        for start in self.starts:
            while not finished(config.runs, start) and start in jobs and slurm.alive(jobs[start]):
                time.sleep(5)
            for _ in range(CACHED // 5):
                if not finished(config.runs, start):
                    time.sleep(5)
            if not finished(config.runs, start):
                raise UserError(f"{start} did not finish, and {self.name} starts from it: submit the sweep again")


def queue_again(rank: int) -> None:
    """Rank 0 hands over to submitit's signal handler; the others leave without an error, which could end rank 0 first."""
    if rank != 0:
        raise SystemExit(0)
    try:
        signal.raise_signal(signal.SIGUSR2)
    except SystemExit as end:
        raise SystemExit(75 if end.code == -1 else end.code) from None


def export_ranks() -> int:
    """Tell torch.distributed who is who, from what Slurm or submitit's local executor say. Returns this rank."""
    from submitit import JobEnvironment

    job = JobEnvironment()
    os.environ.update(
        RANK=str(job.global_rank),
        WORLD_SIZE=str(job.num_tasks),
        LOCAL_RANK=str(job.local_rank),
        LOCAL_WORLD_SIZE=str(job.num_tasks // job.num_nodes),
        MASTER_ADDR=job.hostnames[0],
        MASTER_PORT=str(port(job.job_id)),
    )
    return int(job.global_rank)


def port(job_id: str) -> int:
    """Of this start of this job: an older copy that is still at work must not be met there."""
    low, high = PORTS
    return low + zlib.crc32(f"{job_id}/{os.environ.get('SLURM_RESTART_COUNT', 0)}".encode()) % (high - low)
