"""Cost of a step of each method, relative to FixMatch and to FixMatch with as many forward passes.

A row is one ECG that passes through the network. With gradient it is differentiated; without, it is only inferred."""

import json as json_
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from ecgmatch_dist.augment import ECGAugment
from ecgmatch_dist.bench import interleave, turns
from ecgmatch_dist.config import Config, MethodSettings, methods
from ecgmatch_dist.distributed.collectives import rank, world
from ecgmatch_dist.distributed.session import session
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.learner import build_learner
from ecgmatch_dist.methods.fixmatch import FixMatchSettings
from ecgmatch_dist.methods.msdnn import MSDNN, MSDNNSettings
from ecgmatch_dist.methods.percentmatch import PercentMatchSettings
from ecgmatch_dist.methods.ups import UPSSettings
from ecgmatch_dist.methods.views import View, Views
from ecgmatch_dist.presets import cpu
from ecgmatch_dist.train import train_step

CLASSES = 5
LIMIT = 1.15
"""The most that a step may cost, relative to FixMatch with as many forward passes."""


@dataclass(frozen=True)
class Cost:
    """Cost of one step."""

    method: str
    milliseconds: float
    rows: int
    """Rows with gradient."""
    no_grad_rows: int
    """Rows without gradient, through student or teacher."""
    ratio: float
    """To FixMatch's step, median over the turns."""
    normalised: float
    """The ratio divided by the ratio of the forward passes. A row without gradient counts as its measured share of one with."""


def lines(steps: int) -> list[tuple[str, MethodSettings, int]]:
    """Name, method and step of each line: all methods with their defaults, then variants whose steps differ."""
    out: list[tuple[str, MethodSettings, int]] = [(n, m(), 1) for n, m in methods().items() if n != "fixmatch"]
    out += [("msdnn after its contrast", MSDNNSettings(), steps - 1), ("ups online", UPSSettings(mode="online"), 1)]
    return [*out, ("percentmatch, new thresholds", PercentMatchSettings(refresh=1), 1)]


class Steps:
    """The training step of one method, on this rank's share of a global batch of random signals in memory."""

    def __init__(self, config: Config, length: int, unlabelled: int, first: int = 1) -> None:
        self.config, self.unlabelled, self.number = config, unlabelled, first
        self.generator = torch.Generator().manual_seed(rank())
        sizes = config.optim.labelled_batch, config.optim.unlabelled_batch
        self.x_b, self.x_u = (torch.randn(n // world(), 12, length, generator=self.generator) for n in sizes)
        self.labels = (torch.rand(1000, CLASSES, generator=torch.Generator().manual_seed(0)) < 0.3).float()
        with session("cpu") as ranks:
            self.learner = build_learner(config, ranks, self.labels, unlabelled, seed=1)
        if isinstance(self.learner.method, MSDNN):  # full, as in the middle of a run
            self.learner.method.queue = torch.randn(self.learner.method.settings.queue, config.model.width)
        self.augment = ECGAugment(config.augment)

    def views(self) -> Views:
        ids_b = torch.randint(len(self.labels), (len(self.x_b),), generator=self.generator)
        ids_u = torch.randint(self.unlabelled, (len(self.x_u),), generator=self.generator)
        x_u, ids_u = (self.x_u, ids_u) if self.config.method.uses_unlabelled else (self.x_u[:0], ids_u[:0])
        return Views(self.x_b, self.labels[ids_b], ids_b, x_u, ids_u, self.augment, 1, self.number)

    def step(self) -> None:
        train_step(self.learner, self.views(), self.config.optim.lr, self.whole_pass)
        self.number += 1

    def whole_pass(self) -> Iterator[tuple[Tensor, Tensor]]:
        raise AssertionError("only steps are timed, not passes over the whole unlabelled part")

    @contextmanager
    def counted(self) -> Iterator[dict[bool, int]]:
        """Counts the rows through student and teacher, by whether they have a gradient."""
        rows = {True: 0, False: 0}

        def count(module: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
            rows[torch.is_grad_enabled()] += len(arguments[0])

        networks = self.learner.model, self.learner.teacher.module
        hooks = [network.register_forward_pre_hook(count) for network in networks]
        yield rows
        for hook in hooks:
            hook.remove()


def no_grad_share(steps: Steps, repeats: int) -> float:
    """Cost of a row without gradient, relative to one with gradient, at the number of rows of FixMatch's step."""
    views, learner = steps.views(), steps.learner
    parts = views.labelled, views.weak, views.strong
    batch = View(torch.cat([part.x for part in parts]), torch.cat([part.keys for part in parts]))

    def with_gradient() -> None:
        learner.optimizer.zero_grad(set_to_none=True)
        learner.student(batch)[0].logits.sum().backward()  # type: ignore[no-untyped-call]

    seconds = interleave({"without": partial(learner.teacher.infer, batch.x), "with": with_gradient}, repeats)
    return seconds["without"] / seconds["with"]


def measure(name: str, steps: Steps, fixmatch: Steps, share: float, repeats: int) -> Cost:
    """Steps of the two alternate; the median of the ratios per turn counts."""
    passes = []
    for each in (steps, fixmatch):
        with each.counted() as rows:
            each.step()
        passes.append(rows[True] + share * rows[False])
        if each is steps:
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
    """A step of every method against one of FixMatch: views, forward passes, bank, losses, backward, optimiser, teacher.

    Passes over the whole unlabelled part are not included: one per run of ECGMatch and PercentMatch, ten per round of UPS.

    Args:
        unlabelled: Unlabelled recordings, which is rows of the bank.
        length: Samples per signal.
        width: Channels of the network.
        labelled_batch: Labelled batch B.
        unlabelled_batch: Unlabelled batch B_u.
        repeats: Turns per method; the median counts.
        json: Write the numbers to this file.
    """
    if repeats < 1 or unlabelled < unlabelled_batch:
        raise UserError(f"--repeats {repeats} --unlabelled {unlabelled}: at least 1; at least {unlabelled_batch}")
    base = cpu()
    optim = replace(base.optim, labelled_batch=labelled_batch, unlabelled_batch=unlabelled_batch)
    base = replace(base, optim=optim, model=replace(base.model, width=width))
    fixmatch = Steps(replace(base, method=FixMatchSettings()), length, unlabelled)
    share = no_grad_share(fixmatch, repeats)
    costs = [measure("fixmatch, against itself", fixmatch, fixmatch, share, repeats)]
    for name, method, first in lines(optim.steps):
        steps = Steps(replace(base, method=method), length, unlabelled, first)
        costs.append(measure(name, steps, fixmatch, share, repeats))
    table = Table("method", title=f"a step, {torch.get_num_threads()} threads, medians of {repeats} turns")
    for column in ("ms", "rows with gradient", "without", "ratio to FixMatch", "per forward pass"):
        table.add_column(column, justify="right")
    for cost in costs:
        numbers = f"{cost.milliseconds:.0f}", str(cost.rows), str(cost.no_grad_rows), f"{cost.ratio:.2f}"
        table.add_row(cost.method, *numbers, f"{cost.normalised:.2f}")
    console = Console()
    console.print(table)
    console.print(f"A row without gradient costs {share:.2f} of one with gradient.", highlight=False)
    above = [cost.method for cost in costs if cost.normalised > LIMIT]
    console.print(f"Above {LIMIT} per forward pass: {', '.join(above) or 'none'}", highlight=False)
    if json is not None:
        report = {"cost of a row without gradient": share, "costs": [asdict(cost) for cost in costs]}
        json.write_text(json_.dumps(report, indent=1) + "\n")
