"""The attention CNN of the paper: encoder and attention f(x), bottleneck and classifier h(z).

The layers are the official code's; features z for the bank and logits come from one forward.
"""

from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ecgmatch_dist import config, keyed

LEADS = 12
BLOCKS = 5
SLOPE = 0.01  # of LeakyReLU
DROPOUT_STREAM = 16


class Output(NamedTuple):
    """What one forward gives."""

    z: Tensor
    """Features [b, D]; the bank normalises them."""
    logits: Tensor
    """[b, C]; probabilities are their sigmoid."""


class ResidualBlock(nn.Module):
    """Two convolutions of width 9, the first with stride 2, and a pooled shortcut: [b, D, 1, T] -> [b, D, 1, T/2]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, (1, 9), stride=(1, 2), padding=(0, 4), bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, (1, 9), padding=(0, 4), bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.shortcut = nn.Conv2d(width, width, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.leaky_relu(self.bn1(self.conv1(x)), SLOPE, inplace=True)
        y = F.leaky_relu(self.bn2(self.conv2(y)), SLOPE, inplace=True)
        # ceil_mode: an odd length is halved as the strided convolution halves it.
        out: Tensor = y + self.shortcut(F.avg_pool2d(x, (1, 2), ceil_mode=True))
        return out


class SelfAttention(nn.Module):
    """Multi-head self-attention without positions and residual: [b, T, D] -> [b, T, D]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.project_in = nn.Linear(width, 3 * width)
        self.project_out = nn.Linear(width, width)
        # As nn.MultiheadAttention starts, whose separate paths for training and evaluation we do without.
        nn.init.xavier_uniform_(self.project_in.weight)
        nn.init.zeros_(self.project_in.bias)
        nn.init.zeros_(self.project_out.bias)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        query, key, value = self.project_in(x).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value)
        out: Tensor = self.project_out(mixed.transpose(1, 2).reshape(b, t, d))
        return out


class AttentionCNN(nn.Module):
    """x [b, 12, T] -> z [b, D], logits [b, C]; the encoder divides the length by 64 (6144 -> 96, 1024 -> 16)."""

    def __init__(self, classes: int, width: int = 128, heads: int = 8, dropout: float = 0.5) -> None:
        super().__init__()
        self.dropout = dropout
        self.stem = nn.Conv2d(LEADS, width, (1, 15), stride=(1, 2), padding=(0, 7), bias=False)
        self.stem_bn = nn.BatchNorm2d(width)
        self.blocks = nn.Sequential(*(ResidualBlock(width) for _ in range(BLOCKS)))
        self.attention = SelfAttention(width, heads)
        self.bottleneck = nn.Linear(width, width)
        self.classifier = nn.Linear(width, classes)
        self.auxiliary: nn.Module | None = None  # heads of a method that needs more than one; learns with this network
        for parameter in self.parameters():
            if parameter.dim() == 4:
                # With explicit strides, since a 1 x 1 kernel passes for both layouts: DDP compares them with the gradient's.
                _, into, height, length = parameter.shape
                strides = (into * height * length, 1, into * length, into)
                parameter.data = torch.empty_strided(parameter.shape, strides).copy_(parameter.data)

    def forward(self, x: Tensor, keys: Tensor | None = None) -> Output:
        """`keys` int64 [b] decide the dropout mask in training, so that it does not depend on rank or batching."""
        # A height of 1: torch has channels_last, the fastest layout here and on GPUs, for 2-d convolutions only.
        x = x.unsqueeze(2).contiguous(memory_format=torch.channels_last)
        x = F.leaky_relu(self.stem_bn(self.stem(x)), SLOPE, inplace=True)
        x = self.blocks(x).squeeze(2).transpose(1, 2)  # [b, T/64, D]
        if self.training and self.dropout > 0:
            assert keys is not None, "training with dropout needs the rows' keys"
            x = keyed_dropout(x, keys, self.dropout)
        z = self.bottleneck(self.attention(x).amax(dim=1))
        return Output(z, self.classifier(z))

    def encoder_parameters(self) -> Iterator[nn.Parameter]:
        """Encoder and attention: the group with the smaller learning rate."""
        parts = (self.stem, self.stem_bn, self.blocks, self.attention)
        return chain.from_iterable(part.parameters() for part in parts)

    def head_parameters(self) -> Iterator[nn.Parameter]:
        """Bottleneck, classifier and what a method adds."""
        auxiliary = self.auxiliary.parameters() if self.auxiliary is not None else ()
        return chain(self.bottleneck.parameters(), self.classifier.parameters(), auxiliary)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # keyed numbers count on integers that overflow: undefined in C++
def keyed_dropout(x: Tensor, keys: Tensor, probability: float, stream: int = DROPOUT_STREAM) -> Tensor:
    """Dropout with the mask from each row's key: x [b, ...], keys [b] -> like x, expectation kept."""
    draws = keyed.uniform(keys, x[0].numel(), stream).view(x.shape)
    return x * (draws >= probability).to(x.dtype).div_(1 - probability)


def build_model(classes: int, settings: config.Model, seed: int) -> AttentionCNN:
    """The network with initial weights from the seed alone: every rank builds the same, and the caller's generator
    is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AttentionCNN(classes, settings.width, settings.heads, settings.dropout)
