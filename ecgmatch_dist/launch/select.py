"""Which runs of a plan are neither finished nor at work."""

from collections.abc import Sequence
from pathlib import Path

from ecgmatch_dist.launch import slurm
from ecgmatch_dist.launch.expand import PlannedRun
from ecgmatch_dist.launch.submissions import finished, latest_submissions, slurm_jobs


def select_runs(planned: Sequence[PlannedRun], runs: Path) -> tuple[list[PlannedRun], dict[str, str]]:
    """The runs to submit: neither finished, nor pending or running, on Slurm or here. And the state of every planned run."""
    jobs = slurm_jobs(runs)
    alive = slurm.alive_among(jobs.values()) if slurm.available() else {}
    here = {name: latest.job for name, latest in latest_submissions(runs).items() if latest.is_running_here()}
    states, wanted = {}, []
    for run in planned:
        job = jobs.get(run.name)
        if finished(runs, run.name):
            states[run.name] = "finished"
        elif job in alive:
            held = alive[job].reason == slurm.HELD  # by the user: jobs of cut submissions have been released before
            state = f"held (scontrol release {job})" if held else alive[job].state.lower()
            states[run.name] = f"{state} as job {job}"
        elif run.name in here:
            states[run.name] = f"running here as process {here[run.name]}"
        else:
            states[run.name] = "again" if (runs / run.name).is_dir() else "new"
            wanted.append(run)
    return wanted, states
