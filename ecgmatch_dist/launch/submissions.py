"""The list of what was submitted: a line for each run and submission, in `submissions.jsonl` beside a sweep's plan."""

import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any


def folder_of(runs: Path, sweep: str) -> Path:
    """Where a sweep's plan, submissions and jobs' output lie."""
    return runs / "sweeps" / sweep


def write_records(folder: Path, records: Iterable[dict[str, Any]]) -> None:
    """All lines in one piece: a submission is on the list, or it is not."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "submissions.jsonl"
    cut = path.is_file() and path.read_bytes()[-1:] not in (b"", b"\n")  # by a full disk
    with path.open("a", encoding="utf-8") as file:
        file.write("\n" * cut + "".join(json.dumps(record) + "\n" for record in records))


def read_records(folder: Path) -> list[dict[str, Any]]:
    """Of one sweep, in the order of submission. A line that is cut tells nothing: its job is held, and taken up as lost."""
    path = folder / "submissions.jsonl"
    records = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        with suppress(ValueError):
            records.append(json.loads(line))
    return records


def all_records(runs: Path) -> list[dict[str, Any]]:
    """Of all sweeps into a folder of runs, the latest last."""
    records = [record for path in runs.glob("sweeps/*/submissions.jsonl") for record in read_records(path.parent)]
    return sorted(records, key=lambda record: float(record["time"]))


def latest(runs: Path) -> dict[str, dict[str, Any]]:
    """Name of a run -> the record of its latest submission, of whichever sweep."""
    return {record["run"]: record for record in all_records(runs)}


def jobs_of(runs: Path) -> dict[str, str]:
    """Name of a run -> its latest Slurm job, of whichever sweep submitted it."""
    return {record["run"]: record["job"] for record in all_records(runs) if record["cluster"] == "slurm"}


def finished(runs: Path, name: str) -> bool:
    return (runs / name / "result.json").is_file()


def at_work_here(record: dict[str, Any]) -> bool:
    """Whether a record is of a run on this machine that is at work. Its job is a process, whose number may come again for
    another one: it names the folder of its output."""
    if record["cluster"] != "local":
        return False
    try:
        return record["folder"].encode() in Path(f"/proc/{record['job']}/cmdline").read_bytes()
    except OSError:
        return False
