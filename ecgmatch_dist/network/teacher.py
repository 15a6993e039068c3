"""The teacher: a moving average of the student (equation 5), always in eval mode."""

import copy
from typing import Literal

import torch
from torch import Tensor, nn

from ecgmatch_dist.network.backbones.base import Output
from ecgmatch_dist.network.crops import over_crops
from ecgmatch_dist.network.student import autocast


class Teacher:
    """M_t. Starts as a copy of the student; after each step its weights become m teacher + (1 - m) student."""

    def __init__(
        self,
        student: nn.Module,
        momentum: float,
        precision: str = "fp32",
        *,
        warmup: bool = False,
        batchnorm: Literal["copied", "averaged"] = "copied",
        crop: int = 0,
    ) -> None:
        self.module = copy.deepcopy(student).eval().requires_grad_(False)
        self.momentum, self.precision, self.warmup, self.batchnorm = momentum, precision, warmup, batchnorm
        self.crop = crop
        self._averaged, self._copied = self._parts(self.module)

    @torch.no_grad()
    def update(self, student: nn.Module, step: int) -> None:
        """Average with the student after this step, counted from 0, in two fused operations."""
        momentum = min(self.momentum, (1 + step) / (10 + step)) if self.warmup else self.momentum
        averaged, copied = self._parts(student)
        torch._foreach_lerp_(self._averaged, averaged, 1 - momentum)
        if copied:  # none, if the network has no BatchNorm
            torch._foreach_copy_(self._copied, copied)

    def _parts(self, module: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
        """The tensors that are averaged and those that are copied. BatchNorm's integer counters are always copied."""
        averaged: list[Tensor] = list(module.parameters())
        copied: list[Tensor] = []
        for buffer in module.buffers():
            average = self.batchnorm == "averaged" and buffer.is_floating_point()
            (averaged if average else copied).append(buffer)
        return averaged, copied

    @torch.no_grad()
    def infer(self, x: Tensor) -> Output:
        """Features and logits of x [b, 12, T] without gradient, in the precision of x. Of signals longer than `crop`, the mean
        over crops."""
        with autocast(x.device, self.precision):
            z, logits = over_crops(self.module, x, self.crop)
        return Output(z.to(x.dtype), logits.to(x.dtype))

    def state_dict(self) -> dict[str, Tensor]:
        return self.module.state_dict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.module.load_state_dict(state)
