"""Random convolutions of a recording, and a ridge regression from them to diagnoses. After MiniROCKET (Dempster, Schmidt and
Webb, 2021): only the regression learns, so that a hundred labels are enough.

A kernel has nine taps, three of them 2 and six -1, over some of the leads. What it says of a recording are the shares of the
samples at which it is above each of a few thresholds.

Shapes: V = 12 leads, T samples, D dilations, N kernels of each, Q thresholds of each, F = D N Q features, C classes.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.linear_model import Ridge
from torch import Tensor

from ecgmatch_dist.data.labels import UNKNOWN
from ecgmatch_dist.data.preprocess import LEADS
from ecgmatch_dist.data.store import ShardStore
from ecgmatch_dist.distributed.collectives import from_rank_0, gather_uneven, rank, world
from ecgmatch_dist.measurements.measure import Floats, at_rate

TAPS, HIGH = 9, 3
DILATIONS = (1, 2, 4, 8, 16, 32)  # at 100 Hz, nine taps reach over 0.1 s to 2.6 s: a wave, a beat, a rhythm
KERNELS = 56
QUANTILES = (0.2, 0.4, 0.5, 0.6, 0.8)
FEATURES = len(DILATIONS) * KERNELS * len(QUANTILES)
SEEN = 64  # recordings whose quantiles are the thresholds
PENALTY = 0.6 * FEATURES
LIMIT = 5.0  # of a standardised feature: few labels can underestimate a deviation
READ = 256  # recordings in memory at once


class Kernels(NamedTuple):
    """Drawn, not learnt."""

    weights: Tensor
    """[D, N, V, taps]."""
    thresholds: Tensor
    """[D, N, Q]."""


class Linear(NamedTuple):
    """A ridge regression on standardised features."""

    mean: Tensor
    deviation: Tensor
    """[F] of the features of the labelled part."""
    weights: Tensor
    """[C, F]."""
    intercept: Tensor
    """[C]."""


class RandomConvolutions:
    """Predicts signals of one sampling rate."""

    def __init__(self, kernels: Kernels, linear: Linear, rate: float) -> None:
        self.kernels, self.linear, self.rate = kernels, linear, rate

    def predict(self, signals: NDArray[np.floating]) -> NDArray[np.float64]:
        """[n, V, T] -> [n, C] in [0, 1]. One after the other: a batch could round otherwise than its recordings do."""
        linear = self.linear
        scores = torch.empty(len(signals), len(linear.intercept), dtype=torch.float64)
        for row, x in enumerate(signals):
            z = standard(features(at_rate(x, self.rate), self.kernels), linear.mean, linear.deviation)
            scores[row] = linear.weights @ z + linear.intercept
        return scores.clip(0, 1).numpy()


def draw(seed: int) -> Tensor:
    """[D, N, V, taps]. One lead is as likely as two or three, as four to seven, and as more."""
    rng = np.random.default_rng(seed)
    weights = np.zeros((len(DILATIONS), KERNELS, len(LEADS), TAPS), np.float32)
    for kernel in weights.reshape(-1, len(LEADS), TAPS):
        taps = np.full(TAPS, -1.0)
        taps[rng.choice(TAPS, HIGH, replace=False)] = TAPS / HIGH - 1  # they add up to 0: a constant says nothing
        count = int(2 ** rng.uniform(0, np.log2(len(LEADS) + 1)))
        kernel[rng.choice(len(LEADS), count, replace=False)] = taps
    return torch.from_numpy(weights)


def convolve(x: Floats, weights: Tensor, dilation: int) -> Tensor:
    """One recording [V, T] and the kernels of one dilation [N, V, taps] -> [N, T]."""
    return torch.conv1d(torch.from_numpy(x)[None], weights, padding=dilation * (TAPS // 2), dilation=dilation)[0]


def find_thresholds(signals: list[Floats], weights: Tensor) -> Tensor:
    """Quantiles of what each kernel says of these recordings [V, T]: [D, N, Q]."""
    said = [
        np.concatenate([convolve(x, own, dilation) for x in signals], 1)
        for own, dilation in zip(weights, DILATIONS, strict=True)
    ]
    return torch.from_numpy(np.stack([np.quantile(values, QUANTILES, axis=1).T for values in said])).float()


def features(x: Floats, kernels: Kernels) -> Tensor:
    """One recording [V, T] -> [F]: shares of the samples above the thresholds."""
    above = [
        (convolve(x, weights, dilation)[:, None] > thresholds[:, :, None]).sum(2)
        for weights, thresholds, dilation in zip(*kernels, DILATIONS, strict=True)
    ]
    return torch.stack(above).flatten().div(x.shape[1])


def standard(rows: Tensor, mean: Tensor, deviation: Tensor) -> Tensor:
    """Features [..., F], standardised and bounded."""
    return ((rows - mean) / deviation).clip(-LIMIT, LIMIT)


def regress(rows: Tensor, labels: NDArray[np.uint8]) -> Linear:
    """From features [n, F] to labels [n, C] in {0, 1, UNKNOWN}."""
    rows = rows.double()
    mean, deviation = rows.mean(0), rows.std(0, correction=0) + 1e-6
    z = standard(rows, mean, deviation).numpy()
    weights, intercept = np.zeros((labels.shape[1], rows.shape[1])), np.full(labels.shape[1], 0.5)
    for c, column in enumerate(labels.T):
        looked = column != UNKNOWN  # where nobody has looked for the class, the recording does not count
        if looked.any():
            model = Ridge(PENALTY).fit(z[looked], column[looked])
            weights[c], intercept[c] = model.coef_, model.intercept_
    return Linear(mean, deviation, torch.from_numpy(weights), torch.from_numpy(intercept))


def fit_convolutions(
    store: ShardStore, rows: NDArray[np.int64], labels: NDArray[np.uint8], seed: int
) -> RandomConvolutions:
    """Fitted to these rows of the shards, the same on every rank: each convolves its share of them. A collective."""
    rate = store.preprocess.rate
    weights = draw(seed)
    seen = [at_rate(x, rate) for x in store.read(rows[:SEEN])]
    # What is computed, rank 0 tells: machines that round differently would disagree.
    kernels = Kernels(weights, from_rank_0(find_thresholds(seen, weights)))
    mine = np.array_split(rows, world())[rank()]
    pieces = (store.read(mine[i : i + READ]) for i in range(0, len(mine), READ))
    own = [features(at_rate(x, rate), kernels) for piece in pieces for x in piece]
    table = gather_uneven(torch.stack(own) if own else torch.empty(0, FEATURES))
    return RandomConvolutions(kernels, Linear(*map(from_rank_0, regress(table, labels))), rate)
