"""`ecgmatch plan`: estimated memory, traffic and time of a step on a cluster, in tables and a plot."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from ecgmatch_dist.bank.memory import step_bytes
from ecgmatch_dist.capacity.advice import recommend, warnings
from ecgmatch_dist.capacity.cost import (
    GPUS,
    USABLE,
    Cluster,
    collectives,
    fits_memory,
    host_memory,
    memory,
    shard_groups,
)
from ecgmatch_dist.capacity.timing import binding, enough, scaling, times
from ecgmatch_dist.errors import UserError


def format_bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            break
        count /= 1000
    return f"{count:.3g} {unit}"


def show(c: Cluster, L: int) -> None:
    """Print the tables, the settings to use and the warnings."""
    console, t = Console(), times(c, L)
    where = f"{c.gpus:,} GPUs, {min(c.gpus, c.gpus_per_node)} per node"
    title = f"{where}; bank of {c.bank:,} rows; {c.batch} unlabelled recordings per GPU and step"
    network = c.network
    console.print(
        f"{c.backbone}: {network.parameters:,} parameters; a recording of {c.length:,} samples costs "
        f"{(network.forward + network.backward) / 1e9:.3g} GFLOP and {format_bytes(network.saved)} in training, "
        f"{network.forward / 1e9:.3g} GFLOP in prediction",
        highlight=False,
        soft_wrap=True,
    )
    table = Table(
        "shard group", "copies", "bank", "memory", "inside", "between", "step", title=title, title_justify="left"
    )
    for other in shard_groups(c):
        moved = collectives(c, other)
        inside, between = (format_bytes(sum(getattr(x, side) for x in moved)) for side in ("inside", "between"))
        total = format_bytes(sum(memory(c, other).values())) + ("" if fits_memory(c, other) else " TOO MUCH")
        name = f"{other:,}{' <-' if other == L else ''}"
        seconds = f"{1e3 * times(c, other)['step']:.0f} ms"
        row = name, f"{c.gpus // other:,}", format_bytes(memory(c, other)["bank"]), total, inside, between, seconds
        table.add_row(*row)
    console.print(table)
    table = Table("collective", "ranks", "inside the node", "between nodes", title="bytes received per GPU and step")
    for x in collectives(c, L):
        table.add_row(x.name, f"{x.group:,}", format_bytes(x.inside), format_bytes(x.between))
    console.print(table)
    table = Table("memory per GPU", "", "time per step (estimate)", "")
    parts = [
        [(name, format_bytes(count)) for name, count in memory(c, L).items()],
        [(n, f"{1e3 * s:.1f} ms") for n, s in t.items()],
    ]
    for i in range(max(map(len, parts))):
        table.add_row(*(word for part in parts for word in (part[i] if i < len(part) else ("", ""))))
    console.print(table)
    console.print(
        f"the step is bound by: {binding(c, L)}. With this global batch, more than {enough(c):,} GPUs hardly help.",
        highlight=False,
        soft_wrap=True,
    )
    host = host_memory(c)
    console.print(
        f"memory of a node beside its GPUs: {format_bytes(host.table)} for the table of recordings, which its ranks share, and "
        f"{format_bytes(host.rank)} for the rows and labels of each rank; split.json has {format_bytes(host.split)}",
        highlight=False,
        soft_wrap=True,
    )
    show_scaling(c, console)
    setting = {c.gpus: "world", min(c.gpus, c.gpus_per_node): "node"}.get(L, L)
    precision = "bf16" if c.half else "fp32"
    backend = "'faiss' (exact; knn_gpu or a resident index, timed at start)"
    lines = [
        f"bank.shard_group = {setting!r}, bank.backend = {backend}, runtime.precision = {precision!r} (the bank stays in fp32)",
        f"optim.unlabelled_batch = {c.batch * c.gpus}, optim.labelled_batch = {c.labelled * c.gpus} (settings are global)",
    ]
    for line in [*lines, *(f"WARNING: {text}" for text in warnings(c, L))]:
        console.print(line, highlight=False, soft_wrap=True)


def show_scaling(c: Cluster, console: Console) -> None:
    """The same global batch on more GPUs, and a batch that grows with them."""
    for grows in (False, True):
        title = f"B_u = {c.batch} per GPU" if grows else f"B_u = {c.batch * c.gpus:,} over all GPUs"
        table = Table(
            "GPUs", "per GPU", "step (estimate)", "recordings/s", "bound by", title=title, title_justify="left"
        )
        for x in scaling(c, grows=grows):
            table.add_row(f"{x.gpus:,}", f"{x.batch:,}", f"{1e3 * x.seconds:.1f} ms", f"{x.rate:,.0f}", x.binds)
        console.print(table)


def draw(c: Cluster, out: Path) -> None:
    """Plot traffic over the number of GPUs, and memory and search time over the size of the bank."""
    figure = Figure(figsize=(13, 4), layout="constrained")
    axes = figure.subplots(1, 3)
    worlds = [c.gpus_per_node * 2**i for i in range(12) if c.gpus_per_node * 2**i <= max(c.gpus, 1024)]

    def moved(W: int, L: int) -> int:
        return sum(step_bytes(c.batch * W, c.width, c.classes, c.neighbours, W, L).values())

    def network(W: int, L: int) -> int:
        return sum(x.between for x in collectives(replace(c, gpus=W), L) if x.name.startswith("bank/"))

    G = c.gpus_per_node
    ways: dict[str, Callable[[int], int]] = {
        "replicated, L = 1": lambda W: 1,
        f"by node, L = {G}": lambda W: G,
        "over all, L = W": lambda W: W,
    }
    banks = [10**i for i in range(4, 10)]
    for number, (name, group) in enumerate(ways.items()):
        axes[0].plot(worlds, [moved(W, group(W)) for W in worlds], f"C{number}o-", label=name)
        axes[0].plot(worlds, [network(W, group(W)) or math.nan for W in worlds], f"C{number}o:")
        bytes_ = [memory(replace(c, bank=N), group(c.gpus))["bank"] for N in banks]
        axes[1].plot(banks, bytes_, f"C{number}o-", label=name)
    gathered = [(W - 1) / W * c.bank * 4 * (c.width + c.classes) for W in worlds]
    axes[0].plot(worlds, gathered, "k--", label=f"gathering the bank, N = {c.bank:,}")
    axes[0].set(xlabel="GPUs", ylabel="bytes received per GPU and step\n(dotted: from other nodes)", ylim=(1e4, None))
    axes[1].axhline(USABLE * c.gpu.memory * 2**30, color="k", ls="--", label="usable memory per GPU")
    axes[1].set(xlabel="rows of the bank", ylabel="bytes of the bank per GPU")
    searches = [times(replace(c, bank=N), 1) for N in banks]
    axes[2].plot(banks, [1e3 * t["search"] for t in searches], "C3o-", label="search")
    axes[2].axhline(1e3 * searches[0]["training forward"], color="k", ls="--", label="training forward that hides it")
    axes[2].set(xlabel="rows of the bank", ylabel="milliseconds (estimate)")
    for axis in axes:
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.legend(fontsize=7)
        axis.grid(alpha=0.3)
    figure.savefig(out)


def main(
    gpus: int,
    bank: float = 1e6,
    gpus_per_node: int = 8,
    batch: int = 448,
    width: int = 128,
    length: int = 6144,
    classes: int = 5,
    neighbours: int = 5,
    gpu: Literal["h100", "a100", "l40s", "v100"] = "h100",
    backbone: str = "attention_cnn",
    first_width: int = 0,
    depth: int = 5,
    shard_group: int | None = None,
    out: Path | None = None,
) -> None:
    """Estimate memory, traffic and time of a step of ECGMatch on a cluster, and recommend settings.

    Args:
        gpus: All GPUs of the run.
        bank: Rows of the bank: unlabelled recordings, for instance 100e6.
        gpus_per_node: GPUs per node.
        batch: Unlabelled recordings per GPU and step; there are a seventh as many labelled ones.
        width: Features D.
        length: Samples per lead.
        classes: Number of classes C.
        neighbours: Neighbours K.
        gpu: Type of GPU.
        backbone: The network, as model.backbone.
        first_width: Channels of its first block, as model.first_width.
        depth: Residual blocks, as model.depth.
        shard_group: Ranks that share a copy of the bank; default: the recommended number.
        out: File for the plot, .svg or .png.
    """
    numbers = {"gpus": gpus, "bank": bank, "gpus-per-node": gpus_per_node, "batch": batch, "length": length}
    numbers |= {"classes": classes, "neighbours": neighbours}
    for name, value in numbers.items():
        if value < 1 or value != int(value):
            raise UserError(f"--{name} {value}: give a whole number, at least 1")
    if out is not None and out.suffix not in (".svg", ".png"):
        raise UserError(f"--out {out}: give a name that ends in .svg or .png")
    c = Cluster(
        gpus,
        gpus_per_node,
        int(bank),
        batch,
        width,
        length,
        classes,
        neighbours,
        GPUS[gpu],
        backbone,
        first_width,
        depth,
    )
    if shard_group is not None and (shard_group < 1 or gpus % shard_group):
        raise UserError(f"--shard-group {shard_group}: must divide the {gpus} GPUs, for instance {shard_groups(c)}")
    show(c, shard_group or recommend(c))
    if out is not None:
        draw(c, out)
        print(f"plot: {out}")
