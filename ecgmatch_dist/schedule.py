"""Learning rates as pure functions of the step, the optimiser they drive, and its state as a checkpoint keeps it."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from ecgmatch_dist.config import Optim
from ecgmatch_dist.model import AttentionCNN


def learning_rate(optim: Optim, step: int) -> float:
    """The rate of step `step` (from 0): lr (1 + 10 i/E)^-0.75, where the paper prints the exponent with the other sign."""
    progress, rate = step / optim.steps, optim.lr
    if optim.schedule == "power":
        rate *= math.pow(1 + 10 * progress, -0.75)
    elif optim.schedule == "cosine":
        rate *= 0.5 * (1 + math.cos(math.pi * progress))
    return rate * min(1.0, (step + 1) / optim.warmup) if optim.warmup else rate


def build_optimizer(optim: Optim, model: AttentionCNN, fused: bool | None = None) -> torch.optim.Optimizer:
    """Two groups: encoder and attention learn `encoder_lr_scale` times as fast as the head. `fused` None: where it is known."""
    encoder, head = list(model.encoder_parameters()), list(model.head_parameters())
    groups = [{"params": encoder, "scale": optim.encoder_lr_scale}, {"params": head, "scale": 1.0}]
    fused = head[0].device.type in ("cpu", "cuda") if fused is None else fused
    if optim.optimizer == "sgd":
        return torch.optim.SGD(groups, optim.lr, optim.momentum, weight_decay=optim.weight_decay, fused=fused)
    return torch.optim.AdamW(groups, optim.lr, weight_decay=optim.weight_decay, fused=fused)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate * group["scale"]


def pack_optimizer(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimiser's state as named tensors: `<parameter number>.<name>`."""
    state = optimizer.state_dict()["state"]
    return {
        f"{number}.{name}": value
        for number, values in state.items()
        for name, value in values.items()
        if isinstance(value, Tensor)
    }


def unpack_optimizer(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Put back what `pack_optimizer` gave; learning rates follow from the step, so they are not part of it."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = optimizer.state_dict()
    state["state"] = {}
    for key, value in tensors.items():
        number, name = key.split(".", 1)
        like = parameters[int(number)]
        if value.shape == like.shape:
            # Fused optimisers walk through memory, and weights lie there as channels_last, which files do not keep.
            value = torch.empty_like(like, dtype=value.dtype).copy_(value)
        state["state"].setdefault(int(number), {})[name] = value
    optimizer.load_state_dict(state)
