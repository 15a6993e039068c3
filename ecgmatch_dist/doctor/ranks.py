"""Checks that all ranks do together: which GPU each has, the network, shared files, and one rank against all of them."""

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ecgmatch_dist.augment import ECGAugment
from ecgmatch_dist.config import Bank, Config, Model, Optim, Runtime
from ecgmatch_dist.distributed.collectives import Group, all_sum_nograd, all_to_all, barrier
from ecgmatch_dist.distributed.session import Ranks, gpu_of
from ecgmatch_dist.doctor.findings import Finding, ok, refused, warning
from ecgmatch_dist.learner import build_learner
from ecgmatch_dist.methods.ecgmatch import ECGMatchSettings
from ecgmatch_dist.methods.views import Views
from ecgmatch_dist.train import train_step

SLOW = {"inside": 4.0, "between": 2.0}  # GB/s: half of PCIe 3, a network of 25 Gbit/s
BOUND = 1e-9  # relative difference of fp64 weights after the small training
BATCH, STEPS, LENGTH, CLASSES = 64, 3, 128, 5
ALONE = 200.0  # seconds for the training in one process, with its start
LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Place(NamedTuple):
    """Where a rank computes."""

    rank: int
    host: str
    address: str
    device: str
    gpu: str
    """Identity of the GPU; empty on a CPU."""


def place(ranks: Ranks) -> Place:
    host, gpu, name = socket.gethostname(), gpu_of(ranks.device), "cpu"
    if gpu:
        name = f"{ranks.device} {torch.cuda.get_device_name(ranks.device)}"
    try:
        address = socket.gethostbyname(host)
    except OSError:
        address = ""
    return Place(ranks.rank, host, address, name, gpu)


def places(ranks: Ranks, group: Group) -> list[Place]:
    """Of all ranks. `group`: of gloo, which works where NCCL does not."""
    found: list[Any] = [place(ranks)] * ranks.world
    if ranks.world > 1:
        dist.all_gather_object(found, found[ranks.rank], group=group)
    return [Place(*one) for one in found]


def together(ranks: Ranks, group: Group, findings: list[Finding]) -> list[Finding]:
    """The findings of rank 0, and what is not ok on the others: the same on all ranks."""
    lists: list[Any] = [findings] * ranks.world
    if ranks.world > 1:
        dist.all_gather_object(lists, findings, group=group)
    known = {(finding.what, finding.state) for finding in lists[0]}
    for rank, others in enumerate(lists):
        for finding in others:
            if finding.state != "ok" and (finding.what, finding.state) not in known:
                known.add((finding.what, finding.state))
                lists[0].append(replace(finding, found=f"rank {rank}: {finding.found}"))
    return list(lists[0])


def each(found: list[Place], most: int = 16) -> str:
    """The GPU of each rank, as far as there is room."""
    shown = [f"rank {one.rank} {one.host} {one.device.split()[0]}" for one in found if one.gpu][:most]
    more = f", and {len(found) - most} more ranks" if len(found) > most else ""
    return f": {', '.join(shown)}{more}" if shown else ""


def judge_places(found: list[Place]) -> list[Finding]:
    """One GPU per rank, the same kind everywhere; addresses that other nodes can reach."""
    hosts = Counter(one.host for one in found)
    out = []
    shared = [gpu for gpu, count in Counter((p.host, p.gpu) for p in found if p.gpu).items() if count > 1]
    kinds = sorted({one.device.split(" ", 1)[-1] for one in found})
    if shared:
        ranks = [one.rank for one in found if (one.host, one.gpu) == shared[0]]
        remedy = "start at most one rank per GPU, and let LOCAL_RANK or the launcher choose it"
        out.append(refused("devices", f"ranks {ranks} share one GPU on {shared[0][0]}", remedy))
    elif len(kinds) > 1:
        out.append(
            warning("devices", f"different kinds: {', '.join(kinds)}", "the slowest sets the pace: ask for one kind")
        )
    else:
        out.append(
            ok("devices", f"{len(found)} x {kinds[0]} on {len(hosts)} node{'s' * (len(hosts) > 1)}{each(found)}")
        )
    loop = sorted({one.host for one in found if one.address.startswith("127.") or not one.address})
    if len(hosts) > 1 and loop and not os.environ.get("GLOO_SOCKET_IFNAME"):
        remedy = "set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the interface between the nodes (`ip -br address`)"
        out.append(refused("interface", f"{', '.join(loop)}: the name resolves to this machine only", remedy))
    return out


