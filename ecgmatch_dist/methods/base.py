"""The base class of all methods. To write a method, add one file to methods/ with two classes:

    @dataclass(frozen=True)
    class MineSettings(MethodSettings):
        name, title = "mine", "Mine"
        lambda_u: float = 1.0                                        # becomes the option --method.lambda-u

    class Mine(Method[MineSettings], settings=MineSettings):
        def losses(self, views, student, teacher, bank):
            labelled, strong = student(views.labelled, views.strong)        # one training forward
            y_u = teacher.infer(views.weak.x).logits.sigmoid()              # no gradient
            loss_b, loss_u = bce(labelled.logits, views.y_b, views.weight_b), bce(strong.logits, y_u)
            return {"loss": loss_b + self.settings.lambda_u * loss_u, "loss/b": loss_b, "loss/u": loss_u}

`ecgmatch train --method mine` then finds it. fixmatch.py is the smallest complete example.

Rules that keep a run the same on any number of ranks:
- Call `student(...)` once per step. A loss that is a mean over this rank's rows is right as it is: DDP averages gradients.
- Anything else over the global batch goes through `distributed.collectives` (`all_sum`, `gather_rows`).
- Draw random numbers from the keys of the views (`keyed.py`), never from torch's generator.
- Give `views.weight_b` to `bce` beside `views.y_b`: labels that nobody has given are NaN and have weight 0.
- Read no value of a tensor on the host (`.item()`, `if tensor:`): on a GPU the host would wait for it in every step.

Shapes: B labelled rows, U unlabelled rows (this rank's share of the global batches), C classes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ecgmatch_dist.bank.memory import MemoryBank
from ecgmatch_dist.config import MethodSettings
from ecgmatch_dist.evaluate import Predictions
from ecgmatch_dist.measurements.opinion import Opinion
from ecgmatch_dist.methods.views import Pass, Views
from ecgmatch_dist.network.student import Student
from ecgmatch_dist.network.teacher import Teacher

Settings = TypeVar("Settings", bound=MethodSettings)
Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Task:
    """What a method knows before the first step."""

    labels: Tensor
    """[N_B, C] of the whole labelled part, on the run's device and in its precision; NaN where nobody has looked."""
    rows: int
    """N_U, the number of unlabelled recordings."""
    steps: int
    """E, the largest number of steps."""
    width: int
    """D, the length of the features z."""
    seed: int
    bank_view: str = "weak"
    """Input of the teacher and of the query: the "weak" view or the "clean" signal."""

    @property
    def classes(self) -> int:
        return self.labels.shape[1]

    @property
    def device(self) -> torch.device:
        return self.labels.device


class BankOptions(NamedTuple):
    """The memory banks that a method uses."""

    neighbours: int
    """K."""
    memory: float = 0.0
    """Share of a row's old prediction that is kept when the row is written again."""


@dataclass(frozen=True)
class Images:
    """Images for TensorBoard, by name."""

    signals: dict[str, Tensor] = field(default_factory=dict)
    """[b, 12, T]; the first row is drawn."""
    matrices: dict[str, Tensor] = field(default_factory=dict)
    """[C, C]"""


class Method(Generic[Settings]):
    """One way to learn from labelled and unlabelled batches. Only `losses` must be written; everything else has a default."""

    # Attributes that a method may set in __init__

    bank_options: BankOptions | None = None
    """None: the method gets no memory bank."""
    validate_after = 0
    """The run does not validate up to this step, so no earlier model is kept and early stopping does not count."""
    probes = False
    """It does not train the classifier: a linear probe of the labelled part takes its place before a validation."""
    auxiliary: nn.Module | None = None
    """Trained together with the network and discarded after training."""

    registered: ClassVar[dict[type[MethodSettings], type["Method[Any]"]]] = {}

    def __init_subclass__(cls, settings: type[MethodSettings] | None = None) -> None:
        if settings is not None:
            cls.registered[settings] = cls

    def __init__(self, settings: Settings, task: Task) -> None:
        self.settings, self.task = settings, task

    # Training

    def losses(self, views: Views, student: Student, teacher: Teacher, bank: MemoryBank | None) -> dict[str, Tensor]:
        """The losses of one step as scalars by name: "loss" is minimised, "loss/..." are its parts, others are only logged.

        Three optional entries [U, C] without gradient let the report compare methods: "pseudo_labels", their "weights" (0: not
        selected), and "predictions", the student's own probabilities of the same rows.
        """
        raise NotImplementedError

    def prepare(self, step: int, student: Student, bank: MemoryBank | None, unlabelled: Pass) -> None:
        """Called before every step. `unlabelled` makes a pass over the whole unlabelled part, for methods that need one."""

    def phase(self, step: int) -> tuple[int, int]:
        """The step within the current round of training, and the steps of this round. The learning rate follows it, and the
        optimiser forgets its momentum where a later round begins. A method without rounds has one."""
        return step, self.task.steps

    def set_committee(self, members: Sequence[Teacher]) -> None:
        """Called once, before the first step, with the other supervised runs that this one starts from. The first of them is
        not included: the student has its weights."""

    def set_opinion(self, opinion: Opinion) -> None:
        """Called once, before the first step, if the settings ask for it: the opinion of trees on ECG measurements."""

    # Checkpoint

    def state_dict(self) -> dict[str, Tensor]:
        """State that changes during training, without networks and bank. It must be the same on every rank."""
        return {}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        assert not state

    # Records

    def images(self, views: Views) -> Images:
        """Images for TensorBoard, drawn after each validation."""
        return Images()

    def artifacts(self, unlabelled: Callable[[], Predictions]) -> dict[str, Arrays]:
        """Arrays for the run folder, written at the end, by file name. `unlabelled` returns the kept model's predictions of the
        unlabelled part; it is a collective call: all ranks or none."""
        return {}


def build_method(settings: MethodSettings, task: Task) -> Method[Any]:
    """The method that these settings belong to."""
    return Method.registered[type(settings)](settings, task)
