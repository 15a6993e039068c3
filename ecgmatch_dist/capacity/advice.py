"""What follows from the costs of a step: the best shard group, and warnings with their remedies."""

from dataclasses import replace

from ecgmatch_dist.capacity.cost import USABLE, Cluster, fits_memory, memory, shard_groups
from ecgmatch_dist.capacity.timing import times


def recommend(c: Cluster) -> int:
    """The shard group with the shortest step among those that fit into memory (all ranks if none does). Among those within 1 %,
    a node's ranks, else the smallest bank."""
    possible = [L for L in shard_groups(c) if fits_memory(c, L)] or [c.gpus]
    best = min(times(c, L)["step"] for L in possible)
    near = [L for L in possible if times(c, L)["step"] <= 1.01 * best]
    return min(near, key=lambda L: (min(c.gpus_per_node, c.gpus) != L, memory(c, L)["bank"]))


def warnings(c: Cluster, L: int) -> list[str]:
    """What will fail or be slow, each with the remedy."""
    out = []
    if c.gpus % min(c.gpus, c.gpus_per_node):
        out.append(
            f"{c.gpus} GPUs are not a multiple of {c.gpus_per_node} per node: shard groups would span nodes unevenly"
        )
    if c.batch * c.gpus > c.bank:
        most = max(1, c.bank // c.gpus)
        out.append(
            f"the global batch, {c.batch * c.gpus:,}, is larger than the bank, {c.bank:,}: the run would be refused; "
            f"take --batch {most} or fewer GPUs"
        )
    need, have = sum(memory(c, L).values()), USABLE * c.gpu.memory * 2**30
    if need > have:
        fewer = next(
            (b for b in (c.batch // 2**i for i in range(1, 10)) if b and fits_memory(replace(c, batch=b), L)), None
        )
        larger = next((other for other in shard_groups(c) if other > L and fits_memory(c, other)), None)
        remedy = f"--batch {fewer}" if fewer else f"bank.shard_group = {larger}" if larger else "a smaller bank"
        out.append(f"{need / 2**30:.0f} GiB do not fit into the {have / 2**30:.0f} usable GiB of a GPU: take {remedy}")
    t = times(c, L)
    if t["exchange"] + t["search"] > t["training forward"]:
        slow = "search" if t["search"] > t["exchange"] else "exchange"
        remedy = (
            "a smaller bank, or bank.backend = 'faiss-ivf' (approximate)"
            if slow == "search"
            else "bank.shard_group = 'node', or fewer GPUs with a larger batch each"
        )
        out.append(
            f"exchange and search, {1e3 * (t['exchange'] + t['search']):.0f} ms, take longer than the training forward that "
            f"hides them, {1e3 * t['training forward']:.0f} ms; most of it is the {slow}: take {remedy}"
        )
    if not c.half:
        out.append("this GPU has no bf16: set runtime.precision = 'fp32'")
    return out
