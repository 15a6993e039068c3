"""`ecgmatch doctor`: before the first run on a machine or cluster. Alone, under torchrun, or under srun."""

import json as json_
import os
import socket
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich.markup import escape

from ecgmatch_dist.doctor.findings import Check, Finding, answered, careful, refused
from ecgmatch_dist.errors import UserError

if TYPE_CHECKING:
    from ecgmatch_dist.distributed.session import Ranks

FORMAT = 1  # of the JSON file
PATIENCE = 240.0  # seconds for a check: NCCL waits for ever if a communicator cannot be made or ranks differ
TIMEOUT = 15.0  # minutes of the process group: longer, or NCCL would end the process before the table is shown

Tell = Callable[[list[Finding]], None]


def examine(
    runs: Path, shards: str, device: Literal["auto", "cpu", "cuda"], rows: int, tell: Tell = lambda findings: None
) -> list[Finding]:
    """What was found; all ranks make the same checks in the same order. `tell` shows it, before the process group ends: NCCL
    would wait there for a collective that has failed."""
    from ecgmatch_dist.distributed.session import session
    from ecgmatch_dist.doctor import machine

    out = [machine.versions()]
    if not (out[0].state == "refused" and device != "cpu"):
        try:
            with session(device, timeout_minutes=TIMEOUT) as here:
                out = _checks(here, out, runs, shards, rows, tell)
                if here.world > 1 and any(finding.state == "refused" for finding in out):
                    _end()
                return out
        except UserError as error:
            what, _, remedy = str(error).partition(": ")
            out.append(refused("ranks", what, remedy))
    tell(out)
    return out


def _checks(here: "Ranks", out: list[Finding], runs: Path, shards: str, rows: int, tell: Tell) -> list[Finding]:
    from ecgmatch_dist.distributed.session import background_group
    from ecgmatch_dist.doctor import machine, ranks

    def give_up(finding: Finding) -> None:
        tell([*out, finding] if here.main else [finding])
        _end()

    def within_patience(what: str) -> AbstractContextManager[None]:
        # Rank 0 gives up first: when one rank ends, a launcher ends the others.
        return answered(what, PATIENCE * (1 if here.main else 2), give_up)

    def found(what: str, check: Check) -> list[Finding]:
        findings = careful(what, *check)
        if not here.main:
            tell(findings)  # at once: rank 0 may never hear of it
        return findings

    with within_patience("ranks"):
        group = background_group("doctor")
        places = ranks.places(here, group)
    hosts = [place.host for place in places]
    alone: dict[str, Check] = {
        "devices": (lambda: ranks.judge_places(places), ""),
        "generation": (lambda: machine.generation(here.device), "install a build of torch for this GPU"),
        "precision": (lambda: [machine.precision(here.device)], ""),
        "views": (lambda: machine.views(here.device), "uninstall triton: torch's operations take its place"),
        "Faiss": (lambda: [machine.faiss_build(here.device)], "reinstall Faiss"),
        "search": (lambda: [machine.search(here.device, rows)], "reinstall Faiss and torch"),
    }
    together: dict[str, Check] = {
        "network": (lambda: ranks.network(here, hosts), "NCCL_DEBUG=INFO names what NCCL or gloo cannot use"),
        "training": (lambda: [ranks.training(here)], "run `ecgmatch doctor` without a launcher first"),
        "shared files": (lambda: [ranks.shared_files(here, runs)], "choose a --runs that all nodes share"),
    }
    last: dict[str, Check] = {
        "files": (lambda: machine.file_system(runs), "choose another --runs"),
        "Slurm": (machine.slurm, "ask on a login node"),
        "shards": (lambda: [machine.shards_rate(shards)] if shards else [], "ecgmatch shards verify"),
    }

    for what, check in alone.items():
        with within_patience(what):
            out += found(what, check)
    with within_patience("ranks"):
        out = ranks.together(here, group, out)
    for what, check in together.items():
        if any(finding.state == "refused" for finding in out):
            break  # NCCL would hang or fail
        with within_patience(what):
            out = ranks.together(here, group, out + found(what, check))
    with within_patience("ranks"):
        for what, check in last.items() if here.main else ():
            out = out + found(what, check)
        out = ranks.together(here, group, out)
        if here.main:
            tell(out)
        return ranks.together(here, group, out)  # a rank that ended earlier would end rank 0 before its table is shown


def _end() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(1)


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
    if "RANK" not in os.environ and int(os.environ.get("SLURM_NTASKS", "1")) > 1 and "SLURM_PROCID" in os.environ:
        from ecgmatch_dist.launch.train_job import export_ranks

        export_ranks()
    findings = examine(runs, shards, device, rows, partial(show, json=json))
    if any(finding.state == "refused" for finding in findings):
        sys.exit(1)


def show(findings: list[Finding], json: Path | None) -> None:
    """The table and the file, by rank 0. Another rank says what is refused there."""
    from rich.console import Console
    from rich.table import Table

    rank = os.environ.get("RANK", "0")
    if rank != "0":
        for finding in findings:
            if finding.state == "refused":
                text = f"ecgmatch doctor: rank {rank} on {socket.gethostname()}: {finding.what}: {finding.found}"
                print(f"{text} ({finding.remedy})", file=sys.stderr, flush=True)
        return
    table = Table("check", "state", "found", "remedy")
    colours = {"ok": "green", "warning": "yellow", "refused": "red"}
    for finding in findings:
        cells = escape(finding.found), escape(finding.remedy)
        table.add_row(finding.what, f"[{colours[finding.state]}]{finding.state}[/]", *cells)
    Console().print(table)
    if json is not None:
        about = {"format": FORMAT, "version": version("ecgmatch-dist"), "host": socket.gethostname()}
        record = about | {"findings": [asdict(finding) for finding in findings]}
        json.write_text(json_.dumps(record, indent=1) + "\n")
