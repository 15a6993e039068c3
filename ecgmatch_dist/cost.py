"""What a step of ECGMatch costs on a cluster: memory, bytes, time; the shard group to take, and what will not work.

Legend: W ranks (GPUs), G of them a node, L a shard group, R = W/L copies, b unlabelled and b/7 labelled recordings a GPU, N
rows, D features, C classes, K neighbours. Bytes and memory of the bank, the parameters and the gradients are exact, and so
are the bytes that each collective moves, tested against the code at 64 and 1,024 ranks. Activations and operations are
counted on the network itself. Times divide by 60 % of the data sheet's rates: an estimate, as are the temporaries' bytes.
"""

from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from ecgmatch_dist import config
from ecgmatch_dist.bank import step_bytes
from ecgmatch_dist.model import BLOCKS, LEADS, build_model
from ecgmatch_dist.search import CHUNK, MARGIN, QUERIES

EFFICIENCY = 0.6  # of the data sheet's rates
USABLE = 0.9  # of a GPU's memory: the rest is CUDA's, NCCL's and the allocator's
NORMS = 2 * BLOCKS + 1  # BatchNorm layers


@dataclass(frozen=True)
class GPU:
    """From the data sheet: GiB, TFLOP/s (dense), GB/s of memory, and a GPU's GB/s in one direction in and between nodes."""

    memory: float
    bf16: float
    fp32: float
    bandwidth: float
    inside: float
    between: float


GPUS = {
    "h100": GPU(80, 989, 67, 3350, 450, 50),
    "a100": GPU(80, 312, 19.5, 2039, 300, 25),
    "l40s": GPU(48, 362, 91.6, 864, 32, 12.5),
    "v100": GPU(32, 0, 15.7, 900, 150, 12.5),  # no bf16
}


