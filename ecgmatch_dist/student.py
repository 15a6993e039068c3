"""The trained network: one training forward a step, through DDP, and a look in eval mode for the bank's queries."""

from contextlib import nullcontext
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from ecgmatch_dist.distributed import data_parallel
from ecgmatch_dist.model import Output

Mode = Literal["eval", "dropout", "batch"]


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
        # Buffers need a broadcast only with local BatchNorm: statistics over all ranks are equal already.
        forward = data_parallel(model, sync_buffers=batchnorm == "local")
        self.forward = torch.compile(forward) if compile_ else forward

    def __call__(self, *views: HasKeys) -> list[Output]:
        sizes = [len(view.x) for view in views]
        with autocast(self.device, self.precision):
            z, logits = self.forward(torch.cat([v.x for v in views]), torch.cat([v.keys for v in views]))
        dtype = views[0].x.dtype
        pairs = zip(z.to(dtype).split(sizes), logits.to(dtype).split(sizes), strict=True)
        return [Output(z_part, logits_part) for z_part, logits_part in pairs]

    @torch.no_grad()
    def look(self, x: Tensor, keys: Tensor | None = None, mode: Mode = "eval") -> Output:
        """Features and logits without gradient: in eval mode; with dropout, as UPS asks; or with the batch's own BatchNorm
        statistics, which are not recorded, as MixMatch asks."""
        norms = [m for m in self.model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        momenta = [norm.momentum for norm in norms]
        self.model.train(mode == "batch")
        self.model.training = mode != "eval"  # the network itself applies the dropout, its parts are BatchNorm
        for norm in norms:
            norm.momentum = 0.0
        try:
            with autocast(self.device, self.precision):
                z, logits = self.model(x, keys)
        finally:
            self.model.train()
            for norm, momentum in zip(norms, momenta, strict=True):
                norm.momentum = momentum
        return Output(z.to(x.dtype), logits.to(x.dtype))
