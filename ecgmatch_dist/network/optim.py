"""The learning rate as a pure function of the step, the optimiser, and the optimiser's state for checkpoints."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from ecgmatch_dist.config import Optim
from ecgmatch_dist.network.backbones.base import Backbone


def learning_rate(optim: Optim, step: int, steps: int) -> float:
    """The learning rate of `step` of `steps`, counted from 0. The paper prints the exponent -0.75 of `power` with the other
    sign."""
    progress, rate = step / steps, optim.lr
    if optim.schedule == "power":
        rate *= math.pow(1 + 10 * progress, -0.75)
    elif optim.schedule == "cosine":
        rate *= 0.5 * (1 + math.cos(math.pi * progress))
    return rate * min(1.0, (step + 1) / optim.warmup) if optim.warmup else rate


def build_optimizer(optim: Optim, model: Backbone, fused: bool | None = None) -> torch.optim.Optimizer:
    """Two groups: encoder and attention with lr * `encoder_lr_scale`, the head with lr. `fused` None: if supported."""
    encoder, head = list(model.encoder_parameters()), list(model.head_parameters())
    groups = [{"params": encoder, "scale": optim.encoder_lr_scale}, {"params": head, "scale": 1.0}]
    fused = head[0].device.type in ("cpu", "cuda") if fused is None else fused
    if optim.optimizer == "sgd":
        return torch.optim.SGD(groups, optim.lr, optim.momentum, weight_decay=optim.weight_decay, fused=fused)
    return torch.optim.AdamW(groups, optim.lr, weight_decay=optim.weight_decay, fused=fused)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate * group["scale"]


def gradient_norm(model: torch.nn.Module) -> Tensor:
    """The norm of all gradients as one vector, on the device."""
    return torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])


def step_if_finite(optimizer: torch.optim.Optimizer, norm: Tensor) -> None:
    """`optimizer.step()`, which changes nothing where the gradient's norm is not finite. The device decides: the host does not
    wait. It is what torch's GradScaler does. Only fused optimisers can; the others are for devices without numbers (`meta`)."""
    if optimizer.defaults["fused"]:
        optimizer.found_inf = norm.isfinite().logical_not().float()  # type: ignore[attr-defined]
    optimizer.step()


def pack_optimizer(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimiser's state as tensors named `<parameter number>.<name>`."""
    state = optimizer.state_dict()["state"]
    return {
        f"{number}.{name}": value
        for number, values in state.items()
        for name, value in values.items()
        if isinstance(value, Tensor)
    }


def unpack_optimizer(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Load the tensors of `pack_optimizer`. Learning rates are not among them: they follow from the step."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = optimizer.state_dict()
    state["state"] = {}
    for key, value in tensors.items():
        number, name = key.split(".", 1)
        like = parameters[int(number)]
        if value.shape == like.shape:
            # Fused optimisers need state and weights in the same memory layout. Files do not keep channels_last.
            value = torch.empty_like(like, dtype=value.dtype).copy_(value)
        state["state"].setdefault(int(number), {})[name] = value
    optimizer.load_state_dict(state)
