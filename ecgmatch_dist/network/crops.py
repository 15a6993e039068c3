"""Prediction of recordings that are longer than what the network was trained on: the mean over evenly spaced crops.

Legend: b rows, V = 12 leads, T samples, S samples of a crop, D features, C classes.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ecgmatch_dist import keyed
from ecgmatch_dist.data.windows import places as places
from ecgmatch_dist.network.backbones.base import Output


def over_crops(model: Callable[..., Output], x: Tensor, crop: int, keys: Tensor | None = None) -> Output:
    """Mean features and logits over the crops: x [b, V, T], `keys` [b] of the dropout -> z [b, D], logits [b, C].

    The mean of logits, not of probabilities: the classifier is linear, so they are what it says of the mean feature, and the
    bank's two halves stay one. Crop after crop, which needs the memory of one.
    """
    starts = places(x.shape[2], crop)
    if len(starts) == 1:
        return model(x) if keys is None else model(x, keys)
    seen = []
    for number, start in enumerate(starts):
        own = () if keys is None else (keyed.row_keys(0, number, 0, keys),)  # every crop drops something else
        seen.append(model(x[:, :, start : start + crop], *own))
    return Output(*(torch.stack(column).mean(0) for column in zip(*seen, strict=True)))
