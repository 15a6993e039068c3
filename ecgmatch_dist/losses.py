"""The paper's equations as pure functions. Equation 5, the teacher's moving average, is in network/teacher.py.

Shapes: n rows, U unlabelled rows, K neighbours, C classes.
Across ranks: a mean here is over a rank's own rows. All ranks hold equally many, so DDP's averaging of gradients makes it the
mean over the global batch. The label correlation is not a mean: it is computed from sums over all ranks.
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

    The mean counts every entry, also those of weight 0. A label that nobody has given is NaN and has weight 0
    (`annotation_weights`): forget the weight, and the loss is NaN, not a little wrong.
    """
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    if weight is not None:
        y = torch.where(weight == 0, 0.0, y)
    return F.binary_cross_entropy_with_logits(logits, y.to(logits.dtype), weight)


def annotation_weights(y: Tensor) -> Tensor | None:
    """Weights [N, C] of the labels [N, C] of the whole labelled part, NaN where nobody has looked; None if there is no NaN.

    They are 0 there and N C / (number of labels) elsewhere, so that the weighted mean of equation 3 over the part is the mean
    over the labels that there are. The factor is the same for all batches: no rank needs to know the labels of another.
    """
    given = ~y.isnan()
    if given.all():
        return None
    return given * (given.numel() / given.sum())


def class_frequencies(y: Tensor) -> Tensor:
    """Labels [n, C], NaN where nobody has looked -> share of positives among those looked at, [C] in fp64."""
    y = y.double()
    return y.nanmean(0) if y.isnan().any() else y.mean(0)


def neighbour_agreement(y_UC: Tensor) -> Tensor:
    """Equation 6. Pseudo-labels [U, C] -> agreement of the neighbours, alpha in [0, 1], [U, C]."""
    return (2 * y_UC - 1).abs()


def _sqrt(x: Tensor) -> Tensor:
    """Square root with gradient 0 at 0 instead of infinity. Values that rounding made negative count as 0."""
    positive = x > 0
    return torch.where(positive, torch.where(positive, x, 1.0).sqrt(), 0.0)


def correlation(
    p: Tensor, similarity: Similarity = "cosine", reduce: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """Equations 8 to 10, 13 and 14. Labels or probabilities [n, C] -> label correlation R in [0, 1], [C, C].

    `reduce` (`distributed.collectives.all_sum`) sums over ranks if p is one rank's share of the rows. It gets P^T P, the column
    sums and the number of rows in one tensor of C * C + C + 1 numbers. They are fp64, because Pearson and Euclid subtract
    sums of thousands of products.

    "expected" is not in the paper. The cosine of calibrated probabilities is larger than that of their labels, so aligning the
    two makes predictions too sharp. "expected" divides by sqrt(sum p), the expected norm of labels drawn from p, instead of
    sqrt(sum p^2). For 0/1 labels it is the cosine, since y^2 = y.
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
        diagonal_mask = torch.eye(C, dtype=torch.bool, device=p.device)
        r = torch.where(diagonal_mask, (column > 0).to(r.dtype)[:, None], r)  # a class always occurs with itself
    elif similarity == "euclidean":
        r = 1 / (1 + _sqrt(diagonal[:, None] + diagonal[None, :] - 2 * gram))
    else:
        norm = _sqrt(diagonal)
        r = gram / (torch.outer(norm, norm) + EPSILON)
        r = r.square() if similarity == "pearson" else r
    return r.clamp(0, 1).to(torch.promote_types(p.dtype, torch.float32))


def labelled_correlation(y: Tensor, similarity: Similarity = "cosine") -> Tensor:
    """R_b, equation 9. Labels [n, C], NaN where nobody has looked -> [C, C]. Each pair of classes is compared on the rows that
    have both labels; NaN where no row has."""
    if not y.isnan().any():
        return correlation(y, similarity)
    C = y.shape[1]
    R = y.new_full((C, C), torch.nan, dtype=torch.promote_types(y.dtype, torch.float32))
    for a in range(C):
        for b in range(C):
            pair = y[:, [a, b]]
            pair = pair[~pair.isnan().any(1)]
            if len(pair):
                R[a, b] = correlation(pair, similarity)[0, 1]
    return R


def correlation_alignment(R_b: Tensor, R_u: Tensor) -> Tensor:
    """Equation 11. Label correlations of the labelled and unlabelled rows, both [C, C] -> Frobenius norm of R_b - R_u.

    The gradient is zero where they are equal. Pairs of which R_b knows nothing (NaN) are left out.
    """
    norm: Tensor = torch.linalg.vector_norm(torch.where(R_b.isnan(), 0.0, R_b - R_u))
    return norm


def total(L_b: Tensor, L_u: Tensor, L_f: Tensor, lambda_u: float, lambda_f: float) -> Tensor:
    """Equation 12; with lambda_f = 0, equation 4."""
    return L_b + lambda_u * L_u + lambda_f * L_f
