"""Methods that guess pseudo-labels by a network, and can ask trees on ECG measurements beside it."""

from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from ecgmatch_dist.bank.memory import MemoryBank
from ecgmatch_dist.config import MethodSettings
from ecgmatch_dist.config.roles import added
from ecgmatch_dist.measurements.opinion import Opinion, mixture
from ecgmatch_dist.methods.base import Method, Task
from ecgmatch_dist.methods.row_state import RowState
from ecgmatch_dist.methods.views import Pass
from ecgmatch_dist.network.student import Student


@dataclass(frozen=True)
class AdvisedSettings(MethodSettings):
    """Settings of a method that can ask the trees."""

    measurements: bool = added(False)
    """Trees that read ECG measurements (rhythm, intervals, waves), fitted to the labelled part, are asked beside the network,
    and those that came with `weights`, too. How much they count is chosen on the validation part; Normal is made to agree with
    the other classes. In no paper; a large gain with few labels (docs/experiments.md)."""

    @property
    def asks_trees(self) -> bool:
        return self.measurements


Settings = TypeVar("Settings", bound=AdvisedSettings)


class Advised(Method[Settings]):
    """What the trees say of each unlabelled ECG is measured once, before the first step, and mixed into every later guess.

    State, if the trees are asked: their probabilities [N_U, C] and their share [1]. A subclass that has its own state, or its
    own `prepare`, calls this one's, too.
    """

    def __init__(self, settings: Settings, task: Task) -> None:
        super().__init__(settings, task)
        self.opinion: Opinion | None = None
        self.trees: RowState | None = None
        if settings.measurements:
            self.trees = RowState(task.rows, task.classes, 0.0, task.labels.dtype, task.device)
        self.share = task.labels.new_zeros(1)
        self.normal: int | None = None

    def set_opinion(self, opinion: Opinion) -> None:
        self.opinion, self.normal = opinion, opinion.normal

    def prepare(self, step: int, student: Student, bank: MemoryBank | None, unlabelled: Pass) -> None:
        if step == 0 and self.trees and self.opinion:
            self.opinion.weigh(lambda x: student.infer(x).logits.sigmoid())
            self.share.fill_(self.opinion.share)
            for ids, x in unlabelled():
                self.trees.write(ids, self.opinion.ask(x))
        self.opinion = None  # frees the memory; a resumed run has the answers in its checkpoint

    def advised(self, ids: Tensor, p: Tensor) -> Tensor:
        """The network's probabilities p [..., U, C] of the rows `ids` [U], mixed with the trees' where they are asked."""
        return p if self.trees is None else mixture(p, self.trees.values[ids], self.share.to(p.dtype), self.normal)

    def state_dict(self) -> dict[str, Tensor]:
        return {"trees": self.trees.values, "share": self.share} if self.trees else {}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        if self.trees:
            self.trees.values.copy_(state["trees"])
            self.share.copy_(state["share"])
