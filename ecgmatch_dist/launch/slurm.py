"""Calls of Slurm's commands: which jobs are alive, what became of the others, what the cluster allows."""

import re
import shutil
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ecgmatch_dist.errors import UserError

BETWEEN_STARTS = {"NODE_FAIL", "PREEMPTED", "REQUEUED"}  # states of a job that Slurm queues again within seconds
HELD = "JobHeldUser"  # the reason of a pending job that its owner holds
MAX_ARRAY_SIZE = 1001  # Slurm's default
ANSWER_SECONDS = 60.0  # how long a command may take
RETRY_WAITS = (
    1,
    2,
    4,
    8,
    16,
    0,
)  # seconds after each failed try: a restart of the controller takes about half a minute


@dataclass(frozen=True)
class SlurmJob:
    """What Slurm reports about a job."""

    id: str
    state: str
    nodes: str = ""
    reason: str = ""


def available() -> bool:
    return shutil.which("squeue") is not None


def queue() -> dict[str, SlurmJob]:
    """The user's pending and running jobs by id; each task of an array is a job."""
    return {job.id: job for job in _parse_jobs(run(["squeue", "--me", "-h", "-r", "-o", "%i|%T|%N|%r"]))}


def accounting(ids: Iterable[str]) -> dict[str, SlurmJob]:
    """What became of jobs; empty where the cluster has no accounting."""
    arrays = sorted({name.split("_")[0] for name in ids})
    if not arrays or not shutil.which("sacct"):
        return {}
    command = ["sacct", "-X", "-n", "-P", "-o", "JobID,State,NodeList,Reason", "-j", ",".join(arrays)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=ANSWER_SECONDS)
    except subprocess.TimeoutExpired:
        return {}  # a database that hangs must not hide what the queue says
    # The state may go on, as in "CANCELLED by 1000".
    return {job.id: SlurmJob(job.id, job.state.split()[0], job.nodes, job.reason) for job in _parse_jobs(done.stdout)}


def _parse_jobs(text: str) -> list[SlurmJob]:
    return [SlurmJob(*line.strip().split("|", 3)) for line in text.splitlines() if line.strip()]


def is_alive(job_id: str) -> bool:
    """Whether a job is pending, running or about to be queued again."""
    for wait in (2, 3, 0):
        if job_id in queue():
            return True
        if not wait or accounting([job_id]).get(job_id, SlurmJob("", "")).state not in BETWEEN_STARTS:
            return False
        time.sleep(wait)
    return False


def alive_among(ids: Iterable[str]) -> dict[str, SlurmJob]:
    """Those of the jobs that are pending or running. If one is between two starts, waits and asks again."""
    ids = set(ids)
    if not ids:
        return {}
    found = {name: job for name, job in queue().items() if name in ids}
    gone = ids - found.keys()
    if any(job.state in BETWEEN_STARTS for name, job in accounting(gone).items() if name in gone):
        time.sleep(5)
        found = {name: job for name, job in queue().items() if name in ids}
    return found


def jobs_named(name: str) -> list[str]:
    """The user's pending and running jobs of this name."""
    return run(["squeue", "--me", "-h", "-o", "%i", f"--name={name}"]).split()


def held_jobs() -> dict[str, Path]:
    """The jobs that the user holds, by id, with the batch file of each; each task of an array is a job."""
    text = run(["squeue", "--me", "-h", "-r", "-t", "PENDING", "-o", "%i|%r|%o"])
    rows = (line.strip().split("|", 2) for line in text.splitlines() if line.strip())
    return {job: Path(script) for job, reason, script in rows if reason == HELD}


def array_limit(required: bool = True) -> int:
    """How many tasks an array may have here. Not `required`: Slurm's default if no controller answers at once."""
    try:
        return parse_array_limit(run(["scontrol", "show", "config"], RETRY_WAITS if required else (0,)))
    except UserError:
        if required:
            raise
        return MAX_ARRAY_SIZE


def parse_array_limit(config: str) -> int:
    """Task numbers start at 0 and stay below MaxArraySize, so it is also the most tasks; 0 forbids arrays."""
    found = re.findall(r"^MaxArraySize\s*=\s*(\d+)|\bmax_array_tasks=(\d+)", config, re.MULTILINE)
    limits = [int(size or tasks) for size, tasks in found]
    return max(1, min(limits, default=MAX_ARRAY_SIZE))


def cancel(ids: Iterable[str]) -> None:
    if names := sorted(ids):
        run(["scancel", *names])


def run(command: list[str], waits: Sequence[int] = RETRY_WAITS) -> str:
    """The output of one of Slurm's commands. It is tried again if it fails: the controller may be restarting."""
    problem = ""
    for wait in waits:
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=ANSWER_SECONDS)
        except FileNotFoundError:
            raise UserError(f"{command[0]}: not found; is this a machine with Slurm?") from None
        except subprocess.TimeoutExpired:
            problem = f"no answer within {ANSWER_SECONDS:.0f} s"
        else:
            if done.returncode == 0:
                return done.stdout
            problem = done.stderr.strip() or f"exit code {done.returncode}"
        if wait:
            time.sleep(wait)
    raise UserError(f"{' '.join(command)}: {problem}")
