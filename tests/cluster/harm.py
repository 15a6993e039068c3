"""Tools to disturb a run on the lab (freeze and kill ranks, nodes, daemons) and to check that its result is the same."""

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from ecgmatch_dist.launch import sweep
from tests.support.training import final_state

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = {
    "data.rate": 0,
    "data.length": 0,
    "model.width": 16,
    "model.heads": 2,
    "optim.steps": 60,
    "optim.labelled_batch": 8,
    "optim.unlabelled_batch": 16,
    "pretrain.steps": 6,
    "pretrain.labelled_batch": 8,
    "pretrain.unlabelled_batch": 16,
    "evaluate.every": 10,
    "evaluate.batch": 32,
    "runtime.device": "cpu",
    "runtime.log_every": 1,
    "runtime.save_every": 7,
    "runtime.readers": 1,
    "runtime.threads": 1,
}
SWEEP = """
about = "Four small runs."
split = "within-chapman@0.2.s{seed}"
[grid]
seed = [20, 21]
method = ["ecgmatch", "fixmatch"]
"""
SET = tuple(f"{key}={value}" for key, value in SETTINGS.items())


def wait_until(condition: Callable[[], object], what: str, limit: float = 240, every: float = 0.05) -> None:
    end = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < end, f"waited {limit} s for {what}"
        time.sleep(every)


class Lab:
    """The cluster started by slurm/lab/with-slurm."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def pid(self, name: str) -> int:
        return int((self.folder / "run" / f"{name}.pid").read_text())

    def kill(self, name: str) -> None:
        os.kill(self.pid(name), signal.SIGKILL)

    def repair(self) -> None:
        """Restart what has died, and wait until no old jobs are left on the nodes."""
        environment = {k: v for k, v in os.environ.items() if k != "SLURM_CONF"}
        subprocess.run([ROOT / "slurm/lab/up", self.folder], check=True, capture_output=True, env=environment)

    def ranks(self, job: str, restart: int = 0) -> dict[int, int]:
        """Rank -> process id, as seen by the host, of one start of a job."""
        found = {}
        for process in Path("/proc").iterdir():
            if not process.name.isdecimal():
                continue
            try:
                command = (process / "cmdline").read_bytes()
                text = (process / "environ").read_bytes().decode(errors="replace")
            except OSError:
                continue
            if b"submitit.core._submit" not in command or b"srun" in command.split(b"\0")[0]:
                continue
            values = dict(entry.split("=", 1) for entry in text.split("\0") if "=" in entry)
            array = f"{values.get('SLURM_ARRAY_JOB_ID')}_{values.get('SLURM_ARRAY_TASK_ID')}"
            started = int(values.get("SLURM_RESTART_COUNT", 0))
            if job in (array, values.get("SLURM_JOB_ID")) and started == restart and "SLURM_PROCID" in values:
                found[int(values["SLURM_PROCID"])] = int(process.name)
        return found

    def signal(self, pids: dict[int, int], number: signal.Signals) -> None:
        for pid in pids.values():
            with suppress(ProcessLookupError):
                os.kill(pid, number)


def waits_for(job: str) -> list[str]:
    """The jobs that this one waits for, by Slurm."""
    text = subprocess.run(["squeue", "-h", "-j", job, "-o", "%E"], check=True, capture_output=True, text=True).stdout
    return re.findall(r"afterany:(\w+)\(unfulfilled\)", text)


def wait_for_step(run: Path, step: int) -> None:
    def reached() -> bool:
        try:
            lines = (run / "metrics.jsonl").read_text().splitlines()
        except OSError:
            return False
        return any(json.loads(line)["step"] >= step for line in lines if line.endswith("}"))

    wait_until(reached, f"{run.name} at step {step}")


def steps_of(run: Path) -> list[int]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record["step"] for record in records if record["kind"] == "train"]


def assert_same_bits(a: Path, b: Path) -> None:
    one, two = final_state(a), final_state(b)
    assert one.keys() == two.keys()
    assert [name for name in one if not torch.equal(one[name], two[name])] == []
    results = [json.loads((run / "result.json").read_text()) for run in (a, b)]
    assert results[0]["test"] == results[1]["test"]
    assert steps_of(a) == steps_of(b)


def site(folder: Path, **changes: object) -> str:
    values: dict[str, object] = {
        "partition": "main",
        "nodes": 2,
        "ranks_per_node": 1,
        "minutes": 60,
        "warning_seconds": 20,
        "parallel": 4,
        "setup": ["export OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo"],
    } | changes
    path = folder / "site.toml"
    path.write_text("\n".join(f"{key} = {json.dumps(value)}" for key, value in values.items()))
    return str(path)


def submit(file: Path, tmp_path: Path, data: Path, runs: Path, set: tuple[str, ...] = SET, **changes: object) -> None:
    place = site(tmp_path, **changes)
    shards, splits = str(data / "shards"), data / "splits"
    sweep.main(str(file), site=place, shards=shards, splits=splits, runs=runs, set=set)
