"""Every method: the same on 1, 2 and 4 ranks, finite in corner cases, learning; then each method on its own."""

from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from ecgmatch_dist import keyed
from ecgmatch_dist.config import Model, Optim
from ecgmatch_dist.methods.base import Task
from ecgmatch_dist.methods.binary import confidence, hard, sharpen
from ecgmatch_dist.methods.dst import DST, DSTSettings
from ecgmatch_dist.methods.ecgmatch import ECGMatchSettings
from ecgmatch_dist.methods.flexmatch import UNUSED, FlexMatch, FlexMatchSettings
from ecgmatch_dist.methods.mixing import global_numbers, permute_rows
from ecgmatch_dist.methods.mixmatch import MixMatchSettings, beta
from ecgmatch_dist.methods.percentmatch import PercentMatchSettings
from ecgmatch_dist.methods.row_state import RowState
from ecgmatch_dist.methods.softmatch import SoftMatch, SoftMatchSettings
from ecgmatch_dist.methods.ups import UPS, UPSSettings, balance, select
from ecgmatch_dist.methods.views import Views
from ecgmatch_dist.network.model import build_model
from ecgmatch_dist.network.optim import learning_rate
from ecgmatch_dist.network.teacher import Teacher
from tests.support.method_trainer import LR, METHODS, MILD, STEPS, B, C, Trainer, U
from tests.support.ranks import run_threads

VARIANTS = [
    ECGMatchSettings(neighbours=3, similarity="pearson", refine=False),
    ECGMatchSettings(neighbours=3, similarity="euclidean", query="teacher"),
    FlexMatchSettings(lift="classes", threshold=0.6),
    SoftMatchSettings(align="none", momentum=0.5),
    PercentMatchSettings(score_source="labelled_conditional", weighting="exp_ramp", refresh=2),
    PercentMatchSettings(percentile="fixed", refresh=1),
    MixMatchSettings(guess="eval"),
    UPSSettings(mode="online", kappa_p=1.0, kappa_n=1.0, tau_n=0.5),
    UPSSettings(rounds=3, kappa_p=1.0, kappa_n=1.0, tau_n=0.5),
]


def name(method: Any) -> str:
    changed = [str(v) for k, v in vars(method).items() if v != getattr(type(method)(), k)]
    return "-".join([method.name, *changed])


def after_steps(rank: int, world: int, settings: Any) -> dict[str, Tensor]:
    trainer = Trainer(rank, world, settings)
    for _ in range(STEPS):
        trainer.one()
    return trainer.state()


@pytest.mark.parametrize("settings", METHODS + VARIANTS, ids=name)
def test_ranks_change_nothing(settings: Any) -> None:
    alone = after_steps(0, 1, settings)
    for world in (2, 4):
        for state in run_threads(world, after_steps, settings):
            assert state.keys() == alone.keys()
            for key, value in state.items():
                torch.testing.assert_close(
                    value, alone[key], rtol=1e-9, atol=1e-11, msg=lambda m, key=key: f"{key}: {m}"
                )


@pytest.mark.parametrize("settings", METHODS + VARIANTS, ids=name)
def test_a_checkpoint_holds_the_whole_state(settings: Any) -> None:
    untouched, killed = Trainer(0, 1, settings), Trainer(0, 1, settings)
    for trainer in (untouched, killed):
        trainer.one()
    resumed = Trainer(0, 1, settings)
    resumed.model.load_state_dict(killed.model.state_dict())
    resumed.teacher.load_state_dict(killed.teacher.state_dict())
    resumed.learner.optimizer.load_state_dict(killed.learner.optimizer.state_dict())
    resumed.method.load_state_dict({k: v.clone() for k, v in killed.method.state_dict().items()})
    if resumed.bank and killed.bank:
        resumed.bank.load(killed.bank.state())
    resumed.step = killed.step
    for _ in range(STEPS - 1):
        untouched.one()
        resumed.one()
    for key, value in untouched.state().items():
        assert torch.equal(value, resumed.state()[key]), key


