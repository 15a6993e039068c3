"""Where the signal mattered: a piece of one lead is replaced by a flat line, and the logits change. Occlusion asks the network
itself and needs no gradient; it shows what the network used, not what a disease is."""

import numpy as np
from numpy.typing import NDArray

from ecgmatch_dist.predict.model import Predictor
from ecgmatch_dist.predict.paper import last_sample

SECONDS = 0.5  # of a piece
EDGE = 0.04  # seconds over which it fades out: a step would be a signal of its own


def influence(model: Predictor, x: NDArray[np.float16]) -> tuple[NDArray[np.float32], float]:
    """One window [12, T] -> how much each piece of each lead raises the logits, [12, pieces, C], and a piece's seconds."""
    rate, length = model.inputs.preprocess.rate, x.shape[1]
    piece = max(1, round(SECONDS * rate))
    pieces = -(-last_sample(x) // piece)
    masked = np.empty((pieces, *x.shape), np.float16)
    out = np.zeros((len(x), pieces, len(model.classes)), np.float32)
    _, (whole,) = model.forward(x[None])
    for lead in range(len(x)):
        if not x[lead].any():
            continue
        for number in range(pieces):
            masked[number] = x
            masked[number, lead] *= 1 - _window(length, number * piece, (number + 1) * piece, round(EDGE * rate))
        out[lead] = whole - model.forward(masked)[1]
    return out, piece / rate


def _window(length: int, start: int, stop: int, edge: int) -> NDArray[np.float16]:
    """[length], 1 inside, 0 outside, with straight edges."""
    t = np.arange(length)
    inside = np.minimum(t - start + edge, stop - 1 + edge - t) / max(edge, 1)
    return np.clip(inside, 0, 1).astype(np.float16)
