"""What a step of ECGMatch costs on a cluster: memory and bytes. `timing.py` has the time, `advice.py` what follows from it.

Symbols: W ranks (one per GPU), G GPUs per node, L ranks per shard group, R = W/L copies of the bank, b unlabelled and b/7
labelled recordings per GPU, N rows of the bank, D features, C classes, K neighbours.

Exact: memory of bank, parameters and gradients; bytes of each collective, tested against the code at 64 and 1,024 ranks.
Counted on the network: activations and operations. Estimated: temporaries.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ecgmatch_dist import config
from ecgmatch_dist.bank.memory import step_bytes
from ecgmatch_dist.bank.search import CHUNK, MARGINS, QUERIES
from ecgmatch_dist.network.backbones.base import LEADS
from ecgmatch_dist.network.model import build_model

TABLE_ROW = 90  # bytes of manifest.safetensors per recording, with names and patients of ten letters
USABLE = 0.9  # of a GPU's memory: CUDA, NCCL and the allocator need the rest


@dataclass(frozen=True)
class GPU:
    """Numbers of a data sheet."""

    memory: float
    """GiB."""
    bf16: float
    """TFLOP/s, dense; 0: none."""
    fp32: float
    """TFLOP/s."""
    bandwidth: float
    """GB/s of its memory."""
    inside: float
    """GB/s per GPU and direction inside a node."""
    between: float
    """GB/s per GPU and direction between nodes."""


GPUS = {
    "h100": GPU(80, 989, 67, 3350, 450, 50),
    "a100": GPU(80, 312, 19.5, 2039, 300, 25),
    "l40s": GPU(48, 362, 91.6, 864, 32, 12.5),
    "v100": GPU(32, 0, 15.7, 900, 150, 12.5),  # no bf16
}


@dataclass(frozen=True)
class Cluster:
    """A cluster and the run that it is planned for."""

    gpus: int
    gpus_per_node: int
    bank: int
    """Rows, which is unlabelled recordings."""
    batch: int
    """Unlabelled recordings per GPU and step."""
    width: int
    length: int
    classes: int
    neighbours: int
    gpu: GPU
    backbone: str = "attention_cnn"
    first_width: int = 0
    depth: int = 5

    @property
    def network(self) -> "NetworkCost":
        """The network, counted."""
        heads = 8 if self.width % 8 == 0 else 1
        model = config.Model(self.width, heads, backbone=self.backbone, first_width=self.first_width, depth=self.depth)
        return network_cost(model, self.length, self.classes, self.half)

    @property
    def labelled(self) -> int:
        return -(-self.batch // 7)

    @property
    def row(self) -> int:
        """Bytes of a bank row that is sent: id, features, predictions."""
        return 8 + 4 * self.width + 4 * self.classes

    @property
    def half(self) -> bool:
        return self.gpu.bf16 > 0


@dataclass(frozen=True)
class HostMemory:
    """Bytes of a node's own memory that grow with the archive. `ecgmatch bench archive` measures them."""

    table: int
    """manifest.safetensors, mapped once for all ranks of the node."""
    rank: int
    """Of each rank: the rows of the unlabelled part, which of them have been verified, and their labels."""
    split: int
    """The letters of split.json."""


def host_memory(c: Cluster) -> HostMemory:
    return HostMemory(TABLE_ROW * c.bank, (8 + 1 + 2 * c.classes) * c.bank, c.bank)


@dataclass(frozen=True)
class NetworkCost:
    """Size of the network, and its cost per recording."""

    parameters: int
    saved: int
    """Bytes that a training forward keeps for its backward."""
    forward: int
    """Operations."""
    backward: int
    """Operations."""
    norms: tuple[int, ...]
    """Channels of each BatchNorm layer."""


@cache
def network_cost(settings: config.Model, length: int, classes: int, half: bool) -> NetworkCost:
    """Counted by running the network on the device `meta`, which computes only shapes."""
    model = build_model(classes, settings, seed=0).to("meta")
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
    norms = tuple(m.num_features for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm))
    return NetworkCost(count, saved, forward.get_total_flops() // 2, backward.get_total_flops() // 2, norms)


@dataclass(frozen=True)
class Collective:
    """What one collective moves in a step, in bytes that each rank receives on average."""

    name: str
    group: int
    """Ranks that take part."""
    inside: int
    """From ranks of the same node."""
    between: int
    """From other nodes."""

    @property
    def total(self) -> int:
        return self.inside + self.between


def peers_inside(ranks: range, gpus_per_node: int) -> int:
    """How many of the other ranks of a group are on the node of its first one."""
    return sum(r // gpus_per_node == ranks[0] // gpus_per_node for r in ranks) - 1


def collectives(c: Cluster, shard_group: int) -> list[Collective]:
    """All collectives of a step of ECGMatch, without the 24 bytes of the stop flags."""
    W, L, G = c.gpus, shard_group, c.gpus_per_node
    bank = step_bytes(c.batch * W, c.width, c.classes, c.neighbours, W, L)
    groups = {"bank/rows": range(0, W, L), "bank/exchange": range(L), "bank/candidates": range(L)}
    out = []
    for name, ranks in groups.items():
        near = bank[name] * peers_inside(ranks, G) // max(1, len(ranks) - 1)
        out.append(Collective(name, len(ranks), near, bank[name] - near))

    def ring(name: str, sizes: list[int]) -> Collective:
        """An all-reduce in a ring. The ring enters each node once, so the node's ranks share the bytes from other nodes."""
        total = sum(2 * (W - 1) * size // W for size in sizes)
        between = total // min(G, W) if W > G else 0
        return Collective(name, W, total - between, between)

    network = c.network
    statistics = c.classes**2 + c.classes + 1
    out.append(ring("correlation", [8 * statistics] * 2))
    # On GPUs: mean, deviation and count of every rank are gathered in the forward, two sums are reduced in the backward.
    backward = ring("batchnorm", [4 * 2 * n for n in network.norms])
    each = sum(4 * (2 * n + 1) for n in network.norms)
    near = min(G, W) - 1
    out.append(Collective("batchnorm", W, backward.inside + near * each, backward.between + (W - 1 - near) * each))
    out.append(ring("gradients", [4 * network.parameters]))
    return out


def memory(c: Cluster, shard_group: int) -> dict[str, int]:
    """Bytes per GPU, by purpose."""
    network = c.network
    rows = -(-c.bank // shard_group)
    views = c.labelled + 2 * c.batch
    m = c.neighbours + MARGINS[0]
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


def fits_memory(c: Cluster, shard_group: int) -> bool:
    return sum(memory(c, shard_group).values()) <= USABLE * c.gpu.memory * 2**30


def shard_groups(c: Cluster) -> list[int]:
    """Sensible sizes: powers of two up to a node, a power of two of nodes, all ranks."""
    W, G = c.gpus, min(c.gpus, c.gpus_per_node)
    wanted = {2**i for i in range(11) if 2**i <= G} | {G * 2**i for i in range(11) if G * 2**i <= W} | {1, G, W}
    return sorted(L for L in wanted if W % L == 0)