@pytest.mark.parametrize("settings", METHODS, ids=name)
def test_finite_with_an_absent_class(settings: Any) -> None:
    trainer = Trainer(0, 1, settings, absent=True)
    for _ in range(STEPS):
        losses = trainer.one()
        assert all(value.isfinite().all() for value in losses.values())
    assert all(value.isfinite().all() for value in trainer.state().values())


LEARNERS = [m for m in METHODS if m.name not in ("contrastive", "msdnn", "mixmatch", "mixed_mean_teacher", "ups")]


@pytest.mark.parametrize("settings", [*LEARNERS, UPSSettings(mode="online")], ids=name)
def test_the_labelled_loss_falls(settings: Any) -> None:
    trainer = Trainer(0, 1, settings, views=MILD)  # the paper's would shuffle the leads that carry the classes
    trainer.learner.optimizer = torch.optim.AdamW([{"params": trainer.model.parameters(), "scale": 0.01 / LR}])
    losses = [trainer.one()["loss/b"].item() for _ in range(40)]
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])


@pytest.mark.parametrize(
    "settings",
    [m for m in METHODS if m.name not in ("contrastive", "supervised", "fully_supervised", "msdnn")],
    ids=name,
)
def test_all_return_the_same_diagnostics(settings: Any) -> None:
    losses = Trainer(0, 1, settings).one()
    for entry in ("pseudo_labels", "weights", "predictions"):
        assert losses[entry].shape == (U, C)
        assert ((losses[entry] >= 0) & (losses[entry] <= 1)).all()


# --- independent sigmoids (two identities), state per row, mixing


def test_binary_identities() -> None:
    p = torch.linspace(0.01, 0.99, 99, dtype=torch.float64)
    powers = p**2, (1 - p) ** 2
    torch.testing.assert_close(sharpen(p, 0.5), powers[0] / (powers[0] + powers[1]))
    two_way = torch.where(hard(p) == 1, p, 1 - p)  # P(y^) of the two-way problem
    wrong = -(1 - hard(p)) * p.log() - hard(p) * (1 - p).log()  # bce(p, 1 - y^)
    torch.testing.assert_close(-(1 - two_way).log(), wrong)
    assert (confidence(p) >= 0.5).all()


def test_row_state_takes_the_last_of_equal_rows_and_ignores_padding() -> None:
    state = RowState(4, 1, -1, torch.int8, torch.device("cpu"))
    ids, values = torch.tensor([2, 0, 2, -1]), torch.tensor([[1], [1], [0], [1]])
    state.write(ids, values, torch.tensor([[True], [True], [True], [True]]))
    assert state.values.flatten().tolist() == [1, -1, 0, -1]
    state.write(torch.tensor([1, 2]), torch.tensor([[1], [1]]), torch.tensor([[False], [True]]))
    assert state.values.flatten().tolist() == [1, -1, 1, -1]


def test_beta_has_the_moments_of_beta() -> None:
    keys = keyed.row_keys(0, 0, 0, torch.arange(200_000))
    draws = beta(keys, 0.75)
    assert abs(draws.mean() - 0.5) < 0.003
    assert abs(draws.var() - 1 / (4 * (2 * 0.75 + 1))) < 0.002


