"""The trained network: one training forward per step through DDP, and forward passes without gradient."""

import inspect
from contextlib import nullcontext
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ecgmatch_dist.distributed.collectives import world
from ecgmatch_dist.distributed.devices import has_bf16
from ecgmatch_dist.errors import require
from ecgmatch_dist.network.backbones.base import Output
from ecgmatch_dist.network.crops import over_crops

Mode = Literal["eval", "dropout", "batch"]


class HasKeys(Protocol):
    """An augmented batch with the keys of its dropout (`methods.views.View`)."""

    @property
    def x(self) -> Tensor: ...
    @property
    def keys(self) -> Tensor: ...


def resolve_precision(setting: str, device: torch.device) -> str:
    """`runtime.precision` with auto resolved: bf16 on GPUs that have it themselves, else fp32."""
    if setting == "auto":
        return "bf16" if has_bf16(device) else "fp32"
    native = setting != "bf16" or device.type != "cuda" or has_bf16(device)
    require(
        native,
        "runtime.precision",
        setting,
        "this GPU has no bf16 of its own (Ampere and newer do); choose fp32 or auto",
    )
    return setting


def autocast(device: torch.device, precision: str) -> Any:
    """For "bf16", a context with bf16 matrix products and convolutions; otherwise one that changes nothing."""
    return torch.autocast(device.type, torch.bfloat16) if precision == "bf16" else nullcontext()


def data_parallel(model: nn.Module, sync_buffers: bool = False) -> nn.Module:
    """The model under DDP, which averages gradients over ranks; with one rank, the model itself.

    `sync_buffers` copies rank 0's BatchNorm statistics to all ranks at each forward.
    """
    if world() == 1:
        return model
    renamed = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters  # since torch 2.13
    switch: dict[str, Any] = {"forward_sync_buffers" if renamed else "broadcast_buffers": sync_buffers}
    return DistributedDataParallel(model, gradient_as_bucket_view=True, **switch)


class Student:
    """M_s. Calling it is the one training forward of a step, over all given views at once."""

    def __init__(
        self, model: nn.Module, precision: str, batchnorm: str = "global", compile_: bool = False, crop: int = 0
    ) -> None:
        self.model, self.precision, self.crop = model, precision, crop
        self.device = next(model.parameters()).device
        # Global BatchNorm keeps the statistics of all ranks equal without a broadcast.
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
    def infer(self, x: Tensor, keys: Tensor | None = None, mode: Mode = "eval") -> Output:
        """Features and logits without gradient; of signals longer than `crop`, their mean over crops.

        "eval": eval mode. "dropout": eval mode with dropout (UPS). "batch": training mode, without updating the running
        statistics of BatchNorm (MixMatch).
        """
        norms = [m for m in self.model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        momenta = [norm.momentum for norm in norms]
        self.model.train(mode == "batch")
        self.model.training = mode != "eval"  # only the dropout in Backbone.drop reads it
        for norm in norms:
            norm.momentum = 0.0  # running statistics stay as they are
        try:
            with autocast(self.device, self.precision):
                z, logits = over_crops(self.model, x, self.crop, keys)
        finally:
            self.model.train()
            for norm, momentum in zip(norms, momenta, strict=True):
                norm.momentum = momentum
        return Output(z.to(x.dtype), logits.to(x.dtype))
