"""What a job of a sweep does on each of its ranks.

Slurm sends its warning, SIGUSR2, to every rank. submitit's handler would call `checkpoint()` on rank 0 inside the signal
handler, while the other ranks go on training: a collective save there deadlocks. So during training the trainer replaces it by
its own handler, which only sets a flag: all ranks agree on a step, save together and leave the loop. Then submitit's handler
is restored, and rank 0 calls it: it stores the job and asks Slurm to queue it again.
"""

import os
import signal
import sys
import time
import zlib
from collections.abc import Sequence
from typing import Any

from ecgmatch_dist.config import Config, from_json
from ecgmatch_dist.distributed.whereabouts import failed_collective
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.launch import slurm
from ecgmatch_dist.launch.submissions import finished, latest_submissions
from ecgmatch_dist.recovery.generations import Superseded
from ecgmatch_dist.recovery.heartbeat import LOST
from ecgmatch_dist.recovery.signals import Stopped

NFS_DELAY = 60  # seconds until NFS shows a file that another node has written
PORTS = (20000, 32000)  # below the kernel's ephemeral ports


class TrainJob:
    """One run. Holds only plain data, because submitit pickles it."""

    def __init__(self, name: str, config: dict[str, Any], starts: Sequence[str]) -> None:
        """`starts`: the runs that this one starts from."""
        self.name, self.config, self.starts = name, config, starts

    def __call__(self) -> str:
        from ecgmatch_dist.train import train

        config = from_json(self.config)
        rank = export_ranks()
        try:
            self.await_starts(config)
            train(config)
        except Stopped as stopped:
            if stopped.warned:
                queue_again(rank)
            raise
        except Superseded as error:
            # No return value and no requeue: the newer copy has the same job id, and both would reach it.
            print(f"ecgmatch: {error}", file=sys.stderr, flush=True)
            raise SystemExit(1) from None
        except Exception as error:
            if not failed_collective(error):
                raise
            print(f"ecgmatch: another rank is gone: {error}", file=sys.stderr, flush=True)
            os._exit(LOST)  # the job is queued again (site.py)
        return self.name

    def checkpoint(self) -> Any:
        """Called by submitit before it queues the job again. The job stays as it is: its checkpoints are in the run folder."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)

    def await_starts(self, config: Config) -> None:
        """Wait for the runs that this one starts from, which have jobs of their own.

        Slurm's dependency does most of the waiting, but it also ends when such a job is only queued again. The job ids come
        from submissions.jsonl: those of the same array did not exist yet when this job was pickled."""
        submission = latest_submissions(config.runs).get(self.name)
        jobs = submission.starts if submission else {}
        for start in self.starts:
            while not finished(config.runs, start) and start in jobs and slurm.is_alive(jobs[start]):
                time.sleep(5)
            for _ in range(NFS_DELAY // 5):
                if not finished(config.runs, start):
                    time.sleep(5)
            if not finished(config.runs, start):
                raise UserError(f"{start} did not finish, and {self.name} starts from it: submit the sweep again")


def queue_again(rank: int) -> None:
    """Rank 0 calls submitit's signal handler. The other ranks exit without an error: one could make Slurm kill rank 0 first."""
    if rank != 0:
        raise SystemExit(0)
    try:
        signal.raise_signal(signal.SIGUSR2)
    except SystemExit as end:
        raise SystemExit(75 if end.code == -1 else end.code) from None


def export_ranks() -> int:
    """Set torch.distributed's environment variables from those of Slurm or of submitit's local executor. Returns this rank."""
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
    """A port for this start of this job, so that its ranks do not connect to an older copy that still runs."""
    low, high = PORTS
    return low + zlib.crc32(f"{job_id}/{os.environ.get('SLURM_RESTART_COUNT', 0)}".encode()) % (high - low)