def _permuted(rank: int, world: int, rows: Tensor, sizes: list[int]) -> Tensor:
    mine = torch.from_numpy(global_numbers([s // world for s in sizes], rank, world))
    return torch.cat([mine[:, None].double(), permute_rows([rows[mine]], [s // world for s in sizes], 3, 4)[0]], 1)


def test_rows_are_permuted_alike_on_any_number_of_ranks() -> None:
    rows, sizes = torch.arange(24.0, dtype=torch.float64)[:, None], [8, 16]
    alone = _permuted(0, 1, rows, sizes)
    assert sorted(alone[:, 1].tolist()) == list(range(24))
    for world in (2, 4):
        together = torch.cat(run_threads(world, _permuted, rows, sizes))
        assert torch.equal(together[together[:, 0].argsort()], alone)


# --- each method on its own (docs/methods.md)


@pytest.mark.parametrize("world", [1, 2])
def test_a_committee_fills_the_bank_with_its_mean(world: int) -> None:
    def filled(rank: int, world: int) -> tuple[Tensor, Tensor]:
        trainer = Trainer(rank, world, ECGMatchSettings(neighbours=2, committee=2))
        other = build_model(C, Model(width=8, heads=2), seed=2).double()
        trainer.method.set_committee([Teacher(other, 1.0, "fp64")])
        own, others = trainer.student.infer(trainer.x_u), Teacher(other, 1.0, "fp64").infer(trainer.x_u)
        trainer.method.prepare(0, trainer.student, trainer.bank, trainer.unlabelled)
        assert trainer.bank is not None
        assert trainer.method.committee == []  # type: ignore[attr-defined]
        mean = (own.logits.sigmoid() + others.logits.sigmoid()) / 2
        return trainer.bank.p[: trainer.bank.length], mean[trainer.bank.start : trainer.bank.stop].float()

    for bank, mean in run_threads(world, filled):
        torch.testing.assert_close(bank, mean, rtol=1e-6, atol=1e-7)


def test_ecgmatch_finds_its_own_row_at_the_start() -> None:
    trainer = Trainer(0, 1, ECGMatchSettings(neighbours=3))
    assert trainer.bank is not None
    asked: list[Tensor] = []
    exchange = trainer.bank.exchange

    def spy(ids: Tensor, *rest: Any) -> Any:
        pending = exchange(ids, *rest)
        asked.append((pending.result().rows == ids[:, None]).any(1))
        return pending

    trainer.bank.exchange = spy  # type: ignore[method-assign]
    trainer.one()
    assert asked[0].all()  # teacher and student are equal, and rows are written before the search


def test_flexmatch_admits_everything_while_nothing_is_learnt() -> None:
    settings = FlexMatchSettings()
    trainer = Trainer(0, 1, settings)
    losses = trainer.one()
    assert (losses["weights"] == 1).all()
    assert isinstance(trainer.method, FlexMatch)
    sure = confidence(losses["predictions"]) >= settings.threshold
    assert ((trainer.method.sides.values != UNUSED).sum() == 0) == (not sure.any())


def test_flexmatch_thresholds_by_hand() -> None:
    method = FlexMatch(FlexMatchSettings(), Task(torch.zeros(4, 1), rows=10, steps=1, width=8, seed=1))
    method.sides.values.copy_(torch.tensor([[0]] * 6 + [[1]] * 2 + [[UNUSED]] * 2))
    low, high = method.thresholds()
    assert low.item() == pytest.approx(0.95)  # beta = 6/6
    assert high.item() == pytest.approx(0.95 * (1 / 3) / (2 - 1 / 3))  # beta = 2/6


def test_softmatch_weights() -> None:
    method = SoftMatch(
        SoftMatchSettings(momentum=0.0, align="none"), Task(torch.full((4, 1), 0.5), rows=4, steps=1, width=8, seed=1)
    )
    p = torch.tensor([[0.9], [0.8], [0.5], [0.1]], dtype=torch.float64)
    weights = method.update(p)
    sure = torch.tensor([[0.9], [0.8], [0.5], [0.9]], dtype=torch.float64)
    torch.testing.assert_close(method.mu, sure.mean(0))
    torch.testing.assert_close(method.var, sure.var(0))
    assert weights[[0, 1, 3], 0].tolist() == [1.0, 1.0, 1.0]  # at or above the mean
    expected = torch.exp(-((0.5 - sure.mean()) ** 2) / (2 * sure.var() / 4))
    assert weights[2, 0].item() == pytest.approx(expected.item())


def test_dst_reverses_the_adversary_and_spares_the_main_head() -> None:
    trainer = Trainer(0, 1, replace(DSTSettings(), threshold=0.5, eta=1.0))
    assert isinstance(trainer.method, DST)
    assert trainer.method.reversal(0) == 0
    ids_b, ids_u = torch.arange(B), torch.arange(U)

    def encoder_gradient(r: float) -> Tensor:
        trainer.method.reversal = lambda step: r  # type: ignore[attr-defined,method-assign]
        views = Views(trainer.x_b[ids_b], trainer.y_b[ids_b], ids_b, trainer.x_u[ids_u], ids_u, trainer.augment, 1, 5)
        losses = trainer.method.losses(views, trainer.student, trainer.teacher, None)
        stem = trainer.model.stem.weight
        return torch.autograd.grad(losses["loss/worst"], stem, retain_graph=True)[0]

    torch.testing.assert_close(encoder_gradient(0.1), -encoder_gradient(-0.1))
    assert encoder_gradient(0.0).abs().max() == 0
    views = Views(trainer.x_b[ids_b], trainer.y_b[ids_b], ids_b, trainer.x_u[ids_u], ids_u, trainer.augment, 1, 5)
    loss_u = trainer.method.losses(views, trainer.student, trainer.teacher, None)["loss/u"]
    main = torch.autograd.grad(loss_u, trainer.model.classifier.weight, allow_unused=True)[0]
    assert main is None


def test_ups_selects_the_confident_and_certain() -> None:
    logits = torch.tensor([[[6.0, 6.0, -9.0, 0.0]], [[6.1, -6.0, -9.1, 0.5]]], dtype=torch.float64)  # two passes
    chosen = select(logits, UPSSettings())
    assert chosen.positive.tolist() == [[True, False, False, False]]  # the second and the fourth vary
    assert chosen.negative.tolist() == [[False, False, True, False]]


def test_each_round_of_ups_begins_anew() -> None:
    """Schedule and momentum, as in the authors' code: a network that trains again needs the whole learning rate."""
    task = Trainer(0, 1, UPSSettings(rounds=3)).method.task
    for steps, phases in ((6, [0, 1] * 3), (7, [0, 1, 2, 0, 1, 2, 0])):
        method = UPS(UPSSettings(rounds=3), replace(task, steps=steps))
        assert [method.phase(step)[0] for step in range(steps)] == phases
    assert method.phase(6) == (0, 1)
    rates = [learning_rate(Optim(steps=7), *method.phase(step)) for step in (0, 3, 6)]
    assert rates == [0.03, 0.03, 0.03]
    kept = UPS(UPSSettings(rounds=3, restart="weights"), replace(task, steps=7))
    assert [kept.phase(step) for step in (0, 3, 6)] == [(0, 7), (3, 7), (6, 7)]


@pytest.mark.parametrize("restart", ["all", "weights"])
def test_a_round_of_ups_forgets_the_momentum(restart: Literal["all", "weights"]) -> None:
    trainer = Trainer(0, 1, UPSSettings(rounds=3, restart=restart))  # three steps: each is a round
    for _ in range(2):
        trainer.one()
    optimizer = trainer.learner.optimizer
    fresh = [
        torch.equal(state["momentum_buffer"], p.grad) for p, state in optimizer.state.items() if p.grad is not None
    ]
    assert fresh
    assert all(fresh) == (restart == "all")


def test_ups_balance_keeps_the_most_certain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ecgmatch_dist.methods.ups.FLOOR", 1)
    positive = torch.tensor([[True, True], [True, False], [True, False]])
    u = torch.tensor([[0.3, 0.1], [0.1, 0.1], [0.2, 0.1]])
    assert balance(positive, u).tolist() == [[False, True], [True, False], [False, False]]


def test_ups_without_selection_adds_nothing() -> None:
    losses = Trainer(0, 1, UPSSettings()).one()  # the first round selects nothing
    assert losses["loss/u"] == 0
    assert losses["loss"] == losses["loss/b"]
