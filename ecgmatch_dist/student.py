"""The trained network: one training forward a step, through DDP, and a look in eval mode for the bank's queries."""

from contextlib import nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ecgmatch_dist.model import Output


class HasKeys(Protocol):
    """An augmented batch with the keys of its dropout (`methods.base.View`)."""

    @property
    def x(self) -> Tensor: ...
    @property
    def keys(self) -> Tensor: ...


def autocast(device: torch.device, precision: str) -> Any:
    """bf16 matrix products and convolutions where asked for; everything else stays as it is."""
    return torch.autocast(device.type, torch.bfloat16) if precision == "bf16" else nullcontext()


class Student:
    """M_s. Calling it is the step's one training forward, over the concatenation of the given views."""

    def __init__(self, model: nn.Module, precision: str, batchnorm: str = "global", compile_: bool = False) -> None:
        self.model, self.precision = model, precision
        self.device = next(model.parameters()).device
        forward: nn.Module = model
        if dist.is_initialized() and dist.get_world_size() > 1:
            # Buffers need a broadcast only with local BatchNorm: statistics over all ranks are equal already.
            local = batchnorm == "local"
            forward = DistributedDataParallel(model, broadcast_buffers=local, gradient_as_bucket_view=True)
        self.forward = torch.compile(forward) if compile_ else forward

    def __call__(self, *views: HasKeys) -> list[Output]:
        sizes = [len(view.x) for view in views]
        with autocast(self.device, self.precision):
            z, logits = self.forward(torch.cat([v.x for v in views]), torch.cat([v.keys for v in views]))
        dtype = views[0].x.dtype
        pairs = zip(z.to(dtype).split(sizes), logits.to(dtype).split(sizes), strict=True)
        return [Output(z_part, logits_part) for z_part, logits_part in pairs]

    @torch.no_grad()
    def look(self, x: Tensor) -> Output:
        """Features and logits in eval mode, without gradient."""
        self.model.eval()
        with autocast(self.device, self.precision):
            z, logits = self.model(x)
        self.model.train()
        return Output(z.to(x.dtype), logits.to(x.dtype))
