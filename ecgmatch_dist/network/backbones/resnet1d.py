"""A plain residual network over time. On real ECGs at 100 Hz it learns more from few labels than the paper's backbone, and
much more from none (docs/tried.md)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ecgmatch_dist import config
from ecgmatch_dist.network.backbones.base import LEADS, Backbone, Output, as_image, use_channels_last

KERNEL = 7


class Block(nn.Module):
    """Two convolutions of width 7, the first with stride 2, and a pooled shortcut: [b, I, 1, T] -> [b, O, 1, T/2].

    The second BatchNorm starts at zero, so that a block starts as its shortcut.
    """

    def __init__(self, into: int, out: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(into, out, (1, KERNEL), stride=(1, 2), padding=(0, KERNEL // 2), bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, (1, KERNEL), padding=(0, KERNEL // 2), bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        nn.init.zeros_(self.bn2.weight)
        self.shortcut = nn.Conv2d(into, out, 1, bias=False)
        self.shortcut_bn = nn.BatchNorm2d(out)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        # ceil_mode rounds an odd length up, as the strided convolution does.
        kept = self.shortcut_bn(self.shortcut(F.avg_pool2d(x, (1, 2), ceil_mode=True)))
        return F.relu(self.bn2(self.conv2(y)) + kept, inplace=True)


class ResNet1d(Backbone, name="resnet1d"):
    """A stem with stride 2, then blocks that halve the length; mean and maximum over time, dropout, a layer of D features."""

    def __init__(self, classes: int, settings: config.Model) -> None:
        super().__init__(settings.dropout)
        widths = block_widths(settings)
        self.stem = nn.Conv2d(LEADS, widths[0], (1, KERNEL), stride=(1, 2), padding=(0, KERNEL // 2), bias=False)
        self.stem_bn = nn.BatchNorm2d(widths[0])
        self.blocks = nn.Sequential(*map(Block, [widths[0], *widths[:-1]], widths))
        self.bottleneck = nn.Linear(2 * widths[-1], settings.width)
        self.classifier = nn.Linear(settings.width, classes)
        use_channels_last(self)

    def forward(self, x: Tensor, keys: Tensor | None = None) -> Output:
        x = self.blocks(F.relu(self.stem_bn(self.stem(as_image(x))), inplace=True)).squeeze(2)
        pooled = self.drop(torch.cat([x.mean(2), x.amax(2)], 1), keys)
        z = F.relu(self.bottleneck(pooled))
        return Output(z, self.classifier(z))


def block_widths(settings: config.Model) -> list[int]:
    """Channels of each block: `first_width`, doubled every second block, up to `width`; 32 32 64 64 128 for 32, 128."""
    first = settings.first_width or settings.width
    return [min(settings.width, first * 2 ** (number // 2)) for number in range(settings.depth)]
