"""Everything behind the raw signal as one graph: preprocessing, windows, network, crops, calibration, thresholds."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from ecgmatch_dist.data.windows import places
from ecgmatch_dist.export.signal import Prepare
from ecgmatch_dist.network.crops import over_crops
from ecgmatch_dist.predict.model import Predictor
from ecgmatch_dist.predict.prepare import window_samples


class Answer(NamedTuple):
    """The outputs of the graph, each [b, C] but the last."""

    probability: Tensor
    calibrated: Tensor
    predicted: Tensor
    """bool, by the F2 thresholds; Normal gives way to other classes."""
    features: Tensor
    """[b, D]"""


class Graph(nn.Module):
    """signal [b, 12, n] in mV, leads in the standard order, at `rate` -> Answer. For one number of samples n."""

    thresholds: Tensor
    slope: Tensor
    shift: Tensor
    alone: Tensor
    """bool [C]: the class that is not predicted beside another one."""

    def __init__(self, model: Predictor, rate: float, samples: int) -> None:
        super().__init__()
        settings = model.inputs.preprocess
        self.prepare, self.network, self.crop = Prepare(rate, settings), model.network, model.inputs.crop
        window = window_samples(samples, rate, settings)
        self.pieces = [(start, start + window) for start in places(samples, window)]
        self.register_buffer("thresholds", torch.tensor(model.thresholds, dtype=torch.float32))
        self.register_buffer("slope", torch.tensor(model.calibration.slope))
        self.register_buffer("shift", torch.tensor(model.calibration.shift))
        alone = [model.only and c == model.scheme.normal for c in range(len(model.classes))]
        self.register_buffer("alone", torch.tensor(alone))

    def forward(self, signal: Tensor) -> Answer:
        seen = [
            over_crops(self.network, self.prepare(signal[:, :, start:stop]), self.crop) for start, stop in self.pieces
        ]
        z, logits = (torch.stack(column).mean(0) for column in zip(*seen, strict=True))
        probability = logits.sigmoid()
        predicted = probability >= self.thresholds
        others = (predicted & ~self.alone).any(1, keepdim=True)
        predicted = predicted & ~(others & self.alone)
        return Answer(probability, (self.slope * logits + self.shift).sigmoid(), predicted, z)
