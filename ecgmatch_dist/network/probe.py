"""A linear probe: the classifier that fits best to given features. It measures features that were learnt without labels."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from torch import nn

from ecgmatch_dist.data.labels import UNKNOWN

STRENGTH = 0.1  # scikit-learn's C: smaller is smoother


def linear_probe(
    features: NDArray[np.floating[Any]], labels: NDArray[np.uint8]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Logistic regression per class: features [n, D], labels [n, C] in {0, 1, UNKNOWN} -> weight [C, D] and bias [C].

    Features are centred and divided by one common scale for the fit, which the weights undo: features that hardly vary get
    small weights. For a class that all recordings have, or none, the layer gives its frequency.
    """
    x = features.astype(np.float64)
    mean = x.mean(0)
    scale = max(float(np.sqrt(((x - mean) ** 2).mean())), 1e-6)
    weight, bias = np.zeros((labels.shape[1], x.shape[1])), np.zeros(labels.shape[1])
    for c, column in enumerate(labels.T):
        looked = column != UNKNOWN  # where nobody has looked for the class, the recording does not count
        y = column[looked]
        if 0 < y.sum() < len(y):
            fit = LogisticRegression(C=STRENGTH, max_iter=1000).fit(((x - mean) / scale)[looked], y)
            weight[c] = fit.coef_[0] / scale
            bias[c] = fit.intercept_[0] - weight[c] @ mean
        else:
            share = (y.sum() + 0.5) / (len(y) + 1)
            bias[c] = np.log(share / (1 - share))
    return weight, bias


def classifier_input(model: nn.Module, features: NDArray[np.floating[Any]]) -> NDArray[np.floating[Any]]:
    """What the classifier sees of the features z [n, D]: z itself; with `model.feature = encoder`, z behind the bottleneck."""
    if getattr(model, "feature", "bottleneck") == "bottleneck":
        return features
    assert isinstance(model.bottleneck, nn.Linear)
    weight, bias = (parameter.detach().cpu().double().numpy() for parameter in model.bottleneck.parameters())
    seen: NDArray[np.floating[Any]] = features @ weight.T + bias
    return seen
