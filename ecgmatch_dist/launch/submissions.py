"""submissions.jsonl: one line per run and submission, in the sweep's folder."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from ecgmatch_dist.files.jsonl import read_lines, to_line
from ecgmatch_dist.files.strict import convert


@dataclass(frozen=True, kw_only=True)
class Submission:
    """One run, submitted once."""

    run: str
    starts: dict[str, str] = field(default_factory=dict)
    """The unfinished runs that it starts from, with their Slurm jobs."""
    cluster: Literal["slurm", "local"]
    job: str
    """Slurm's job id; for a local run, the process id of its launcher."""
    folder: str
    """Where the output of its job lies."""
    time: float
    """Seconds since 1970."""

    def is_running_here(self) -> bool:
        """Whether this is a local run whose process is alive. Process ids are reused, but the process of a run has the
        folder of its output on its command line."""
        if self.cluster != "local":
            return False
        try:
            return self.folder.encode() in Path(f"/proc/{self.job}/cmdline").read_bytes()
        except OSError:
            return False

    def output_files(self) -> list[Path]:
        """Standard output and standard error of each rank."""
        return sorted(Path(self.folder).glob(f"{self.job}_*_log.*"))

    def last_error(self) -> str:
        """The last line of rank 0's standard error that explains something. Its progress lines are there, too, and do not."""
        path = Path(self.folder) / f"{self.job}_0_log.err"
        if not path.is_file():
            return ""
        lines = [line.strip() for line in path.read_text(encoding="utf-8", errors="replace").splitlines()]
        noise = ("srun:", "slurmstepd:", "*", "submitit", "Traceback", "File ", f"{self.run}: ")
        return next((line for line in reversed(lines) if line and not line.startswith(noise)), "")


def sweep_folder(runs: Path, sweep: str) -> Path:
    """Where a sweep's plan, its submissions and the output of its jobs lie."""
    return runs / "sweeps" / sweep


def append_submissions(folder: Path, submissions: Iterable[Submission]) -> None:
    """Append all lines in one write, so that a kill leaves all or none of them."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "submissions.jsonl"
    cut = path.is_file() and path.read_bytes()[-1:] not in (b"", b"\n")  # the disk was full
    with path.open("a", encoding="utf-8") as file:
        file.write("\n" * cut + "".join(to_line(asdict(submission)) for submission in submissions))


def read_submissions(folder: Path) -> list[Submission]:
    """The submissions of one sweep, the latest last. A cut line is skipped: its job is still held, and the next submission
    cancels it."""
    path = folder / "submissions.jsonl"
    return [convert(record, Submission, str(path)) for record in read_lines(path)]


def all_submissions(runs: Path) -> list[Submission]:
    """The submissions of all sweeps into a folder of runs, the latest last."""
    found = [each for path in runs.glob("sweeps/*/submissions.jsonl") for each in read_submissions(path.parent)]
    return sorted(found, key=lambda submission: submission.time)


def latest_submissions(runs: Path) -> dict[str, Submission]:
    """Run -> its latest submission, by any sweep."""
    return {submission.run: submission for submission in all_submissions(runs)}


def slurm_jobs(runs: Path) -> dict[str, str]:
    """Run -> its latest Slurm job, submitted by any sweep."""
    return {submission.run: submission.job for submission in all_submissions(runs) if submission.cluster == "slurm"}


def finished(runs: Path, name: str) -> bool:
    return (runs / name / "result.json").is_file()
