"""The kernel of views in Triton's interpreter against torch: `TRITON_INTERPRET=1 python -m tests.support.view_kernel`.

A process of its own: Triton reads the variable when it is imported. Prints which views without noise differ by any bit, then
the largest difference of views with noise: the interpreter takes logarithm, sine and cosine from NumPy, which rounds otherwise.
"""

import torch
from torch import Tensor

from ecgmatch_dist import keyed
from ecgmatch_dist.augment import ECGAugment, kernel
from ecgmatch_dist.config import Augment

QUIET = {"noise_weak": 0.0, "noise_strong": 0.0}
VARIANTS = [
    Augment(**QUIET),
    Augment(pipeline="sequential", **QUIET),
    Augment(granularity="batch", **QUIET),
    Augment(crop=33, dropout_window="per_lead", **QUIET),
]


def by_torch(settings: Augment, strong: bool, x: Tensor) -> Tensor:
    keys, batch = keyed.row_keys(1, 2, 3, torch.arange(len(x))), keyed.batch_key(1, 2, 3)
    augment = ECGAugment(settings)
    return (augment.strong if strong else augment.weak)(x, keys, batch)


def by_kernel(settings: Augment, strong: bool, x: Tensor) -> Tensor:
    keys, batch = keyed.row_keys(1, 2, 3, torch.arange(len(x))), keyed.batch_key(1, 2, 3)
    choice = batch.expand(len(x)) if settings.granularity == "batch" else keys
    return kernel.view(settings, x, keys, choice, strong=strong)


def bits(t: Tensor) -> Tensor:
    return t.view(torch.int32)


def main() -> None:
    x = torch.randn(2, 12, 40, generator=torch.Generator().manual_seed(0))
    kernel.BLOCK = 64
    cases = [(settings, True) for settings in VARIANTS]
    print("differ", [case for case in cases if not torch.equal(bits(by_kernel(*case, x)), bits(by_torch(*case, x)))])
    kernel.BLOCK = 32  # one and a part
    noisy = [(Augment(pipeline="sequential"), strong) for strong in (False, True)]
    print("largest", max((by_kernel(*case, x) - by_torch(*case, x)).abs().max().item() for case in noisy))


if __name__ == "__main__":
    main()
