"""The paper's equations as pure functions; equation 5, the teacher's moving average, is in teacher.py.

Shapes: n rows, U unlabelled rows, K neighbours, C classes. Across ranks: means are over a rank's own rows, which DDP's
averaging makes the mean over the global batch as long as all ranks hold equally many; the label correlation, which is
not a mean, is made from sums over all ranks.
"""

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Similarity = Literal["cosine", "pearson", "euclidean", "expected"]

EPSILON = 1e-6  # official code; the paper divides by the norms alone


def pseudo_labels(p_UKC: Tensor) -> Tensor:
    """Equation 1. Bank predictions of the K nearest neighbours [U, K, C] -> their vote [U, C]."""
    return p_UKC.mean(1)


def bce(logits: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
    """Equations 2, 3 and, with weights, 7. Logits, labels in [0, 1] and weights, all [n, C] -> mean over n * C.

    The mean counts every row and class, also those of weight zero.
    """
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    return F.binary_cross_entropy_with_logits(logits, y.to(logits.dtype), weight)


def neighbour_agreement(y_UC: Tensor) -> Tensor:
    """Equation 6. Pseudo-labels [U, C] -> how far the neighbours agree, alpha in [0, 1], [U, C]."""
    return (2 * y_UC - 1).abs()


def _sqrt(x: Tensor) -> Tensor:
    """Square root whose gradient at zero is zero instead of infinite; what rounding left below zero counts as zero."""
    positive = x > 0
    return torch.where(positive, torch.where(positive, x, 1.0).sqrt(), 0.0)


def correlation(
    p: Tensor, similarity: Similarity = "cosine", reduce: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """Equations 8 to 10, 13 and 14. Labels or probabilities [n, C] -> label correlation R in [0, 1], [C, C].

    `reduce` sums over ranks (distributed.all_sum) where p is a rank's share of the rows. It is given the sufficient
    statistics P^T P, column sums and number of rows in one tensor of C * C + C + 1 numbers, in fp64: sums of thousands
    of products, of which Pearson and Euclid take differences.

    "expected" is not in the paper. For 0/1 labels it is the cosine, since y^2 = y; for probabilities it divides by the norms
    that labels drawn from them are expected to have, sqrt(sum p), instead of sqrt(sum p^2). The cosine of probabilities that
    are right is larger than that of the labels, so that aligning the two asks for predictions sharper than they should be.
    """
    C = p.shape[1]
    P = p.double()
    sums = torch.cat([(P.T @ P).flatten(), P.sum(0), P.new_full((1,), len(P))])
    if reduce is not None:
        sums = reduce(sums)
    gram, column, n = sums[: C * C].view(C, C), sums[C * C : -1], sums[-1]
    if similarity == "pearson":
        gram = gram - torch.outer(column, column) / n
    diagonal = gram.diagonal()
    if similarity == "expected":
        norm = _sqrt(column)
        r = gram / (torch.outer(norm, norm) + EPSILON)
        own = torch.eye(C, dtype=torch.bool, device=p.device)
        r = torch.where(own, (column > 0).to(r.dtype)[:, None], r)  # a class always goes with itself
    elif similarity == "euclidean":
        r = 1 / (1 + _sqrt(diagonal[:, None] + diagonal[None, :] - 2 * gram))
    else:
        norm = _sqrt(diagonal)
        r = gram / (torch.outer(norm, norm) + EPSILON)
        r = r.square() if similarity == "pearson" else r
    return r.clamp(0, 1).to(torch.promote_types(p.dtype, torch.float32))


def correlation_alignment(R_b: Tensor, R_u: Tensor) -> Tensor:
    """Equation 11. Label correlations of the labelled and unlabelled rows, both [C, C] -> Frobenius norm of R_b - R_u.

    Where they are equal, the gradient is zero.
    """
    norm: Tensor = torch.linalg.vector_norm(R_b - R_u)
    return norm


def total(L_b: Tensor, L_u: Tensor, L_f: Tensor, lambda_u: float, lambda_f: float) -> Tensor:
    """Equation 12; with lambda_f = 0, equation 4."""
    return L_b + lambda_u * L_u + lambda_f * L_f
