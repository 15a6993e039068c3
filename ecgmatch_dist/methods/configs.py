"""The settings of each method, one dataclass each; `name` is what runs and reports call it."""

from dataclasses import dataclass
from typing import ClassVar, Literal


@dataclass(frozen=True)
class ECGMatch:
    """The paper's method; its ablations are switches."""

    name: ClassVar[str] = "ecgmatch"
    neighbours: int = 5
    """K."""
    lambda_u: float = 0.8
    """Weight of the pseudo-label loss; 0: without pseudo-labels."""
    lambda_f: float = 1.2
    """Weight of the label-correlation loss; 0: without correlation alignment."""
    refine: bool = True
    """Weight pseudo-labels by the agreement of the neighbours (equation 6); off: all weights are 1."""
    similarity: Literal["cosine", "pearson", "euclidean"] = "cosine"
    """How the correlation of two classes is measured."""
    query: Literal["student", "teacher"] = "student"
    """Whose features ask the bank of teacher features for neighbours: the student's (paper) or the teacher's own."""


@dataclass(frozen=True)
class Supervised:
    """The labelled data alone: the lower bound, and the start of the others."""

    name: ClassVar[str] = "supervised"


MethodConfig = ECGMatch | Supervised
