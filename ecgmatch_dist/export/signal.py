"""The preprocessing of `data/preprocess.py` as a torch module, so that it can be part of an exported graph.

It is the same computation, step by step: a FIR filter resamples, blocks and a prefix sum filter. A test compares the two.
Legend: b recordings, n samples, T samples of the network's input.
"""

import numpy as np
import torch
from scipy import signal as dsp
from torch import Tensor, nn
from torch.nn import functional as F

from ecgmatch_dist.data.preprocess import BLOCK, Preprocess, block_filter, resampling_ratio


class Resample(nn.Module):
    """scipy's `resample_poly(padtype="line")` for one ratio: [b, 12, n] -> [b, 12, ceil(n x target / rate)]."""

    taps: Tensor

    def __init__(self, rate: float, target: float) -> None:
        super().__init__()
        ratio = resampling_ratio(rate, target)
        self.up, self.down = ratio.numerator, ratio.denominator
        widest = max(self.up, self.down)
        self.side = 10 * widest
        taps = dsp.firwin(2 * self.side + 1, 1 / widest, window=("kaiser", 5.0)).astype(np.float32) * self.up
        self.register_buffer("taps", torch.from_numpy(taps)[None, None])

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[2]
        more = -(-self.side // self.up) + 1  # samples on the line through both ends, on each side
        slope = (x[:, :, -1:] - x[:, :, :1]) / (n - 1)
        steps = torch.arange(1, more + 1, dtype=x.dtype)
        x = torch.cat([x[:, :, :1] - slope * steps.flip(0), x, x[:, :, -1:] + slope * steps], 2)
        if self.up > 1:
            x = F.pad(x[..., None], (0, self.up - 1)).flatten(2)
        x = x[:, :, more * self.up - self.side :]
        leads = x.shape[1]
        y = F.conv1d(x.reshape(-1, 1, x.shape[2]), self.taps, stride=self.down)
        return y.reshape(-1, leads, y.shape[2])[:, :, : -(-n * self.up // self.down)]


class Bandpass(nn.Module):
    """`data.preprocess.bandpass`: forwards and backwards, [b, 12, n] -> [b, 12, n]."""

    products: Tensor
    from_state: Tensor
    steady: Tensor

    def __init__(self, settings: Preprocess) -> None:
        super().__init__()
        products, from_state, step, steady = block_filter(settings)
        self.edge = 3 * (2 * settings.order + 1)
        self.register_buffer("products", torch.from_numpy(products))
        self.register_buffer("from_state", torch.from_numpy(from_state))
        self.register_buffer("steady", torch.from_numpy(steady))
        for number in range(20):  # step, step^2, step^4, ...: 2^20 blocks are a day of signal
            self.register_buffer(f"power{number}", torch.from_numpy(step), persistent=False)
            step = step @ step

    def forward(self, x: Tensor) -> Tensor:
        edge = min(self.edge, x.shape[2] - 1)
        first, last = x[:, :, :1], x[:, :, -1:]
        before, after = 2 * first - x[:, :, 1 : edge + 1].flip(2), 2 * last - x[:, :, -edge - 1 : -1].flip(2)
        y = torch.cat([before, x, after], 2) - first
        shape = y.shape
        y = self._once(self._once(y.reshape(-1, shape[2])).flip(1)).flip(1)
        return y.reshape(-1, shape[1], shape[2])[:, :, edge : shape[2] - edge]

    def _once(self, x: Tensor) -> Tensor:
        """[rows, n] -> [rows, n], forwards from the steady state of the first sample."""
        n = x.shape[1]
        blocks = -(-n // BLOCK)
        out = F.pad(x, (0, blocks * BLOCK - n)).reshape(-1, blocks, BLOCK) @ self.products
        states = torch.cat([(x[:, :1].double() * self.steady)[:, None], out[:, :-1, BLOCK:].double()], 1)
        reach, number = 1, 0
        while reach < blocks:  # the prefix sum of `_blockwise`
            later = states[:, reach:] + states[:, :-reach] @ self.get_buffer(f"power{number}")
            states = torch.cat([states[:, :reach], later], 1)
            reach, number = 2 * reach, number + 1
        y = states.float() @ self.from_state + out[:, :, :BLOCK]
        return y.reshape(-1, blocks * BLOCK)[:, :n]


class Prepare(nn.Module):
    """`data.preprocess.preprocess` for one rate: [b, 12, n] in mV -> [b, 12, T], rounded to half precision like the shards."""

    def __init__(self, rate: float, settings: Preprocess) -> None:
        super().__init__()
        self.rate, self.settings = rate, settings
        self.resample = Resample(rate, settings.rate) if rate != settings.rate else nn.Identity()
        self.bandpass = Bandpass(settings)

    def forward(self, x: Tensor) -> Tensor:
        used = x[:, :, : int(np.ceil(self.settings.length * self.rate / self.settings.rate))]
        moving = used.amax(2, keepdim=True) > used.amin(2, keepdim=True)
        x = self.resample(x)
        for step in self.settings.sequence:
            if step == "pad":
                x = F.pad(x[:, :, : self.settings.length], (0, max(self.settings.length - x.shape[2], 0)))
            elif step == "filter":
                x = self.bandpass(x)
            else:
                x = x - x.mean(2, keepdim=True)
                deviation = x.square().mean(2, keepdim=True).sqrt()
                x = x / torch.where(deviation > 0, deviation, torch.ones_like(deviation))
        return (x * moving).half().float()
