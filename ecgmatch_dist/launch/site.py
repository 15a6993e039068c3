"""What is particular to a cluster: one file, slurm/<site>.toml."""

import re
import shlex
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import submitit

from ecgmatch_dist import resources
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.files.plain import CONTROL
from ecgmatch_dist.files.strict import read_toml

CRASHES = 10  # how often a job that lost a rank is queued again
WAIT = 60  # seconds after the end of the first rank until srun kills the ranks that hang


@dataclass(frozen=True)
class Site:
    """What a job asks Slurm for."""

    partition: str = ""
    account: str = ""
    qos: str = ""
    constraint: str = ""
    exclude: str = ""
    nodes: int = 1
    """Nodes per run."""
    gpus_per_node: int = 0
    """GPUs per node; 0: train on CPUs."""
    ranks_per_node: int = 0
    """Processes per node; 0: one per GPU, or one without GPUs."""
    cpus_per_rank: int = 1
    """Cores per process."""
    memory_gib: float = 0.0
    """Main memory per node; 0: the cluster's default."""
    minutes: int = 720
    """Time limit. A run that needs longer is queued again and resumes."""
    warning_seconds: int = 120
    """How long before the time limit Slurm warns a job. Must be enough for a step, a validation and a checkpoint."""
    parallel: int = 64
    """Runs of a sweep that run at the same time."""
    requeues: int = 100
    """How many time limits a run may reach before it is not queued again."""
    setup: list[str] = field(default_factory=list)
    """Shell lines before the run: modules, environment variables."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Further options of sbatch, by their long names."""

    def __post_init__(self) -> None:
        texts = {name: getattr(self, name) for name in ("partition", "account", "qos", "constraint", "exclude")}
        texts |= {f"extra.{name}": f"{name}{value}" for name, value in self.extra.items()}
        for name, text in texts.items():
            if CONTROL.search(text):  # after a line break, bash would run the rest
                raise UserError(f"site: {name!r} = {text!r}: no line breaks and control characters")
        for name in self.extra:
            if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
                raise UserError(
                    f"site: extra: {name!r}: the long name of an option of sbatch, without dashes before it"
                )
        for name in ("nodes", "minutes", "parallel", "cpus_per_rank"):
            if getattr(self, name) < 1:
                raise UserError(f"site: {name} = {getattr(self, name)}: at least 1")
        if self.warning_seconds >= 60 * self.minutes:
            raise UserError(
                f"site: warning_seconds = {self.warning_seconds}: less than the time limit ({self.minutes} min)"
            )

    @property
    def ranks(self) -> int:
        """Processes per node."""
        return self.ranks_per_node or self.gpus_per_node or 1

    def parameters(self, job_name: str, folder: Path, held: bool = False) -> dict[str, Any]:
        """The parameters of submitit's Slurm executor. `held`: the jobs wait until they are released."""
        if CONTROL.search(f"{job_name}{folder}"):
            raise UserError(
                f"{job_name!r} in {str(folder)!r}: no line breaks and control characters in names for Slurm"
            )
        wanted = {
            "job_name": job_name,
            "partition": self.partition,
            "account": self.account,
            "qos": self.qos,
            "constraint": self.constraint,
            "exclude": self.exclude,
            "time": self.minutes,
            "nodes": self.nodes,
            "ntasks_per_node": self.ranks,
            "gpus_per_node": self.gpus_per_node,
            "cpus_per_task": self.cpus_per_rank,
            "mem": f"{int(1024 * self.memory_gib)}MB" if self.memory_gib else "",
        }
        return {name: value for name, value in wanted.items() if value} | {
            "signal_delay_s": self.warning_seconds,
            "array_parallelism": self.parallel,
            "setup": [*self.setup, "export PYTHONFAULTHANDLER=1 COLUMNS=200"],  # long lines are not wrapped in the logs
            "teardown": requeue_after_a_crash(folder),
            # Since Slurm 22.05, srun does not pass the batch job's cores on to its tasks.
            "srun_args": [f"--cpus-per-task={self.cpus_per_rank}", f"--wait={WAIT}"],
            "additional_parameters": {"requeue": True, **self.extra} | ({"hold": True} if held else {}),
        }

    def submit(self, job_name: str, folder: Path, tasks: Sequence[Callable[[], Any]], held: bool = False) -> list[str]:
        """Submit tasks as one job array; a single one as a plain job. Returns the job ids."""
        executor = submitit.SlurmExecutor(folder, max_num_timeout=self.requeues)
        executor.update_parameters(**self.parameters(job_name, folder, held))
        with executor.batch() if len(tasks) > 1 else nullcontext():
            jobs = [executor.submit(task) for task in tasks]
        return [str(job.job_id) for job in jobs]


def requeue_after_a_crash(folder: Path) -> list[str]:
    """Shell lines after srun that queue the job again where the run itself is not at fault.

    srun's exit code decides:
    - 129 to 254: a signal ended a rank (kill -9, out of memory, an abort after a timeout), or a rank lost another one
      (recovery/heartbeat.py). Queued again, at most CRASHES times.
    - 75: the run was asked to stop and saved itself. If Slurm still has the job running, it was not cancelled: it is being
      pre-empted by a cluster that only sends SIGTERM. Queued again.
    - 255: submitit has already queued the job again. Other codes are the run's own errors. Both: nothing to do.

    Nothing is done either if Slurm has started a newer copy of the job meanwhile.
    """
    job = "${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}"
    return [
        "code=$?",
        f"job={job}; job=${{job:-$SLURM_JOB_ID}}; crashes={shlex.quote(str(folder))}/$job.crashes",
        'shown=$(scontrol show job -o "$job")',
        'restarts=$(echo "$shown" | sed -n "s/.* Restarts=\\([0-9]*\\).*/\\1/p")',
        'if [ "$restarts" = "${SLURM_RESTART_COUNT:-0}" ]; then',
        "    if [ $code -gt 128 ] && [ $code -lt 255 ]; then",
        '        echo "exit code $code" >> "$crashes"',
        f'        if [ $(wc -l < "$crashes") -le {CRASHES} ]; then scontrol requeue "$job"; fi',
        '    elif [ $code -eq 75 ] && [[ $shown == *" JobState=RUNNING "* ]]; then',
        '        scontrol requeue "$job"',
        "    fi",
        "fi",
        "exit $code",
    ]


def load_site(name: str) -> Site:
    """The site of this name in slurm/, or of a .toml file; no name: one process on any node."""
    return read_toml(resources.find("slurm", name), Site) if name else Site()
