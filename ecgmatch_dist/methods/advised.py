"""Methods that guess pseudo-labels by a network, and can ask advisers beside it (`measurements/opinion.py`)."""

from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from ecgmatch_dist.bank.memory import MemoryBank
from ecgmatch_dist.config import MethodSettings
from ecgmatch_dist.config.roles import added
from ecgmatch_dist.measurements.opinion import Opinion
from ecgmatch_dist.methods.base import Method, Task
from ecgmatch_dist.methods.row_state import RowState
from ecgmatch_dist.methods.views import Pass
from ecgmatch_dist.network.student import Student


@dataclass(frozen=True)
class AdvisedSettings(MethodSettings):
    """Settings of a method that can ask advisers."""

    measurements: bool = added(False)
    """Trees that read ECG measurements (rhythm, intervals, waves), fitted to the labelled part, are asked beside the network.
    How much they count is chosen on the validation part. In no paper; a large gain with few labels (docs/experiments.md)."""
    convolutions: bool = added(False)
    """A ridge regression on random convolutions of the signals, fitted to the labelled part, is asked, too. Beside the trees it
    has one of three votes."""

    @property
    def advisers(self) -> tuple[str, ...]:
        asked = {"trees": self.measurements, "convolutions": self.convolutions}
        return tuple(name for name, on in asked.items() if on)


Settings = TypeVar("Settings", bound=AdvisedSettings)


class Advised(Method[Settings]):
    """What the advisers say of each unlabelled ECG is computed once, before the first step, and mixed into every later guess.

    State, if anybody is asked: their probabilities [N_U, C] and their share [1]. A subclass that has its own state, or its
    own `prepare`, calls this one's, too.
    """

    def __init__(self, settings: Settings, task: Task) -> None:
        super().__init__(settings, task)
        self.opinion: Opinion | None = None
        self.advice: RowState | None = None
        if settings.advisers:
            self.advice = RowState(task.rows, task.classes, 0.0, task.labels.dtype, task.device)
        self.share = task.labels.new_zeros(1)

    def set_opinion(self, opinion: Opinion) -> None:
        self.opinion = opinion

    def prepare(self, step: int, student: Student, bank: MemoryBank | None, unlabelled: Pass) -> None:
        if step == 0 and self.advice and self.opinion:
            self.opinion.weigh(lambda x: student.infer(x).logits.sigmoid())
            self.share.fill_(self.opinion.share)
            for ids, x in unlabelled():
                self.advice.write(ids, self.opinion.ask(x))
        self.opinion = None  # frees the memory; a resumed run has the answers in its checkpoint

    def advised(self, ids: Tensor, p: Tensor) -> Tensor:
        """The network's probabilities p [..., U, C] of the rows `ids` [U], mixed with the advice where somebody is asked."""
        return p if self.advice is None else torch.lerp(p, self.advice.values[ids].to(p.dtype), self.share.to(p.dtype))

    def state_dict(self) -> dict[str, Tensor]:
        return {"advice": self.advice.values, "share": self.share} if self.advice else {}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        if self.advice:
            self.advice.values.copy_(state["advice"])
            self.share.copy_(state["share"])
