"""The runs of a sweep on this machine: one after the other, or in this process."""

import time
from collections.abc import Sequence
from pathlib import Path

import submitit
from rich.console import Console

from ecgmatch_dist.config import from_json
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.launch.expand import PlannedRun
from ecgmatch_dist.launch.select import select_runs
from ecgmatch_dist.launch.site import Site
from ecgmatch_dist.launch.submissions import Submission, append_submissions, finished, sweep_folder
from ecgmatch_dist.launch.train_job import TrainJob
from ecgmatch_dist.record.metrics_file import read_latest
from ecgmatch_dist.record.result import read_result
from ecgmatch_dist.terminal.waiting import make_bar


def run_local(sweep: str, wanted: Sequence[PlannedRun], runs: Path, site: Site) -> None:
    """One run after the other on this machine, with the site's ranks per node each."""
    failed = []
    for number, run in enumerate(wanted, 1):
        still_wanted, states = select_runs([run], runs)  # another command may have started it meanwhile
        print(f"[{number}/{len(wanted)}] {run.name}" + ("" if still_wanted else f": {states[run.name]}"), flush=True)
        if not still_wanted:
            continue
        folder = (sweep_folder(runs, sweep) / "jobs" / f"{time.time_ns():x}").resolve()
        executor = submitit.LocalExecutor(folder)
        executor.update_parameters(
            timeout_min=60 * 24 * 30, tasks_per_node=site.ranks, gpus_per_node=site.gpus_per_node, setup=site.setup
        )
        job = executor.submit(TrainJob(run.name, run.config.to_json(), run.starts))
        submission = Submission(run=run.name, cluster="local", job=job.job_id, folder=str(folder), time=time.time())
        append_submissions(sweep_folder(runs, sweep), [submission])
        try:
            wait_for(job, run, runs)
        except KeyboardInterrupt:
            job.cancel()
            raise
        if finished(runs, run.name):
            result = read_result(runs / run.name / "result.json")
            print(f"    test MAP {result.test.map:.4f} after {result.seconds:.0f} s", flush=True)
        else:
            failed.append(run.name)
            print(f"    failed: {submission.last_error()}", flush=True)
    if failed:
        raise UserError(
            f"{len(failed)} of {len(wanted)} runs failed: `ecgmatch logs {failed[0]} --runs {runs}` shows why; "
            "the same command tries them again"
        )


def wait_for(job: submitit.Job[str], run: PlannedRun, runs: Path) -> None:
    """Wait for a run; on a terminal, with the steps that it has taken so far."""
    with make_bar(Console(stderr=True)) as bar:
        task = bar.add_task(run.name, total=run.steps or run.config.optim.steps)
        while not job.done():
            steps = [line.step for line in read_latest(runs / run.name)]
            bar.update(task, completed=max(steps, default=0))
            time.sleep(1)
    job.wait()


def run_debug(wanted: Sequence[PlannedRun]) -> None:
    """In this process, for a debugger."""
    from ecgmatch_dist.train import train

    for run in wanted:
        train(from_json(run.config.to_json()))
