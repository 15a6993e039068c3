"""What a step of each method costs beside a step of FixMatch, and beside one with as many forward passes."""

import json as json_
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, get_args

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from ecgmatch_dist.augment import ECGAugment
from ecgmatch_dist.bench import interleave, turns
from ecgmatch_dist.config import Config
from ecgmatch_dist.distributed import rank, session, world
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.learner import build_learner
from ecgmatch_dist.methods.base import View, Views
from ecgmatch_dist.methods.configs import MSDNN, UPS, FixMatch, MethodConfig, PercentMatch
from ecgmatch_dist.methods.msdnn import MSDNN as Contrast
from ecgmatch_dist.presets import cpu
from ecgmatch_dist.train import update

CLASSES = 5
BAR = 1.15
"""What a step of a method may cost, in steps of FixMatch with as many forward passes."""


@dataclass(frozen=True)
class Cost:
    """Of one step."""

    method: str
    milliseconds: float
    rows: int
    """ECGs through the network that are differentiated."""
    looks: int
    """ECGs through the network, the student's or the teacher's, that are not."""
    ratio: float
    """To FixMatch's step, median over the turns."""
    normalised: float
    """The ratio divided by that of the forward passes, a look counting as its measured share of a differentiated row."""


def lines(steps: int) -> list[tuple[str, MethodConfig, int]]:
    """Name, method and step of every line: all methods as they come, and what their steps may look like otherwise."""
    out: list[tuple[str, MethodConfig, int]] = [(m.name, m(), 1) for m in get_args(MethodConfig) if m is not FixMatch]
    out += [("msdnn after its contrast", MSDNN(), steps - 1), ("ups online", UPS(mode="online"), 1)]
    return [*out, ("percentmatch, new thresholds", PercentMatch(refresh=1), 1)]


