"""Questions to Slurm (which jobs are alive, what became of the others, what the cluster allows), and orders."""

import re
import shutil
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ecgmatch_dist.errors import UserError

PASSING = {"NODE_FAIL", "PREEMPTED", "REQUEUED"}  # said for seconds of a job that is about to be queued again
HELD = "JobHeldUser"  # the reason of a job that waits because its owner wants it to
MAX_ARRAY_SIZE = 1001  # Slurm's default
ANSWER = 60.0  # seconds that a question may take
PATIENCE = (1, 2, 4, 8, 16, 0)  # seconds between questions to a controller that restarts


@dataclass(frozen=True)
class Job:
    """What Slurm says of a job."""

    id: str
    state: str
    nodes: str = ""
    reason: str = ""


def available() -> bool:
    return shutil.which("squeue") is not None


def queue() -> dict[str, Job]:
    """The caller's jobs that wait or run, by id; of an array each one."""
    text = _ask(["squeue", "--me", "-h", "-r", "-o", "%i|%T|%N|%r"])
    jobs = (Job(*line.strip().split("|", 3)) for line in text.splitlines() if line.strip())
    return {job.id: job for job in jobs}


def accounted(ids: Iterable[str]) -> dict[str, Job]:
    """What became of jobs, from the accounting; nothing where a cluster keeps none."""
    arrays = sorted({name.split("_")[0] for name in ids})
    if not arrays or not shutil.which("sacct"):
        return {}
    command = ["sacct", "-X", "-n", "-P", "-o", "JobID,State,NodeList,Reason", "-j", ",".join(arrays)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    jobs = (Job(*line.strip().split("|", 3)) for line in done.stdout.splitlines() if line.strip())
    return {job.id: Job(job.id, job.state.split()[0], job.nodes, job.reason) for job in jobs}


def alive(job_id: str) -> bool:
    """Whether a job waits, runs or is about to be queued again."""
    for wait in (2, 3, 0):
        if job_id in queue():
            return True
        if not wait or accounted([job_id]).get(job_id, Job("", "")).state not in PASSING:
            return False
        time.sleep(wait)
    return False


def living(ids: Iterable[str]) -> dict[str, Job]:
    """Those of the jobs that are alive; asked twice where the accounting says that a job is between two starts."""
    ids = set(ids)
    if not ids:
        return {}
    found = {name: job for name, job in queue().items() if name in ids}
    gone = ids - found.keys()
    if any(job.state in PASSING for name, job in accounted(gone).items() if name in gone):
        time.sleep(5)
        found = {name: job for name, job in queue().items() if name in ids}
    return found


def named(name: str) -> list[str]:
    """The caller's jobs of this name that wait or run."""
    return _ask(["squeue", "--me", "-h", "-o", "%i", f"--name={name}"]).split()


def held() -> dict[str, Path]:
    """The caller's jobs that he has held himself, by id; of an array each one. With the batch file of each."""
    text = _ask(["squeue", "--me", "-h", "-r", "-t", "PENDING", "-o", "%i|%r|%o"])
    rows = (line.strip().split("|", 2) for line in text.splitlines() if line.strip())
    return {job: Path(script) for job, reason, script in rows if reason == HELD}


def array_limit(patient: bool = True) -> int:
    """How many tasks an array may have here; not patient: Slurm's default where no controller answers at once."""
    try:
        return parse_array_limit(_ask(["scontrol", "show", "config"], PATIENCE if patient else (0,)))
    except UserError:
        if patient:
            raise
        return MAX_ARRAY_SIZE


def parse_array_limit(config: str) -> int:
    """The highest number of a task is below MaxArraySize, so it is also their count; 0 forbids arrays."""
    found = re.findall(r"^MaxArraySize\s*=\s*(\d+)|\bmax_array_tasks=(\d+)", config, re.MULTILINE)
    limits = [int(size or tasks) for size, tasks in found]
    return max(1, min(limits, default=MAX_ARRAY_SIZE))


def tell(command: list[str]) -> None:
    """An order to the controller, such as a call of scontrol."""
    _ask(command)


def cancel(ids: Iterable[str]) -> None:
    if names := sorted(ids):
        _ask(["scancel", *names])


def _ask(command: list[str], waits: Sequence[int] = PATIENCE) -> str:
    """A controller that restarts is given half a minute, and one that says nothing a minute each time."""
    said = ""
    for wait in waits:
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=ANSWER)
        except FileNotFoundError:
            raise UserError(f"{command[0]}: not found; is this a machine with Slurm?") from None
        except subprocess.TimeoutExpired:
            said = f"no answer within {ANSWER:.0f} s"
        else:
            if done.returncode == 0:
                return done.stdout
            said = done.stderr.strip() or f"exit code {done.returncode}"
        if wait:
            time.sleep(wait)
    raise UserError(f"{' '.join(command)}: {said}")
