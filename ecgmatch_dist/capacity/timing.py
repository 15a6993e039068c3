"""How long a step of ECGMatch takes on a cluster: an estimate, which names the part that binds.

The device computes at 60 % of the data sheet's rates. Meanwhile the host launches the operations of the step, one after the
other, however small the batch is: what takes longer, binds. Symbols as in `cost.py`.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from ecgmatch_dist.capacity.cost import GPU, Cluster, Collective, collectives
from ecgmatch_dist.network.backbones.base import LEADS

EFFICIENCY = 0.6  # of the data sheet's rates
OPERATIONS = 760  # that a step on several GPUs launches; tests/test_launches.py counts them
LAUNCH = 7e-6  # seconds of the host for each; 5 to 10 microseconds are usual
LATENCY = 20e-6, 40e-6  # seconds of the smallest collective inside a node and between nodes
# Rows of a block in which 63 % of the queries need a second look.
CROWDED = 7e5


def times(c: Cluster, shard_group: int) -> dict[str, float]:
    """Seconds of a step's parts. Exchange and search overlap with the training forward, the host with the device."""
    network, gpu = c.network, c.gpu
    views = c.labelled + 2 * c.batch
    rate = 1e12 * EFFICIENCY * (gpu.bf16 or gpu.fp32)
    bandwidth = 1e9 * EFFICIENCY * gpu.bandwidth
    # Each pass writes and reads a layer's values about three times. In a small network this takes longer than the products.
    traffic = 3 * views * network.saved / bandwidth
    forward = max(views * network.forward / rate, traffic)
    backward = max(views * network.backward / rate, 2 * traffic)
    no_grad = max(2 * c.batch * network.forward / rate, 2 * 3 * c.batch * network.saved / bandwidth)
    # The kernel of a view reads the signals once and writes them once.
    making = 2 * 4 * views * LEADS * c.length / bandwidth
    # The search is in fp32: the products, then one write and one read of the scores.
    products = 2 * c.batch * c.bank * c.width / (1e12 * EFFICIENCY * gpu.fp32)
    search = products + 2 * 4 * c.batch * c.bank / bandwidth
    crowded = 1 - math.exp(-c.bank / shard_group / CROWDED)
    again = search * crowded if crowded <= 0.5 else 0.0  # where most queries need it, the search begins with it
    moved = {x.name: _seconds(x, gpu) for x in collectives(c, shard_group)}
    exchange = sum(seconds for name, seconds in moved.items() if name.startswith("bank/"))
    others = sum(moved.values()) - exchange
    small = 2 * len(network.norms) + 2  # collectives that are waited for, one after the other
    waiting = 0.0 if c.gpus == 1 else small * LATENCY[c.gpus > c.gpus_per_node]
    hidden = exchange + search + again
    device = making + no_grad + max(forward, hidden) + backward + others + waiting
    launches = OPERATIONS * LAUNCH
    return {
        "views": making,
        "forward without gradient": no_grad,
        "training forward": forward,
        "backward": backward,
        "exchange": exchange,
        "search": search,
        "second look": again,
        "gradients, batchnorm": others,
        f"latency of {small} collectives": waiting,
        "launches": launches,
        "step": max(device, launches),
    }


def binding(c: Cluster, shard_group: int) -> str:
    """The part that a faster step would have to shorten first."""
    t = times(c, shard_group)
    if t["launches"] >= t["step"]:
        return "launches"
    hidden = t["exchange"] + t["search"] + t["second look"]
    compute = t["forward without gradient"] + t["training forward"] + t["backward"]
    waiting = sum(seconds for name, seconds in t.items() if name.startswith("latency"))
    parts = {
        "computing": compute,  # not the network between GPUs
        "views": t["views"],
        "search": hidden if hidden > t["training forward"] else 0.0,
        "collectives": t["gradients, batchnorm"] + waiting,
    }
    return max(parts, key=parts.__getitem__)


@dataclass(frozen=True)
class Scale:
    """A step on so many GPUs."""

    gpus: int
    batch: int
    """Unlabelled recordings per GPU."""
    seconds: float
    rate: float
    """Unlabelled recordings per second, over all GPUs."""
    binds: str


def scaling(c: Cluster, *, grows: bool) -> Iterator[Scale]:
    """The step on 1, 2, 4, ... GPUs: with the global batch of `c`, or, if it `grows`, with its batch per GPU."""
    gpus = 1
    while gpus <= 8 * c.gpus:
        batch = c.batch if grows else c.batch * c.gpus // gpus
        if batch and (grows or batch * gpus == c.batch * c.gpus):
            here = replace(c, gpus=gpus, batch=batch)
            group = min(gpus, c.gpus_per_node)
            seconds = times(here, group)["step"]
            yield Scale(gpus, batch, seconds, batch * gpus / seconds, binding(here, group))
        gpus *= 2


def enough(c: Cluster) -> int:
    """The number of GPUs from which twice as many make the step of the same global batch less than a fifth shorter."""
    steps = list(scaling(c, grows=False))
    for one, twice in pairwise(steps):
        if twice.seconds > 0.8 * one.seconds:
            return one.gpus
    return steps[-1].gpus if steps else c.gpus


def _seconds(x: Collective, gpu: GPU) -> float:
    return x.inside / (1e9 * EFFICIENCY * gpu.inside) + x.between / (1e9 * EFFICIENCY * gpu.between)
