"""A method of one's own: the student's strong view must agree with what the teacher says of the weak view.

python examples/train.py FOLDER                                              data to train on
python examples/own_method.py FOLDER                                         one process
torchrun --nproc-per-node 2 examples/own_method.py FOLDER                    two ranks, the same result
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

import ecgmatch_dist as em
from ecgmatch_dist.bank.memory import MemoryBank
from ecgmatch_dist.config import MethodSettings
from ecgmatch_dist.losses import bce
from ecgmatch_dist.methods.base import Method
from ecgmatch_dist.methods.views import Views
from ecgmatch_dist.network.student import Student
from ecgmatch_dist.network.teacher import Teacher
from ecgmatch_dist.presets import demo


@dataclass(frozen=True)
class MeanTeacherSettings(MethodSettings):
    """Squared difference between the student and the moving-average teacher."""

    name, title = "mean_teacher", "Mean Teacher"
    lambda_u: float = 4.0
    """Weight of the difference."""


class MeanTeacher(Method[MeanTeacherSettings], settings=MeanTeacherSettings):
    """Mean Teacher (Tarvainen and Valpola 2017) for several labels at once."""

    def losses(self, views: Views, student: Student, teacher: Teacher, bank: MemoryBank | None) -> dict[str, Tensor]:
        labelled, strong = student(views.labelled, views.strong)
        target = teacher.infer(views.weak.x).logits.sigmoid()
        loss_b = bce(labelled.logits, views.y_b, views.weight_b)
        loss_u = (strong.logits.sigmoid() - target).square().mean()
        return {"loss": loss_b + self.settings.lambda_u * loss_u, "loss/b": loss_b, "loss/u": loss_u}


def main(folder: Path, steps: int = 150) -> Path:
    """Train it on the data of examples/train.py, from the same supervised run; returns the run's folder."""
    (split,) = (folder / "splits").glob("*.json")
    settings = demo()
    config = replace(
        settings,
        split=split,
        shards=str(folder / "shards"),
        runs=folder / "runs",
        method=MeanTeacherSettings(),
        optim=replace(settings.optim, steps=steps),
        pretrain=replace(settings.pretrain, steps=steps),
    )
    run = em.train(config)
    print(f"{run.path}: test MAP {run.result().test.map:.3f}")
    return run.path


if __name__ == "__main__":
    main(Path(sys.argv[1]))
