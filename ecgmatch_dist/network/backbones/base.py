"""What all backbones share: one forward that gives features and logits, two groups of parameters, keyed dropout.

The rest of the package does not know which backbone it works with. A new one is one file here, whose class is registered under
the file's name: `class ResNet1d(Backbone, name="resnet1d")`. Initial weights are torch's defaults. Memory layout: channels_last
for weights and signals, the fastest one on CPUs and GPUs (`use_channels_last`, `as_image`).
"""

from collections.abc import Callable, Iterator
from itertools import chain
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from ecgmatch_dist import keyed
from ecgmatch_dist.config import Model

LEADS = 12
DROPOUT_STREAM = 16  # of keyed.py


class Output(NamedTuple):
    """The result of one forward pass."""

    z: Tensor
    """Features [b, D]; the bank normalises them."""
    logits: Tensor
    """[b, C]; probabilities are their sigmoid."""


class Backbone(nn.Module):
    """x [b, 12, T] -> z [b, D], logits [b, C]. A subclass makes its layers, then calls `use_channels_last`."""

    bottleneck: nn.Linear
    """From the output of the encoder to z."""
    classifier: nn.Linear
    """From z to logits."""

    registered: ClassVar[dict[str, Callable[[int, Model], "Backbone"]]] = {}

    def __init_subclass__(cls, name: str) -> None:
        cls.registered[name] = cls

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.auxiliary: nn.Module | None = None  # extra heads of a method, trained with this network

    def forward(self, x: Tensor, keys: Tensor | None = None) -> Output:
        """`keys` int64 [b] decide the dropout mask in training, so that it does not depend on rank or batch."""
        raise NotImplementedError

    def drop(self, x: Tensor, keys: Tensor | None) -> Tensor:
        """Keyed dropout in training; x itself in evaluation."""
        if not self.training or self.dropout == 0:
            return x
        assert keys is not None, "training with dropout needs the keys of the rows"
        dropped: Tensor = keyed_dropout(x, keys, self.dropout)
        return dropped

    def encoder_parameters(self) -> Iterator[nn.Parameter]:
        """All but the head: the parameter group with the smaller learning rate."""
        head = set(self.head_parameters())
        return (parameter for parameter in self.parameters() if parameter not in head)

    def head_parameters(self) -> Iterator[nn.Parameter]:
        """Bottleneck, classifier and a method's extra heads."""
        auxiliary = self.auxiliary.parameters() if self.auxiliary is not None else ()
        return chain(self.bottleneck.parameters(), self.classifier.parameters(), auxiliary)


def as_image(x: Tensor) -> Tensor:
    """[b, 12, T] -> [b, 12, 1, T]: torch has channels_last only for 2-d convolutions."""
    return x.unsqueeze(2).contiguous(memory_format=torch.channels_last)


def use_channels_last(model: nn.Module) -> None:
    """Store all convolution weights in channels_last order; their values do not change.

    The strides are explicit because `Tensor.to(memory_format=...)` leaves a 1 x 1 kernel as it is: it counts as both layouts.
    Its gradient has the strides below, and DDP warns and copies if the two differ.
    """
    for parameter in model.parameters():
        if parameter.dim() == 4:
            _, channels, height, width = parameter.shape
            strides = (channels * height * width, 1, channels * width, channels)
            parameter.data = torch.empty_strided(parameter.shape, strides).copy_(parameter.data)


# Not compiled: keyed numbers rely on integer overflow, which is undefined in the compiler's C++ code. This is
# torch.compiler.disable, but imports the compiler at the first call: commands that do not train start 2 seconds earlier.
@_disable_dynamo
def keyed_dropout(x: Tensor, keys: Tensor, probability: float, stream: int = DROPOUT_STREAM) -> Tensor:
    """Dropout with each row's mask drawn from its key: x [b, ...], keys [b] -> [b, ...]."""
    draws = keyed.uniform(keys, x[0].numel(), stream).view(x.shape)
    return x * (draws >= probability).to(x.dtype).div_(1 - probability)
