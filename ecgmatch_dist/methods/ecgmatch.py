"""ECGMatch: the K nearest bank rows vote for pseudo-labels, their agreement weights them, and label correlation is aligned."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ecgmatch_dist.bank.memory import MemoryBank
from ecgmatch_dist.distributed.collectives import all_sum
from ecgmatch_dist.errors import require
from ecgmatch_dist.evaluate import Predictions
from ecgmatch_dist.losses import (
    bce,
    correlation,
    correlation_alignment,
    labelled_correlation,
    neighbour_agreement,
    pseudo_labels,
    total,
)
from ecgmatch_dist.measurements.opinion import Opinion
from ecgmatch_dist.methods.advised import AdvisedSettings
from ecgmatch_dist.methods.base import Arrays, BankOptions, Images, Method, Task
from ecgmatch_dist.methods.views import Pass, Views
from ecgmatch_dist.network.backbones.base import Output
from ecgmatch_dist.network.student import Student
from ecgmatch_dist.network.teacher import Teacher

MAPPED = 2000  # rows in the report's map of features


@dataclass(frozen=True)
class ECGMatchSettings(AdvisedSettings):
    """The paper's method. Its ablations are options."""

    name, title, place = "ecgmatch", "ECGMatch", 90
    neighbours: int = 5
    """K."""
    lambda_u: float = 0.8
    """Weight of the pseudo-label loss; 0: without pseudo-labels."""
    lambda_f: float = 1.2
    """Weight of the label-correlation loss; 0: without correlation alignment."""
    refine: bool = True
    """Weight pseudo-labels by the agreement of the neighbours (equation 6); off: all weights are 1."""
    similarity: Literal["cosine", "pearson", "euclidean", "expected"] = "cosine"
    """Measure of the correlation of two classes; expected: the cosine without its bias for probabilities."""
    query: Literal["student", "teacher"] = "student"
    """Whose features are the query into the bank of teacher features: the student's (paper) or the teacher's."""
    committee: int = 1
    """Number of supervised runs whose mean prediction fills the bank at the start: 1 (paper) is the start alone; the others
    differ in initial weights and in the order of the data."""
    memory: float = 0.0
    """Share of an ECG's old bank prediction that is kept when the teacher predicts it again: 0 (paper) replaces it, 1 never
    changes it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.neighbours >= 1, "method.neighbours", self.neighbours, "at least 1")
        require(self.committee >= 1, "method.committee", self.committee, "at least 1, the start itself")
        require(0 <= self.memory <= 1, "method.memory", self.memory, "between 0 and 1")

    def check_size(self, labelled: int, unlabelled: int, batch: int) -> None:
        remedy = f"at most the {unlabelled} unlabelled recordings of the split, which fill the bank"
        require(self.neighbours <= unlabelled, "method.neighbours", self.neighbours, remedy)
        require(batch <= unlabelled, "optim.unlabelled_batch", batch, remedy)

    @property
    def starts(self) -> int:
        return self.committee


class ECGMatch(Method[ECGMatchSettings], settings=ECGMatchSettings):
    """The paper's method. The correlation R_b of the labelled set is computed once (equation 9)."""

    def __init__(self, settings: ECGMatchSettings, task: Task) -> None:
        super().__init__(settings, task)
        self.bank_options = BankOptions(settings.neighbours, settings.memory)
        self.R_b = labelled_correlation(task.labels, settings.similarity)
        self.R_u = torch.zeros_like(self.R_b)  # of the latest step, for display
        self.committee: list[Teacher] = []  # the supervised runs other than the start
        self.opinion: Opinion | None = None

    def set_committee(self, members: Sequence[Teacher]) -> None:
        self.committee = list(members)

    def set_opinion(self, opinion: Opinion) -> None:
        self.opinion = opinion

    def prepare(self, step: int, student: Student, bank: MemoryBank | None, unlabelled: Pass) -> None:
        """Before the first step, fill the bank from the unaugmented signals: features of the starting weights, and their
        predictions averaged with the committee's."""

        def networks(x: Tensor, own: Output) -> Tensor:
            """The mean prediction of the start and the other supervised runs."""
            others = [member.infer(x).logits for member in self.committee]
            return torch.stack([own.logits, *others]).sigmoid().mean(0)

        if step == 0:
            assert bank is not None
            if self.opinion:
                self.opinion.weigh(lambda x: networks(x, student.infer(x)))
            for ids, x in unlabelled():
                own = student.infer(x)
                p = networks(x, own)
                bank.fill(ids, own.z, self.opinion.mix(x, p) if self.opinion else p)
        # Frees the memory. A resumed run has its bank in the checkpoint.
        self.committee.clear()
        self.opinion = None

    def losses(self, views: Views, student: Student, teacher: Teacher, bank: MemoryBank | None) -> dict[str, Tensor]:
        assert bank is not None
        settings = self.settings

        # The teacher's rows of the whole global batch are written before any neighbour is searched. Exchange and search run in
        # the background during the training forward: only the losses need their result.
        view = views.clean if self.task.bank_view == "clean" else views.weak
        written = teacher.infer(view.x)
        query = student.infer(view.x) if settings.query == "student" else written
        pending = bank.exchange(views.ids_u, written.z, written.logits.sigmoid(), query.z, views.step)

        labelled, weak, strong = student(views.labelled, views.weak, views.strong)

        y_u = pseudo_labels(pending.result().p)  # equation 1
        weights = neighbour_agreement(y_u) if settings.refine else torch.ones_like(y_u)  # equation 6
        loss_b = bce(labelled.logits, views.y_b, views.weight_b)
        loss_u = bce(strong.logits, y_u, weights)
        predictions = torch.cat([weak.logits, strong.logits]).sigmoid()
        R_u = correlation(predictions, settings.similarity, reduce=all_sum)
        loss_f = correlation_alignment(self.R_b, R_u)
        self.R_u = R_u.detach()
        return {
            "loss": total(loss_b, loss_u, loss_f, settings.lambda_u, settings.lambda_f),
            "loss/b": loss_b,
            "loss/u": loss_u,
            "loss/f": loss_f,
            "pseudo_labels": y_u,
            "weights": weights,
            "predictions": query.logits.sigmoid(),
        }

    def images(self, views: Views) -> Images:
        signals = {"x_u": views.x_u, "w(x_u)": views.weak.x, "g(x_u)": views.strong.x}
        return Images(signals, {"R_b": self.R_b, "R_u": self.R_u})

    def artifacts(self, unlabelled: Callable[[], Predictions]) -> dict[str, Arrays]:
        """Both label correlations, and features of the first unlabelled rows for the report's map."""
        predictions = unlabelled()
        R_u = correlation(torch.from_numpy(predictions.probabilities), self.settings.similarity)
        return {
            "correlation.npz": {"R_b": self.R_b.cpu().numpy(), "R_u": R_u.numpy()},
            "bank.npz": {"features": predictions.features[:MAPPED], "labels": predictions.labels[:MAPPED]},
        }
