"""Softmax methods for independent sigmoids: each class c is a two-way problem with probabilities (1 - p_c, p_c).

All functions are element-wise over [U, C].
"""

import torch
from torch import Tensor


def confidence(p: Tensor) -> Tensor:
    """Probability of the more likely side, at least 1/2."""
    return torch.maximum(p, 1 - p)


def hard(p: Tensor) -> Tensor:
    """The more likely side, 0 or 1; a tie is positive."""
    return (p >= 0.5).to(p.dtype)


def sharpen(p: Tensor, temperature: float) -> Tensor:
    """p^(1/T) / (p^(1/T) + (1-p)^(1/T)), which is sigmoid(logit(p) / T)."""
    return torch.sigmoid(torch.logit(p, eps=1e-6) / temperature)
