"""The trees' opinion beside a network's guess: who can ask, that it counts, on any number of ranks and after a resume."""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from ecgmatch_dist.config import methods
from ecgmatch_dist.evaluate import Predictions
from ecgmatch_dist.measurements.opinion import Opinion
from ecgmatch_dist.methods.advised import Advised, AdvisedSettings
from ecgmatch_dist.methods.base import Method
from tests.support.method_trainer import STEPS, C, Trainer
from tests.support.ranks import run_threads

ADVISED = [m for m in methods().values() if issubclass(Method.registered.get(m, Method), Advised)]
CERTAIN: dict[str, dict[str, Any]] = {
    "ups": {"mode": "online", "kappa_p": 1.0, "kappa_n": 1.0, "tau_n": 0.5},
    "percentmatch": {"percentile": "fixed"},
    **{name: {"threshold": 0.8} for name in ("fixmatch", "flexmatch", "dst")},
}


class Lead:
    """In place of trees: class c is on where the mean of lead c is positive."""

    public = None

    def predict(self, x: NDArray[Any]) -> NDArray[np.float64]:
        return np.where(x[:, :C].mean(-1) > 0, 0.99, 0.01)


def opinion(trust: bool, normal: int | None = None) -> Opinion:
    """The validation part says that the trees are always right (share 0.75 is enough), or that the network is (share 0)."""
    truth = np.array([[0, 1] * 3, [1, 0] * 3])[:, :C].astype(np.uint8)
    answers = iter([1 - truth, truth] if trust else [truth, 1 - truth])  # the networks' answer, then the trees'
    return Opinion(
        Lead,  # type: ignore[arg-type]
        lambda _model, _part: Predictions(truth, next(answers).astype(np.float64), np.zeros((2, 0))),
        lambda _: None,
        normal,
    )


def asking(
    settings: type[Any], rank: int = 0, world: int = 1, trust: bool = True, normal: int | None = None
) -> Trainer:
    trainer = Trainer(rank, world, settings(measurements=True, **CERTAIN.get(settings.name, {})))
    trainer.method.set_opinion(opinion(trust, normal))
    return trainer


def test_every_method_that_guesses_can_ask() -> None:
    assert {m.name for m in ADVISED} == {
        "mixmatch", "fixmatch", "flexmatch", "dst", "percentmatch", "softmatch", "ups", "mixed_mean_teacher",
    }  # fmt: skip
    assert {m.name for m in methods().values() if issubclass(m, AdvisedSettings)} == {
        *(m.name for m in ADVISED), "ecgmatch",
    }  # fmt: skip


@pytest.mark.parametrize("settings", ADVISED, ids=lambda m: m.name)
def test_where_the_trees_are_right_they_decide(settings: type[AdvisedSettings]) -> None:
    trainer = asking(settings)
    ids = (torch.arange(16) * 7) % len(trainer.x_u)
    expected = torch.from_numpy(Lead().predict(trainer.x_u[ids].numpy())) > 0.5
    found = trainer.one()
    counted = found["weights"] > 0
    assert counted.any()
    assert torch.equal((found["pseudo_labels"] > 0.5)[counted], expected[counted])


@pytest.mark.parametrize("settings", ADVISED, ids=lambda m: m.name)
def test_a_share_of_zero_changes_nothing(settings: type[Any]) -> None:
    """But for the last digits of UPS, whose logits become probabilities and logits again."""
    asked, plain = asking(settings, trust=False), Trainer(0, 1, settings(**CERTAIN.get(settings.name, {})))
    for _ in range(STEPS):
        asked.one(), plain.one()
    for name, value in plain.state().items():
        torch.testing.assert_close(asked.state()[name], value, rtol=1e-9, atol=1e-11)


def after_steps(rank: int, world: int, settings: type[Any]) -> dict[str, Tensor]:
    trainer = asking(settings, rank, world, normal=C - 1)
    for _ in range(STEPS):
        trainer.one()
    return trainer.state()


@pytest.mark.parametrize("settings", ADVISED, ids=lambda m: m.name)
def test_normal_agrees_with_the_other_classes_in_every_guess(settings: type[Any]) -> None:
    trainer = asking(settings, normal=C - 1)
    trainer.one()
    ids, p = torch.arange(5), torch.full((5, C), 0.5, dtype=torch.float64)
    mixed, plain = trainer.method.advised(ids, p), torch.lerp(p, trainer.method.trees.values[ids], trainer.method.share)
    others = (1 - plain[:, :-1]).prod(1)
    torch.testing.assert_close(mixed[:, -1], (plain[:, -1] * others).sqrt())
    torch.testing.assert_close(mixed[:, :-1], plain[:, :-1])


@pytest.mark.parametrize("settings", ADVISED, ids=lambda m: m.name)
def test_ranks_change_nothing(settings: type[Any]) -> None:
    alone = after_steps(0, 1, settings)
    for state in run_threads(2, after_steps, settings):
        assert state.keys() == alone.keys()
        for name, value in state.items():
            torch.testing.assert_close(value, alone[name], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("settings", ADVISED, ids=lambda m: m.name)
def test_a_resumed_run_has_their_answers_in_its_checkpoint(settings: type[Any]) -> None:
    untouched, killed = asking(settings), asking(settings)
    untouched.one(), killed.one()
    resumed = Trainer(0, 1, settings(measurements=True, **CERTAIN.get(settings.name, {})))  # asks no trees
    resumed.model.load_state_dict(killed.model.state_dict())
    resumed.teacher.load_state_dict(killed.teacher.state_dict())
    resumed.learner.optimizer.load_state_dict(killed.learner.optimizer.state_dict())
    resumed.method.load_state_dict({k: v.clone() for k, v in killed.method.state_dict().items()})
    resumed.step = killed.step
    untouched.one(), resumed.one()
    found = resumed.state()
    assert all(torch.equal(value, found[name]) for name, value in untouched.state().items())
