"""A cluster's own ways, in one file: slurm/<site>.toml."""

import dataclasses
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ecgmatch_dist import recipes
from ecgmatch_dist.errors import UserError

CRASHES = 10  # how often a job that lost a rank is queued again
WAIT = 60  # seconds from the end of the first rank to that of the last; who hangs is killed then


@dataclass(frozen=True)
class Site:
    """What a job asks Slurm for."""

    partition: str = ""
    account: str = ""
    qos: str = ""
    constraint: str = ""
    exclude: str = ""
    nodes: int = 1
    """Nodes of one run."""
    gpus_per_node: int = 0
    """GPUs of one run on each node; 0: computed on CPUs."""
    ranks_per_node: int = 0
    """Processes of one run on each node; 0: one a GPU, or one."""
    cpus_per_rank: int = 1
    """Cores of each process."""
    memory_gib: float = 0.0
    """Main memory a node; 0: the cluster's default."""
    minutes: int = 720
    """Time limit. A run that needs longer is queued again and goes on."""
    warning_seconds: int = 120
    """Slurm warns a job so long before its time limit; it must be enough for a step, a validation and a checkpoint."""
    parallel: int = 64
    """Runs of a sweep at the same time."""
    requeues: int = 100
    """Time limits that a run may reach before it is left alone."""
    setup: list[str] = field(default_factory=list)
    """Shell lines before the run: modules, environment variables."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Further options of sbatch, by their long names."""

    def __post_init__(self) -> None:
        for name in ("nodes", "minutes", "parallel", "cpus_per_rank"):
            if getattr(self, name) < 1:
                raise UserError(f"site: {name} = {getattr(self, name)}: at least 1")
        if self.warning_seconds >= 60 * self.minutes:
            raise UserError(
                f"site: warning_seconds = {self.warning_seconds}: less than the time limit ({self.minutes} min)"
            )

    @property
    def ranks(self) -> int:
        """Processes of one run on each node."""
        return self.ranks_per_node or self.gpus_per_node or 1

    def parameters(self, job_name: str, folder: Path, held: bool = False) -> dict[str, Any]:
        """What submitit's Slurm executor takes; held: to wait until somebody releases it."""
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
            "setup": [*self.setup, "export PYTHONFAULTHANDLER=1 COLUMNS=200"],  # whole lines in the logs
            "teardown": requeue_after_a_crash(folder),
            # srun does not hand the batch job's cores on to its tasks by itself (Slurm 22.05 and later).
            "srun_args": [f"--cpus-per-task={self.cpus_per_rank}", f"--wait={WAIT}"],
            "additional_parameters": {"requeue": True, **self.extra} | ({"hold": True} if held else {}),
        }


def requeue_after_a_crash(folder: Path) -> list[str]:
    """Shell lines behind srun: a rank that a signal ended (kill -9, out of memory, a watchdog's abort) or that lost another one
    (watchdog.py) is not the run's fault, and the job goes back into the queue, unless Slurm has started a newer copy of it
    meanwhile. srun's exit code is then above 128; a run's own errors have lower codes, and 255 is submitit's after it has
    queued the job again itself. 75: the run was asked to stop and saved itself. If Slurm still has the job running, it was
    not cancelled but is being pre-empted by a cluster that only sends SIGTERM, and it goes back, too."""
    job = "${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}"
    return [
        "code=$?",
        f"job={job}; job=${{job:-$SLURM_JOB_ID}}; crashes={folder}/$job.crashes",
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


def load(name: str) -> Site:
    """The site of this name in slurm/, or of a .toml file; no name: one process on any node."""
    if not name:
        return Site()
    path = recipes.find("slurm", name)
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path}: {error}") from error
    fields = {f.name: f for f in dataclasses.fields(Site)}
    for key, value in table.items():
        if key not in fields:
            raise UserError(f"{path}: unknown key `{key}`; known are {', '.join(fields)}")
        default = getattr(Site(), key)
        wanted = (int, float) if isinstance(default, float) else type(default)
        if not isinstance(value, wanted) or isinstance(value, bool):
            raise UserError(f"{path}: {key} = {value!r}: of the same kind as {default!r}")
    return Site(**table)
