"""The settings of each method, one dataclass each; `name` is what runs and reports call it.

Defaults are those that the methods' authors recommend. Where nobody published how a method is meant for several labels at
once, the choice is a field, and docs/methods.md says what is reconstruction.
"""

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
    similarity: Literal["cosine", "pearson", "euclidean", "expected"] = "cosine"
    """How the correlation of two classes is measured; expected: the cosine, without its bias for probabilities."""
    query: Literal["student", "teacher"] = "student"
    """Whose features ask the bank of teacher features for neighbours: the student's (paper) or the teacher's own."""
    committee: int = 1
    """Supervised runs whose mean prediction the bank begins with: the start alone (paper), or others beside it that differ in
    their initial weights and the order of their data."""
    memory: float = 0.0
    """Share of an ECG's bank prediction that stays when the teacher has seen it again: 0 (paper) replaces it, 1 keeps what the
    bank began with."""


@dataclass(frozen=True)
class Supervised:
    """The labelled data alone: the lower bound, and the start of the others."""

    name: ClassVar[str] = "supervised"


@dataclass(frozen=True)
class FullySupervised:
    """All labels of the training part: the upper bound."""

    name: ClassVar[str] = "fully_supervised"


@dataclass(frozen=True)
class FixMatch:
    """Hard pseudo-labels above a fixed confidence."""

    name: ClassVar[str] = "fixmatch"
    threshold: float = 0.95
    """tau: positives have p >= tau, negatives p <= 1 - tau."""
    lambda_u: float = 1.0
    """Weight of the pseudo-label loss."""


@dataclass(frozen=True)
class FlexMatch:
    """FixMatch with thresholds that follow how much of each class has been learnt."""

    name: ClassVar[str] = "flexmatch"
    threshold: float = 0.95
    """tau, the highest a threshold gets."""
    lambda_u: float = 1.0
    """Weight of the pseudo-label loss."""
    lift: Literal["sides", "classes"] = "sides"
    """What competes for the curriculum: the two sides of each class, or the positive sides of all classes."""


@dataclass(frozen=True)
class SoftMatch:
    """Pseudo-labels weighted by a truncated Gaussian of their confidence."""

    name: ClassVar[str] = "softmatch"
    momentum: float = 0.999
    """Of the running mean and variance of the confidence."""
    n_sigma: float = 2.0
    """Width of the Gaussian."""
    lambda_u: float = 1.0
    """Weight of the pseudo-label loss."""
    align: Literal["labelled_prior", "uniform", "none"] = "labelled_prior"
    """Distribution that the confidences are aligned to before they are weighted."""


@dataclass(frozen=True)
class PercentMatch:
    """Thresholds at percentiles of each class's scores. A reconstruction from the abstract."""

    name: ClassVar[str] = "percentmatch"
    positive: float = 0.8
    """a+: share of the expected positives that is selected."""
    negative: float = 0.8
    """a-: share of the expected negatives that is selected."""
    momentum: float = 0.99
    """Smoothing of the thresholds."""
    refresh: int = 50
    """Steps between new thresholds."""
    lambda_u: float = 1.0
    """Weight of the pseudo-label loss."""
    score_source: Literal["unlabelled_marginal", "labelled_conditional"] = "unlabelled_marginal"
    """Whose scores the percentiles are taken of."""
    percentile: Literal["prior_scaled", "fixed"] = "prior_scaled"
    """Percentiles scaled by the labelled class frequencies, or the shares themselves."""
    weighting: Literal["threshold_tied", "exp_ramp"] = "threshold_tied"
    """Weights tied to the thresholds, or a ramp over the first part of training."""


@dataclass(frozen=True)
class DST:
    """Debiased self-training: a second head learns from pseudo-labels, a third one is the worst case."""

    name: ClassVar[str] = "dst"
    threshold: float = 0.9
    """tau, exclusive."""
    lambda_self: float = 1.0
    """Weight of the pseudo-label loss of the second head."""
    lambda_worst: float = 0.3
    """Weight of the worst-case loss."""
    eta: float = 2.0
    """Weight of the labelled rows in the worst-case loss."""
    reversal: float = 0.1
    """Highest factor of the gradient reversal."""
    warmup: float = 0.1
    """Share of the steps over which the reversal grows."""


@dataclass(frozen=True)
class MixMatch:
    """Sharpened guesses of two weak views, mixed with everything else."""

    name: ClassVar[str] = "mixmatch"
    temperature: float = 0.5
    """Of the sharpening; 1: none."""
    alpha: float = 0.75
    """Of the Beta distribution of the mixing coefficient."""
    lambda_u: float = 75.0
    """Weight of the squared error, reached at the end of the ramp."""
    ramp: float = 0.4
    """Share of the steps over which the weight grows, but at most 16,384 steps."""
    guess: Literal["train_frozen", "eval"] = "train_frozen"
    """BatchNorm while guessing: the batch's statistics, not recorded, or the running ones."""


@dataclass(frozen=True)
class MixedMeanTeacher(MixMatch):
    """MixMatch whose guesses come from the moving-average teacher. A reconstruction from the abstract."""

    name: ClassVar[str] = "mixed_mean_teacher"


@dataclass(frozen=True)
class UPS:
    """Pseudo-labels that are both confident and certain under dropout."""

    name: ClassVar[str] = "ups"
    mode: Literal["rounds", "online"] = "rounds"
    """Select over the whole unlabelled part at the start of each round and begin again, or within each batch."""
    rounds: int = 3
    """Rounds, the first one supervised."""
    passes: int = 10
    """Forward passes with dropout."""
    tau_p: float = 0.5
    """Least mean probability of a positive."""
    tau_n: float = 0.05
    """Mean probability below which a class is negative."""
    kappa_p: float = 0.05
    """Standard deviation below which a positive is certain."""
    kappa_n: float = 0.005
    """Standard deviation below which a negative is certain."""
    temperature_n: float = 2.0
    """Of the probabilities that negatives are judged by."""
    lambda_u: float = 1.0
    """Weight of the pseudo-label loss."""
    balanced_rounds: int = 1
    """First selections in which no class gives more positives than the rarest one (at least 25)."""


@dataclass(frozen=True)
class MSDNN:
    """Momentum contrast on unlabelled signals, then supervised fine-tuning. A reconstruction."""

    name: ClassVar[str] = "msdnn"
    contrast: float = 0.5
    """Share of the steps that contrast, before the labels are used."""
    temperature: float = 0.2
    """Of the contrastive softmax."""
    queue: int = 4096
    """Negative keys that are remembered."""


MethodConfig = (
    ECGMatch
    | Supervised
    | FullySupervised
    | FixMatch
    | FlexMatch
    | SoftMatch
    | PercentMatch
    | DST
    | MixMatch
    | MixedMeanTeacher
    | UPS
    | MSDNN
)
