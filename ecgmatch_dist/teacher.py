"""The teacher: a moving average of the student (equation 5), always in evaluation mode."""

import copy

import torch
from torch import Tensor, nn

from ecgmatch_dist.model import Output
from ecgmatch_dist.student import autocast


class Teacher:
    """M_t. Starts as a copy of the student; after each step its weights become m teacher + (1 - m) student."""

    def __init__(self, student: nn.Module, momentum: float, precision: str = "fp32") -> None:
        self.module = copy.deepcopy(student).eval().requires_grad_(False)
        self.momentum, self.precision = momentum, precision
        self._parameters = tuple(self.module.parameters())
        self._buffers = tuple(self.module.buffers())

    @torch.no_grad()
    def update(self, student: nn.Module) -> None:
        """Follow the student, in two fused operations; BatchNorm's statistics are copied, as the official code does."""
        torch._foreach_lerp_(self._parameters, tuple(student.parameters()), 1 - self.momentum)
        torch._foreach_copy_(self._buffers, tuple(student.buffers()))

    @torch.no_grad()
    def look(self, x: Tensor) -> Output:
        """Features and logits of x [b, 12, T], in the precision of x."""
        with autocast(x.device, self.precision):
            z, logits = self.module(x)
        return Output(z.to(x.dtype), logits.to(x.dtype))

    def state_dict(self) -> dict[str, Tensor]:
        return self.module.state_dict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.module.load_state_dict(state)
