"""A recording of the shards on ECG paper, as well as it can be drawn.

In the shards every lead is filtered and scaled to the same size. The six limb leads are combinations of two, so their true
proportions can be found again, and with them the axis of the heart; the common factor and the proportions of V1 to V6 are lost.
"""

import numpy as np
from numpy.typing import NDArray

from ecgmatch_dist.predict.paper import Picture, last_sample

# I, II, III, aVR, aVL, aVF: each row says that a sum of leads is zero.
EINTHOVEN = np.array(
    [
        [1, -1, 1, 0, 0, 0],
        [1, 1, 0, 2, 0, 0],
        [-1, 0, 1, 0, 2, 0],
        [0, -1, -1, 0, 0, 2],
    ],
    float,
)
MISFIT = 0.02
"""Of the power of the leads; where the sums are farther from zero, the leads are not what their names say."""


def limb_sizes(x: NDArray[np.floating]) -> NDArray[np.float64] | None:
    """Sizes of the limb leads x [6, T] of which only the shapes are known [6], with a median of 1; None: they do not fit."""
    shapes = x.astype(np.float64)
    # The sum over the rules of |sum_v rule_v size_v shape_v|^2 is a quadratic form of the sizes: its smallest direction.
    form = (EINTHOVEN.T @ EINTHOVEN) * (shapes @ shapes.T)
    values, directions = np.linalg.eigh(form)
    sizes = directions[:, 0] * np.sign(directions[:, 0].sum())
    power = float((sizes**2 * (shapes**2).sum(1)).sum())
    if power <= 0 or values[0] > MISFIT * power or (sizes <= 1e-3 * sizes.max()).any():
        return None
    found: NDArray[np.float64] = sizes / np.median(sizes)
    return found


def picture(x: NDArray[np.float16], rate: float, title: str) -> tuple[str, bool]:
    """x [12, T] as in the shards -> SVG, and whether the limb leads have their true proportions."""
    signal = x[:, : last_sample(x)].astype(np.float64)
    sizes = limb_sizes(signal[:6])
    if sizes is not None:
        signal[:6] *= sizes[:, None]
    return Picture(signal, rate, millivolts=False).svg(title), sizes is not None