def network(ranks: Ranks, hosts: list[str], mebibytes: int = 16, turns: int = 3) -> list[Finding]:
    """Bandwidth of the two collectives that matter: over all ranks, and inside a node where there are several."""
    if ranks.world == 1:
        return [ok("network", "one rank: nothing to measure")]
    groups: dict[str, Any] = {"all ranks": None}
    if len(set(hosts)) > 1:
        for host in sorted(set(hosts)):  # every rank makes every group
            members = [rank for rank, name in enumerate(hosts) if name == host]
            group = dist.new_group(members)
            if ranks.rank in members and len(members) > 1:
                groups["one node"] = group
    out = []
    for name, group in groups.items():
        count = dist.get_world_size(group)
        t = torch.ones(mebibytes * 2**18 // count * count, device=ranks.device)
        for what, call in (("all-reduce", all_sum_nograd), ("all-to-all", all_to_all)):
            seconds = []
            for _ in range(turns + 1):
                barrier()
                begin = time.perf_counter()
                call(t, group).sum().item()
                seconds.append(time.perf_counter() - begin)
            moved = t.nbytes * (count - 1) / count * (2 if what == "all-reduce" else 1)
            inside = name == "one node" or len(set(hosts)) == 1
            out.append(judge_rate(what, name, moved / min(seconds[1:]) / 1e9, inside, ranks.device))
    return out


def judge_rate(what: str, name: str, rate: float, inside: bool, device: torch.device) -> Finding:
    """`rate` GB/s received per rank, `inside` one node or between several. There is no bound for CPUs."""
    found, bound = f"{name}: {rate:.2f} GB/s received per rank", SLOW["inside" if inside else "between"]
    if device.type == "cpu" or rate >= bound:
        return ok(what, found)
    remedy = (
        "`nvidia-smi topo -m` and NCCL_DEBUG=INFO: no NVLink or peer access? In containers: --ipc=host"
        if inside
        else "NCCL_DEBUG=INFO: does NCCL use sockets instead of InfiniBand? See NCCL_SOCKET_IFNAME, NCCL_IB_HCA"
    )
    return warning(what, f"{found}, less than the {bound:g} of slow links", remedy)


def shared_files(ranks: Ranks, runs: Path, patience: float = 70.0) -> Finding:
    """How long the other ranks wait until they see a file of rank 0: NFS hides it for up to a minute."""
    path = runs / ".doctor-shared"
    if ranks.main:
        runs.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
    barrier()
    path.exists()  # as a run does: a missing file that was looked for stays missing in NFS's cache
    barrier()
    if ranks.main:
        path.write_text("seen")
    barrier()
    begin = time.perf_counter()
    while not path.exists() and time.perf_counter() - begin < patience:
        time.sleep(0.05)
    seen = path.exists()
    waited = torch.tensor([time.perf_counter() - begin, float(not seen)], dtype=torch.float64)
    blind = all_sum_nograd(waited)[1].item()
    if ranks.main:
        path.unlink(missing_ok=True)
    if blind:
        remedy = "choose a --runs that all nodes share"
        return refused("shared files", f"{blind:.0f} ranks do not see a file of rank 0 in {runs}", remedy)
    return ok("shared files", f"all ranks see a file of rank 0 (this one after {waited[0].item():.1f} s)")


def small_training(ranks: Ranks, batch: int = BATCH) -> dict[str, Tensor]:
    """Three steps of ECGMatch in fp64 on fixed numbers: the weights, on the CPU. The same on any number of ranks that divides
    the batch."""
    g = torch.Generator().manual_seed(0)
    rows = 2 * batch
    x_b, x_u = (torch.randn(n, 12, LENGTH, generator=g, dtype=torch.float64) for n in (batch, rows))
    labels = (torch.rand(batch, CLASSES, generator=g) < 0.3).double().to(ranks.device)
    config = Config(
        method=ECGMatchSettings(neighbours=3),
        model=Model(width=16, heads=2),
        optim=Optim(labelled_batch=batch, unlabelled_batch=batch),
        bank=Bank(shard_group="world"),
        runtime=Runtime(precision="fp64"),
    )
    learner = build_learner(config, ranks, labels, rows, seed=1)

    def unlabelled() -> Any:
        ids = torch.arange(rows).chunk(ranks.world)[ranks.rank]
        yield ids.to(ranks.device), x_u[ids].to(ranks.device)

    for step in range(STEPS):
        ids_b = torch.arange(batch).chunk(ranks.world)[ranks.rank]
        ids_u = ((torch.arange(batch) * 7 + step) % rows).chunk(ranks.world)[ranks.rank]
        at = [t.to(ranks.device) for t in (x_b[ids_b], ids_b, x_u[ids_u], ids_u)]
        views = Views(at[0], labels[at[1]], at[1], at[2], at[3], ECGAugment(config.augment), 1, step)
        train_step(learner, views, 0.03, unlabelled)
    return {name: t.cpu() for name, t in learner.model.state_dict().items() if t.is_floating_point()}


def largest_difference(one: dict[str, Tensor], many: dict[str, Tensor]) -> float:
    """Relative to the largest value of each tensor; infinite where a value is not finite."""
    worst = 0.0
    for name, expected in one.items():
        difference = (many[name] - expected).abs().max() / expected.abs().max().clamp(min=1e-30)
        worst = max(worst, difference.item() if bool(difference.isfinite()) else float("inf"))
    return worst


def training(ranks: Ranks) -> Finding:
    """A small training on all ranks against the same one in a process of its own, on rank 0's device."""
    batch = -(-BATCH // ranks.world) * ranks.world
    many = small_training(ranks, batch)
    if not ranks.main:
        return ok("training", "")
    with tempfile.TemporaryDirectory(prefix="ecgmatch-doctor-") as folder:
        path = Path(folder) / "weights.pt"
        environment = {name: value for name, value in os.environ.items() if name not in LAUNCHED}
        command = [sys.executable, "-m", "ecgmatch_dist.doctor.alone", str(ranks.device), str(batch), str(path)]
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=ALONE, check=False)
        except subprocess.TimeoutExpired:
            return warning("training", f"one process takes more than {ALONE:.0f} s: not compared", "try again later")
        if done.returncode:
            return judge_alone(done.stderr)
        one = torch.load(path, weights_only=True)
    worst = largest_difference(one, many)
    found = f"{ranks.world} against one process: weights differ by {worst:.1e} after {STEPS} steps"
    if worst > BOUND:
        return refused("training", found, "do not trust runs on this machine; report it with --json")
    return ok("training", found)


def judge_alone(errors: str) -> Finding:
    """`errors`: what the training in one process wrote before it failed."""
    last = (errors.strip().splitlines() or ["?"])[-1]
    if "busy or unavailable" in errors:  # its GPU is this rank's, which may admit one process only
        remedy = "nothing to do, or `nvidia-smi -c 0` by an administrator: rank 0's GPU admits one process only"
        return warning("training", f"runs, but was not compared with one process: {last}", remedy)
    return refused("training", f"one process fails: {last}", "run `ecgmatch doctor` without a launcher first")
