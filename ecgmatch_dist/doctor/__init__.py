"""`ecgmatch doctor`: before the first run on a machine or cluster. Alone, under torchrun, or under srun."""

import json as json_
import os
import socket
import sys
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Literal

from ecgmatch_dist.doctor.findings import Finding, careful, refused
from ecgmatch_dist.errors import UserError

FORMAT = 1  # of the JSON file


def examine(runs: Path, shards: str, device: Literal["auto", "cpu", "cuda"], rows: int) -> tuple[bool, list[Finding]]:
    """Whether this is rank 0, and what was found. All ranks make the same checks in the same order."""
    from ecgmatch_dist.distributed.session import background_group, session
    from ecgmatch_dist.doctor import machine, ranks

    out = [machine.versions()]
    if out[0].state == "refused" and device != "cpu":
        return os.environ.get("RANK", "0") == "0", out
    try:
        with session(device, timeout_minutes=2.0) as here:
            group = background_group("doctor")
            places = ranks.places(here, group)
            out += ranks.judge_places(places)
            out += machine.generation(here.device)
            out.append(machine.precision(here.device))
            out += careful(
                "views", lambda: machine.views(here.device), "uninstall triton: torch's operations take its place"
            )
            out.append(machine.faiss_build(here.device))
            out += careful("search", lambda: [machine.search(here.device, rows)], "reinstall Faiss and torch")
            out = ranks.together(here, group, out)
            hosts = [place.host for place in places]
            checks = {
                "network": (lambda: ranks.network(here, hosts), "NCCL_DEBUG=INFO names what NCCL or gloo cannot use"),
                "training": (lambda: [ranks.training(here)], "run `ecgmatch doctor` without a launcher first"),
                "shared files": (lambda: [ranks.shared_files(here, runs)], "choose a --runs that all nodes share"),
            }
            for what, (check, remedy) in checks.items():
                if any(finding.state == "refused" for finding in out):
                    break  # NCCL would hang or fail
                out = ranks.together(here, group, out + careful(what, check, remedy))
            if here.main:
                out += machine.file_system(runs)
                out += machine.slurm()
                if shards:
                    out += careful("shards", lambda: [machine.shards_rate(shards)], "ecgmatch shards verify")
            return here.main, ranks.together(here, group, out)
    except UserError as error:
        what, _, remedy = str(error).partition(": ")
        return os.environ.get("RANK", "0") == "0", [*out, refused("ranks", what, remedy)]


def main(
    runs: Path = Path("runs"),
    shards: str = "",
    device: Literal["auto", "cpu", "cuda"] = "auto",
    rows: int = 66_000,
    json: Path | None = None,
) -> None:
    """Check this machine, or all ranks of a launcher, before the first run: two minutes.

    Args:
        runs: The folder of runs whose file system is checked.
        shards: A folder of shards whose reading rate is measured.
        device: auto, cpu or cuda.
        rows: Rows of the bank that is searched.
        json: Write the findings to this file, for a report of a problem.
    """
    from rich.console import Console
    from rich.table import Table

    if "RANK" not in os.environ and int(os.environ.get("SLURM_NTASKS", "1")) > 1 and "SLURM_PROCID" in os.environ:
        from ecgmatch_dist.launch.train_job import export_ranks

        export_ranks()
    first, findings = examine(runs, shards, device, rows)
    bad = any(finding.state == "refused" for finding in findings)
    if first:
        table = Table("check", "state", "found", "remedy")
        colours = {"ok": "green", "warning": "yellow", "refused": "red"}
        for finding in findings:
            table.add_row(finding.what, f"[{colours[finding.state]}]{finding.state}[/]", finding.found, finding.remedy)
        Console().print(table)
        if json is not None:
            about = {"format": FORMAT, "version": version("ecgmatch-dist"), "host": socket.gethostname()}
            record = about | {"findings": [asdict(finding) for finding in findings]}
            json.write_text(json_.dumps(record, indent=1) + "\n")
    if bad:
        sys.exit(1)
