"""The paper's attention CNN: encoder and attention f(x), bottleneck and classifier h(z).

The layers are those of the official code. One forward gives both the features z for the bank and the logits. In the paper z is
f(x), in the official code it is the output of the bottleneck, which has no activation (`model.feature`).
"""

import torch.nn.functional as F
from torch import Tensor, nn

from ecgmatch_dist import config
from ecgmatch_dist.network.backbones.base import LEADS, Backbone, Output, as_image, use_channels_last

SLOPE = 0.01  # of LeakyReLU


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
        # ceil_mode rounds an odd length up, as the strided convolution does.
        out: Tensor = y + self.shortcut(F.avg_pool2d(x, (1, 2), ceil_mode=True))
        return out


class SelfAttention(nn.Module):
    """Multi-head self-attention without positions or residual: [b, T, D] -> [b, T, D]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.project_in = nn.Linear(width, 3 * width)
        self.project_out = nn.Linear(width, width)
        # The initial weights of nn.MultiheadAttention. It is not used itself, because it computes differently in eval mode.
        nn.init.xavier_uniform_(self.project_in.weight)
        nn.init.zeros_(self.project_in.bias)
        nn.init.zeros_(self.project_out.bias)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        query, key, value = self.project_in(x).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value)
        out: Tensor = self.project_out(mixed.transpose(1, 2).reshape(b, t, d))
        return out


class AttentionCNN(Backbone, name="attention_cnn"):
    """x [b, 12, T] -> z [b, D], logits [b, C]. Five blocks divide the length by 64 (6144 -> 96, 1024 -> 16)."""

    def __init__(self, classes: int, settings: config.Model) -> None:
        super().__init__(settings.dropout)
        width, self.feature = settings.width, settings.feature
        self.stem = nn.Conv2d(LEADS, width, (1, 15), stride=(1, 2), padding=(0, 7), bias=False)
        self.stem_bn = nn.BatchNorm2d(width)
        self.blocks = nn.Sequential(*(ResidualBlock(width) for _ in range(settings.depth)))
        self.attention = SelfAttention(width, settings.heads)
        self.bottleneck = nn.Linear(width, width)
        self.classifier = nn.Linear(width, classes)
        use_channels_last(self)

    def forward(self, x: Tensor, keys: Tensor | None = None) -> Output:
        x = F.leaky_relu(self.stem_bn(self.stem(as_image(x))), SLOPE, inplace=True)
        x = self.drop(self.blocks(x).squeeze(2).transpose(1, 2), keys)  # [b, T/64, D]
        f = self.attention(x).amax(dim=1)
        hidden = self.bottleneck(f)
        return Output(f if self.feature == "encoder" else hidden, self.classifier(hidden))
