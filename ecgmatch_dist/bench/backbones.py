"""Cost of each network: parameters, operations, and time per recording in training and prediction, beside the paper's."""

import json as json_
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from ecgmatch_dist.bench import turns
from ecgmatch_dist.capacity.cost import network_cost
from ecgmatch_dist.config import Model, backbones
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.network.backbones.base import LEADS, Backbone
from ecgmatch_dist.network.model import build_model

CLASSES = 5
PAPER = "attention_cnn"


@dataclass(frozen=True)
class Cost:
    """Cost of one network."""

    backbone: str
    parameters: int
    gflop: float
    """Operations of forward and backward per recording, in billions."""
    training: float
    """Milliseconds of forward and backward per recording."""
    prediction: float
    """Milliseconds of a forward without gradient per recording."""
    training_ratio: float
    """To the paper's network of the same width, median over the turns."""
    prediction_ratio: float


def main(
    width: int = 64,
    first_width: int = 0,
    depth: int = 5,
    length: int = 1024,
    batch: int = 64,
    repeats: int = 7,
    json: Path | None = None,
) -> None:
    """Each network of the registry beside the paper's one of the same width, on random signals.

    Args:
        width: Channels of the networks, as model.width.
        first_width: As model.first_width; not for the paper's network.
        depth: Residual blocks of each, as model.depth.
        length: Samples per signal.
        batch: Recordings that go through a network at once.
        repeats: Turns per network; the median counts.
        json: Write the numbers to this file.
    """
    if min(batch - 1, repeats, length) < 1:  # BatchNorm needs two recordings
        raise UserError(f"--batch {batch} --repeats {repeats} --length {length}: at least 2, 1 and 1")
    settings = {
        name: Model(
            width,
            heads=8 if width % 8 == 0 else 1,
            backbone=name,
            depth=depth,
            first_width=first_width if name != PAPER else 0,
        )
        for name in backbones()
    }
    networks = {name: build_model(CLASSES, model, seed=0) for name, model in settings.items()}
    x, keys = torch.randn(batch, LEADS, length), torch.arange(batch)
    train = turns({name: partial(training_pass, network, x, keys) for name, network in networks.items()}, repeats)
    for network in networks.values():
        network.eval()
    predict = turns({name: partial(prediction, network, x) for name, network in networks.items()}, repeats)
    costs = []
    for name, model in settings.items():
        count = network_cost(model, length, CLASSES, half=False)
        own = [1e3 * median(seconds[name]) / batch for seconds in (train, predict)]
        ratios = [
            median(mine / paper for mine, paper in zip(seconds[name], seconds[PAPER], strict=True))
            for seconds in (train, predict)
        ]
        costs.append(Cost(name, count.parameters, (count.forward + count.backward) / 1e9, *own, *ratios))
    show(costs, f"networks of width {width}, {length:,} samples, {torch.get_num_threads()} threads, per recording")
    if json is not None:
        json.write_text(json_.dumps([asdict(cost) for cost in costs], indent=1) + "\n")


def training_pass(network: Backbone, x: Tensor, keys: Tensor) -> None:
    """Forward and backward."""
    network.zero_grad(set_to_none=True)
    network(x, keys).logits.sum().backward()


@torch.no_grad()
def prediction(network: Callable[[Tensor], object], x: Tensor) -> None:
    network(x)


def show(costs: list[Cost], title: str) -> None:
    table = Table("network", title=title, title_justify="left")
    for column in ("parameters", "GFLOP", "training", "prediction"):
        table.add_column(column, justify="right")
    for cost in costs:
        training = f"{cost.training:.2f} ms ({cost.training_ratio:.2f})"
        prediction = f"{cost.prediction:.2f} ms ({cost.prediction_ratio:.2f})"
        table.add_row(cost.backbone, f"{cost.parameters:,}", f"{cost.gflop:.3g}", training, prediction)
    console = Console()
    console.print(table)
    console.print(
        f"In brackets: as a multiple of {PAPER}'s time. Operations are of forward and backward.", highlight=False
    )