@dataclass(frozen=True)
class Cluster:
    """What is planned for."""

    gpus: int
    gpus_per_node: int
    bank: int
    batch: int
    width: int
    length: int
    classes: int
    neighbours: int
    gpu: GPU

    @property
    def labelled(self) -> int:
        return -(-self.batch // 7)

    @property
    def row(self) -> int:
        """Bytes of a bank row on its way: id, features, predictions."""
        return 8 + 4 * self.width + 4 * self.classes

    @property
    def half(self) -> bool:
        return self.gpu.bf16 > 0


@dataclass(frozen=True)
class Network:
    """Of one recording through the network, but `parameters`."""

    parameters: int
    saved: int
    """Bytes that a training forward keeps for its backward."""
    forward: int
    backward: int
    """Operations."""


@cache
def measure(width: int, length: int, classes: int, half: bool) -> Network:
    """Run the network on `meta`, which computes shapes only, and count."""
    model = build_model(classes, config.Model(width=width), seed=0).to("meta")
    if half:
        model = model.to(torch.bfloat16)
    kept: dict[int, int] = {}

    def keep(t: Tensor) -> Tensor:
        kept[t.untyped_storage()._cdata] = t.untyped_storage().nbytes()
        alive.append(t)
        return t

    alive: list[Tensor] = list(model.parameters())
    own = {t.untyped_storage()._cdata for t in alive}
    x = torch.empty(2, LEADS, length, device="meta", dtype=next(model.parameters()).dtype)
    with FlopCounterMode(display=False) as forward, torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        loss = model(x, torch.zeros(2, dtype=torch.int64, device="meta")).logits.sum()
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    saved = sum(size for storage, size in kept.items() if storage not in own) // 2
    count = sum(p.numel() for p in model.parameters())
    return Network(count, saved, forward.get_total_flops() // 2, backward.get_total_flops() // 2)


@dataclass(frozen=True)
class Collective:
    """Of one step. Bytes that a rank receives from its own node and from others, on average over the ranks."""

    name: str
    group: int
    inside: int
    between: int

    @property
    def total(self) -> int:
        return self.inside + self.between


def neighbours_inside(ranks: range, gpus_per_node: int) -> int:
    """How many of a group's other ranks share the first one's node."""
    return sum(r // gpus_per_node == ranks[0] // gpus_per_node for r in ranks) - 1


def collectives(c: Cluster, shard_group: int) -> list[Collective]:
    """All collectives of a step of ECGMatch; the flags that ride behind it, 24 bytes, are left out."""
    W, L, G = c.gpus, shard_group, c.gpus_per_node
    bank = step_bytes(c.batch * W, c.width, c.classes, c.neighbours, W, L)
    groups = {"bank/rows": range(0, W, L), "bank/exchange": range(L), "bank/candidates": range(L)}
    out = []
    for name, ranks in groups.items():
        near = bank[name] * neighbours_inside(ranks, G) // max(1, len(ranks) - 1)
        out.append(Collective(name, len(ranks), near, bank[name] - near))

    def ring(name: str, sizes: list[int]) -> Collective:
        """A ring enters each node once: its ranks share what comes from outside."""
        total = sum(2 * (W - 1) * size // W for size in sizes)
        between = total // min(G, W) if W > G else 0
        return Collective(name, W, total - between, between)

    network = measure(c.width, c.length, c.classes, c.half)
    statistics = c.classes**2 + c.classes + 1
    out.append(ring("correlation", [8 * statistics] * 2))
    out.append(ring("batchnorm", [8 * (2 * c.width + 1)] * NORMS + [8 * 2 * c.width] * NORMS))
    out.append(ring("gradients", [4 * network.parameters]))
    return out


def memory(c: Cluster, shard_group: int) -> dict[str, int]:
    """Bytes on a GPU, by what they are for."""
    network = measure(c.width, c.length, c.classes, c.half)
    rows = -(-c.bank // shard_group)
    views = c.labelled + 2 * c.batch
    m = c.neighbours + MARGIN
    tiles = -(-rows // CHUNK)
    return {
        "bank": (rows + 1) * c.row,
        "search": 2 * QUERIES * CHUNK * 4 + 12 * m * (QUERIES * tiles + 2 * shard_group * c.batch),
        "exchange": 3 * c.gpus * c.batch * c.row + 2 * shard_group * c.batch * 4 * c.width,
        "activations": views * network.saved,
        "views": (6 * c.batch + 3 * c.labelled) * LEADS * c.length * 4,
        "parameters, teacher": 2 * 4 * network.parameters,
        "optimiser": 4 * network.parameters,
        "DDP buckets": 4 * network.parameters,
    }


def times(c: Cluster, shard_group: int) -> dict[str, float]:
    """Seconds of a step's parts. The exchange and the search run behind the training forward."""
    network, gpu = measure(c.width, c.length, c.classes, c.half), c.gpu
    views = c.labelled + 2 * c.batch
    rate = 1e12 * EFFICIENCY * (gpu.bf16 or gpu.fp32)
    bandwidth = 1e9 * EFFICIENCY * gpu.bandwidth
    # A layer's values are written and read about three times a pass: for so small a network that decides, not the products.
    traffic = 3 * views * network.saved / bandwidth
    forward = max(views * network.forward / rate, traffic)
    backward = max(views * network.backward / rate, 2 * traffic)
    looks = max(2 * c.batch * network.forward / rate, 2 * 3 * c.batch * network.saved / bandwidth)
    # The search is in fp32: the products, then the scores are written and read once.
    products = 2 * c.batch * c.bank * c.width / (1e12 * EFFICIENCY * gpu.fp32)
    search = products + 2 * 4 * c.batch * c.bank / bandwidth
    moved = {x.name: _seconds(x, gpu) for x in collectives(c, shard_group)}
    exchange = sum(seconds for name, seconds in moved.items() if name.startswith("bank/"))
    others = sum(moved.values()) - exchange
    step = looks + max(forward, exchange + search) + backward + others
    parts = {"looks": looks, "forward": forward, "backward": backward, "exchange": exchange, "search": search}
    return {**parts, "gradients, batchnorm": others, "step": step}


def _seconds(x: Collective, gpu: GPU) -> float:
    return x.inside / (1e9 * EFFICIENCY * gpu.inside) + x.between / (1e9 * EFFICIENCY * gpu.between)


def fits(c: Cluster, shard_group: int) -> bool:
    return sum(memory(c, shard_group).values()) <= USABLE * c.gpu.memory * 2**30


def shard_groups(c: Cluster) -> list[int]:
    """The sensible ones: powers of two up to a node, whole nodes in powers of two, all ranks."""
    W, G = c.gpus, min(c.gpus, c.gpus_per_node)
    wanted = {2**i for i in range(11) if 2**i <= G} | {G * 2**i for i in range(11) if G * 2**i <= W} | {1, G, W}
    return sorted(L for L in wanted if W % L == 0)


def recommend(c: Cluster) -> int:
    """The shard group with the shortest step that fits; a node's ranks where nothing does or several are as fast."""
    possible = [L for L in shard_groups(c) if fits(c, L)] or [c.gpus]
    best = min(times(c, L)["step"] for L in possible)
    near = [L for L in possible if times(c, L)["step"] <= 1.01 * best]
    return min(near, key=lambda L: (min(c.gpus_per_node, c.gpus) != L, memory(c, L)["bank"]))


def warnings(c: Cluster, L: int) -> list[str]:
    """What will not work or will be slow, each with the remedy."""
    out = []
    if c.gpus % min(c.gpus, c.gpus_per_node):
        out.append(
            f"{c.gpus} GPUs are not a multiple of {c.gpus_per_node} a node: shard groups would span nodes unevenly"
        )
    if c.batch * c.gpus > c.bank:
        most = max(1, c.bank // c.gpus)
        out.append(
            f"the global batch, {c.batch * c.gpus:,}, is larger than the bank, {c.bank:,}: the run would be refused; "
            f"--batch {most} or fewer GPUs"
        )
    need, have = sum(memory(c, L).values()), USABLE * c.gpu.memory * 2**30
    if need > have:
        fewer = next((b for b in (c.batch // 2**i for i in range(1, 10)) if b and fits(replace(c, batch=b), L)), None)
        larger = next((other for other in shard_groups(c) if other > L and fits(c, other)), None)
        remedy = f"--batch {fewer}" if fewer else f"bank.shard_group = {larger}" if larger else "a smaller bank"
        out.append(f"{need / 2**30:.0f} GiB do not fit into {have / 2**30:.0f} usable GiB of a GPU: {remedy}")
    t = times(c, L)
    if t["exchange"] + t["search"] > t["forward"]:
        slow = "search" if t["search"] > t["exchange"] else "exchange"
        remedy = (
            "a bank of a part of the rows, or bank.backend = 'faiss-ivf' (approximate, searches in the host's memory)"
            if slow == "search"
            else "bank.shard_group = 'node', or fewer GPUs with a larger batch each"
        )
        out.append(
            f"exchange and search, {1e3 * (t['exchange'] + t['search']):.0f} ms, do not hide behind the training forward, "
            f"{1e3 * t['forward']:.0f} ms; most of it is the {slow}: {remedy}"
        )
    if not c.half:
        out.append("this GPU has no bf16: runtime.precision = 'fp32'")
    return out