class Steps:
    """Steps of one method on signals in memory, this rank's share of the global batch, as the loop does them."""

    def __init__(self, config: Config, length: int, unlabelled: int, first: int = 1) -> None:
        self.config, self.unlabelled, self.number = config, unlabelled, first
        self.generator = torch.Generator().manual_seed(rank())
        sizes = config.optim.labelled_batch, config.optim.unlabelled_batch
        self.x_b, self.x_u = (torch.randn(n // world(), 12, length, generator=self.generator) for n in sizes)
        self.labels = (torch.rand(1000, CLASSES, generator=torch.Generator().manual_seed(0)) < 0.3).float()
        with session("cpu") as ranks:
            self.learner = build_learner(config, ranks, self.labels, unlabelled, seed=1)
        if isinstance(self.learner.method, Contrast):  # as it is in the middle of a run
            self.learner.method.queue = torch.randn(self.learner.method.settings.queue, config.model.width)
        self.augment = ECGAugment(config.augment)

    def views(self) -> Views:
        ids_b = torch.randint(len(self.labels), (len(self.x_b),), generator=self.generator)
        ids_u = torch.randint(self.unlabelled, (len(self.x_u),), generator=self.generator)
        x_u, ids_u = (self.x_u, ids_u) if self.learner.method.uses_unlabelled else (self.x_u[:0], ids_u[:0])
        return Views(self.x_b, self.labels[ids_b], ids_b, x_u, ids_u, self.augment, 1, self.number)

    def step(self) -> None:
        update(self.learner, self.views(), self.config.optim.lr, self.whole_pass)
        self.number += 1

    def whole_pass(self) -> Iterator[tuple[Tensor, Tensor]]:
        raise AssertionError("only steps are timed, not the passes over the unlabelled part between them")

    @contextmanager
    def counted(self) -> Iterator[dict[bool, int]]:
        """Rows that pass through student and teacher, by whether they are differentiated."""
        rows = {True: 0, False: 0}

        def count(module: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
            rows[torch.is_grad_enabled()] += len(arguments[0])

        networks = self.learner.model, self.learner.teacher.module
        hooks = [network.register_forward_pre_hook(count) for network in networks]
        yield rows
        for hook in hooks:
            hook.remove()


def share_of_a_look(steps: Steps, repeats: int) -> float:
    """What a row costs that is not differentiated, as a share of one that is; as many of both as FixMatch's step has."""
    views, learner = steps.views(), steps.learner
    parts = views.labelled, views.weak, views.strong
    both = View(torch.cat([part.x for part in parts]), torch.cat([part.keys for part in parts]))

    def differentiated() -> None:
        learner.optimizer.zero_grad(set_to_none=True)
        learner.student(both)[0].logits.sum().backward()  # type: ignore[no-untyped-call]

    seconds = interleave({"look": partial(learner.teacher.look, both.x), "row": differentiated}, repeats)
    return seconds["look"] / seconds["row"]


def measure(name: str, steps: Steps, fixmatch: Steps, share: float, repeats: int) -> Cost:
    """Steps of the two take turns; the median of the turns' ratios counts."""
    passes = []
    for one in (steps, fixmatch):
        with one.counted() as rows:
            one.step()
        passes.append(rows[True] + share * rows[False])
        if one is steps:
            counts = rows[True], rows[False]
    seconds = turns({"own": steps.step, "fixmatch": fixmatch.step}, repeats)
    ratio = median(own / other for own, other in zip(seconds["own"], seconds["fixmatch"], strict=True))
    return Cost(name, 1e3 * median(seconds["own"]), *counts, ratio, ratio * passes[1] / passes[0])


def main(
    unlabelled: int = 66_000,
    length: int = 1024,
    width: int = 64,
    labelled_batch: int = 64,
    unlabelled_batch: int = 128,
    repeats: int = 7,
    json: Path | None = None,
) -> None:
    """A step of every method beside one of FixMatch: views, forward passes, bank, losses, backward, optimiser, teacher.

    The passes over the whole unlabelled part are not in it: one a run of ECGMatch and PercentMatch, ten a round of UPS.

    Args:
        unlabelled: Rows of the bank and of the methods' tables.
        length: Samples of a signal.
        width: Channels of the network.
        labelled_batch: B.
        unlabelled_batch: B_u.
        repeats: Turns of each method; the median counts.
        json: File for the numbers.
    """
    if repeats < 1 or unlabelled < unlabelled_batch:
        raise UserError(f"--repeats {repeats} --unlabelled {unlabelled}: at least 1; at least {unlabelled_batch}")
    base = cpu()
    optim = replace(base.optim, labelled_batch=labelled_batch, unlabelled_batch=unlabelled_batch)
    base = replace(base, optim=optim, model=replace(base.model, width=width))
    fixmatch = Steps(replace(base, method=FixMatch()), length, unlabelled)
    share = share_of_a_look(fixmatch, repeats)
    costs = [measure("fixmatch, against itself", fixmatch, fixmatch, share, repeats)]
    for name, method, first in lines(optim.steps):
        steps = Steps(replace(base, method=method), length, unlabelled, first)
        costs.append(measure(name, steps, fixmatch, share, repeats))
    table = Table("method", title=f"a step, {torch.get_num_threads()} threads, medians of {repeats} turns")
    for column in ("ms", "rows differentiated", "rows looked at", "ratio to FixMatch", "a forward pass"):
        table.add_column(column, justify="right")
    for cost in costs:
        numbers = f"{cost.milliseconds:.0f}", str(cost.rows), str(cost.looks), f"{cost.ratio:.2f}"
        table.add_row(cost.method, *numbers, f"{cost.normalised:.2f}")
    console = Console()
    console.print(table)
    console.print(f"A row that is looked at costs {share:.2f} of one that is differentiated.", highlight=False)
    above = [cost.method for cost in costs if cost.normalised > BAR]
    console.print(f"Above {BAR} a forward pass: {', '.join(above) or 'none'}", highlight=False)
    if json is not None:
        numbers_ = {"share of a look": share, "costs": [asdict(cost) for cost in costs]}
        json.write_text(json_.dumps(numbers_, indent=1) + "\n")
