"""Every method: the same on 1, 2 and 4 ranks, finite in the corners, learning; and what each one promises on its own."""

from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any, get_args

import pytest
import torch
from ranks import run_threads
from torch import Tensor

from ecgmatch_dist import keyed
from ecgmatch_dist.augment import ECGAugment
from ecgmatch_dist.bank import MemoryBank
from ecgmatch_dist.batchnorm import convert_batchnorm
from ecgmatch_dist.config import Augment, Config, Model, Optim
from ecgmatch_dist.methods import configs
from ecgmatch_dist.methods.base import Method, Views
from ecgmatch_dist.methods.dst import DST
from ecgmatch_dist.methods.flexmatch import UNUSED, FlexMatch
from ecgmatch_dist.methods.lift import confidence, hard, sharpen
from ecgmatch_dist.methods.mixmatch import beta
from ecgmatch_dist.methods.partners import canonical, partners
from ecgmatch_dist.methods.registry import build
from ecgmatch_dist.methods.softmatch import SoftMatch
from ecgmatch_dist.methods.table import Table
from ecgmatch_dist.methods.ups import balance, select
from ecgmatch_dist.model import build_model
from ecgmatch_dist.student import Student
from ecgmatch_dist.teacher import Teacher

B, U, N, C, T, STEPS = 8, 16, 40, 5, 64, 3
BUILDING = Lock()
PAPER, MILD = Augment(), Augment(pipeline="mild")
METHODS = [method() for method in get_args(configs.MethodConfig)]
VARIANTS = [
    configs.ECGMatch(neighbours=3, similarity="pearson", refine=False),
    configs.ECGMatch(neighbours=3, similarity="euclidean", query="teacher"),
    configs.FlexMatch(lift="classes", threshold=0.6),
    configs.SoftMatch(align="none", momentum=0.5),
    configs.PercentMatch(score_source="labelled_conditional", weighting="exp_ramp", refresh=2),
    configs.PercentMatch(percentile="fixed", refresh=1),
    configs.MixMatch(guess="eval"),
    configs.UPS(mode="online", kappa_p=1.0, kappa_n=1.0, tau_n=0.5),
    configs.UPS(rounds=3, kappa_p=1.0, kappa_n=1.0, tau_n=0.5),
]


def name(method: Any) -> str:
    changed = [str(v) for k, v in vars(method).items() if v != getattr(type(method)(), k)]
    return "-".join([method.name, *changed])


def data(absent: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Labelled signals and labels, unlabelled signals; each class is an offset in its own lead."""
    generator = torch.Generator().manual_seed(0)
    y = (torch.rand(B * 2, C, generator=generator) < 0.4).double()
    y[:, 0] = 0.0 if absent else y[:, 0]
    x_b = torch.randn(B * 2, 12, T, generator=generator).double()
    x_b[:, :C] += 2 * y[:, :, None]
    return x_b, y, torch.randn(N, 12, T, generator=generator).double()


class Trainer:
    """The loop without files: this rank's share of the same global batches on any number of ranks."""

    def __init__(self, rank: int, world: int, settings: Any, absent: bool = False, views: Augment = PAPER) -> None:
        self.rank, self.world = rank, world
        config = Config(
            method=settings, model=Model(width=8, heads=2, dropout=0.2), optim=Optim(steps=STEPS), augment=views
        )
        self.x_b, self.y_b, self.x_u = data(absent)
        with BUILDING:  # threads share torch's generator, from which initial weights are drawn
            model = build_model(C, config.model, seed=1).double()
            self.method: Method = build(config, self.y_b, N, seed=1)
        model.auxiliary = self.method.auxiliary.double() if self.method.auxiliary else None
        self.model = convert_batchnorm(model, "global")
        self.student, self.teacher = Student(self.model, "fp64"), Teacher(self.model, 0.9, "fp64")
        self.bank = None
        if self.method.uses_bank:
            self.bank = MemoryBank(N, 8, C, settings.neighbours, U, world, backend="torch", overlap=False)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.05, 0.9)
        self.augment = ECGAugment(config.augment)
        self.step = 0

    def share(self, total: int) -> slice:
        return slice(self.rank * total // self.world, (self.rank + 1) * total // self.world)

    def unlabelled(self) -> Any:
        ids = torch.arange(N)[self.share(N)]
        yield ids, self.x_u[ids]

    def one(self) -> dict[str, Tensor]:
        ids_b = ((torch.arange(B) + self.step * B) % len(self.x_b))[self.share(B)]
        ids_u = ((torch.arange(U) * 7 + self.step * 3) % N)[self.share(U)]
        arguments = (self.x_b[ids_b], self.y_b[ids_b], ids_b, self.x_u[ids_u], ids_u)
        views = Views(*arguments, self.augment, seed=1, step=self.step)
        self.method.prepare(self.step, self.student, self.bank, self.unlabelled)
        losses = self.method.losses(views, self.student, self.teacher, self.bank)
        self.optimizer.zero_grad()
        losses["loss"].backward()
        self.optimizer.step()
        self.teacher.update(self.model, self.step)
        self.step += 1
        return {key: value.detach() for key, value in losses.items()}

    def state(self) -> dict[str, Tensor]:
        out = {f"student.{k}": v.clone() for k, v in self.model.state_dict().items() if "num_batches" not in k}
        out |= {f"teacher.{k}": v.clone() for k, v in self.teacher.state_dict().items() if "num_batches" not in k}
        return out | {f"method.{k}": v.clone() for k, v in self.method.state_dict().items()}


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
def test_state_survives(settings: Any) -> None:
    untouched, killed = Trainer(0, 1, settings), Trainer(0, 1, settings)
    for trainer in (untouched, killed):
        trainer.one()
    resumed = Trainer(0, 1, settings)
    resumed.model.load_state_dict(killed.model.state_dict())
    resumed.teacher.load_state_dict(killed.teacher.state_dict())
    resumed.optimizer.load_state_dict(killed.optimizer.state_dict())
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


LEARNERS = [m for m in METHODS if m.name not in ("msdnn", "mixmatch", "mixed_mean_teacher", "ups")]


@pytest.mark.parametrize("settings", [*LEARNERS, configs.UPS(mode="online")], ids=name)
def test_the_labelled_loss_falls(settings: Any) -> None:
    trainer = Trainer(0, 1, settings, views=MILD)  # the paper's would shuffle the leads that tell
    trainer.optimizer = torch.optim.AdamW(trainer.model.parameters(), 0.01)
    losses = [trainer.one()["loss/b"].item() for _ in range(40)]
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])


@pytest.mark.parametrize(
    "settings", [m for m in METHODS if m.name not in ("supervised", "fully_supervised", "msdnn")], ids=name
)
def test_all_show_the_same_diagnostics(settings: Any) -> None:
    losses = Trainer(0, 1, settings).one()
    for entry in ("pseudo_labels", "weights", "predictions"):
        assert losses[entry].shape == (U, C)
        assert ((losses[entry] >= 0) & (losses[entry] <= 1)).all()


# --- the lift to independent sigmoids (two identities), tables, mixing


def test_lift_identities() -> None:
    p = torch.linspace(0.01, 0.99, 99, dtype=torch.float64)
    powers = p**2, (1 - p) ** 2
    torch.testing.assert_close(sharpen(p, 0.5), powers[0] / (powers[0] + powers[1]))
    two_way = torch.where(hard(p) == 1, p, 1 - p)  # P(y^) of the two-way problem
    wrong = -(1 - hard(p)) * p.log() - hard(p) * (1 - p).log()  # bce(p, 1 - y^)
    torch.testing.assert_close(-(1 - two_way).log(), wrong)
    assert (confidence(p) >= 0.5).all()


def test_a_table_takes_the_last_of_equal_rows_and_ignores_padding() -> None:
    table = Table(4, 1, -1, torch.int8, torch.device("cpu"))
    ids, values = torch.tensor([2, 0, 2, -1]), torch.tensor([[1], [1], [0], [1]])
    table.write(ids, values, torch.tensor([[True], [True], [True], [True]]))
    assert table.values.flatten().tolist() == [1, -1, 0, -1]
    table.write(torch.tensor([1, 2]), torch.tensor([[1], [1]]), torch.tensor([[False], [True]]))
    assert table.values.flatten().tolist() == [1, -1, 1, -1]


def test_beta_has_the_moments_of_beta() -> None:
    keys = keyed.row_keys(0, 0, 0, torch.arange(200_000))
    draws = beta(keys, 0.75)
    assert abs(draws.mean() - 0.5) < 0.003
    assert abs(draws.var() - 1 / (4 * (2 * 0.75 + 1))) < 0.002


def _partners(rank: int, world: int, rows: Tensor, sizes: list[int]) -> Tensor:
    mine = torch.from_numpy(canonical([s // world for s in sizes], rank, world))
    return torch.cat([mine[:, None].double(), partners([rows[mine]], [s // world for s in sizes], 3, 4)[0]], 1)


def test_partners_are_the_same_on_any_number_of_ranks() -> None:
    rows, sizes = torch.arange(24.0, dtype=torch.float64)[:, None], [8, 16]
    alone = _partners(0, 1, rows, sizes)
    assert sorted(alone[:, 1].tolist()) == list(range(24))
    for world in (2, 4):
        together = torch.cat(run_threads(world, _partners, rows, sizes))
        assert torch.equal(together[together[:, 0].argsort()], alone)


# --- what each method promises (numbers as in docs/methods.md)


@pytest.mark.parametrize("world", [1, 2])
def test_a_committee_fills_the_bank_with_its_mean(world: int) -> None:
    def filled(rank: int, world: int) -> tuple[Tensor, Tensor]:
        trainer = Trainer(rank, world, configs.ECGMatch(neighbours=2, committee=2))
        with BUILDING:
            other = build_model(C, Model(width=8, heads=2), seed=2).double()
        trainer.method.committee.append(Teacher(other, 1.0, "fp64"))  # type: ignore[attr-defined]
        own, others = trainer.student.look(trainer.x_u), Teacher(other, 1.0, "fp64").look(trainer.x_u)
        trainer.method.prepare(0, trainer.student, trainer.bank, trainer.unlabelled)
        assert trainer.bank is not None
        assert trainer.method.committee == []  # type: ignore[attr-defined]
        mean = (own.logits.sigmoid() + others.logits.sigmoid()) / 2
        return trainer.bank.p[: trainer.bank.length], mean[trainer.bank.start : trainer.bank.stop].float()

    for bank, mean in run_threads(world, filled):
        torch.testing.assert_close(bank, mean, rtol=1e-6, atol=1e-7)


def test_ecgmatch_finds_its_own_row_at_the_start() -> None:
    trainer = Trainer(0, 1, configs.ECGMatch(neighbours=3))
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
    settings = configs.FlexMatch()
    trainer = Trainer(0, 1, settings)
    losses = trainer.one()
    assert (losses["weights"] == 1).all()
    assert isinstance(trainer.method, FlexMatch)
    sure = confidence(losses["predictions"]) >= settings.threshold
    assert ((trainer.method.table.values != UNUSED).sum() == 0) == (not sure.any())


def test_flexmatch_thresholds_by_hand() -> None:
    method = FlexMatch(configs.FlexMatch(), 10, 1, torch.device("cpu"))
    method.table.values.copy_(torch.tensor([[0]] * 6 + [[1]] * 2 + [[UNUSED]] * 2))
    low, high = method.thresholds()
    assert low.item() == pytest.approx(0.95)  # beta = 6/6
    assert high.item() == pytest.approx(0.95 * (1 / 3) / (2 - 1 / 3))  # beta = 2/6


def test_softmatch_weights() -> None:
    method = SoftMatch(configs.SoftMatch(momentum=0.0, align="none"), torch.full((4, 1), 0.5))
    p = torch.tensor([[0.9], [0.8], [0.5], [0.1]], dtype=torch.float64)
    weights = method.update(p)
    sure = torch.tensor([[0.9], [0.8], [0.5], [0.9]], dtype=torch.float64)
    torch.testing.assert_close(method.mu, sure.mean(0))
    torch.testing.assert_close(method.var, sure.var(0))
    assert weights[[0, 1, 3], 0].tolist() == [1.0, 1.0, 1.0]  # at or above the mean
    expected = torch.exp(-((0.5 - sure.mean()) ** 2) / (2 * sure.var() / 4))
    assert weights[2, 0].item() == pytest.approx(expected.item())


def test_dst_reverses_the_adversary_and_spares_the_main_head() -> None:
    trainer = Trainer(0, 1, replace(configs.DST(), threshold=0.5, eta=1.0))
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
    chosen = select(logits, configs.UPS())
    assert chosen.positive.tolist() == [[True, False, False, False]]  # the second and the fourth vary
    assert chosen.negative.tolist() == [[False, False, True, False]]


def test_ups_balance_keeps_the_most_certain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ecgmatch_dist.methods.ups.FLOOR", 1)
    positive = torch.tensor([[True, True], [True, False], [True, False]])
    u = torch.tensor([[0.3, 0.1], [0.1, 0.1], [0.2, 0.1]])
    assert balance(positive, u).tolist() == [[False, True], [True, False], [False, False]]


def test_ups_without_selection_adds_nothing() -> None:
    losses = Trainer(0, 1, configs.UPS()).one()  # the first round selects nothing
    assert losses["loss/u"] == 0
    assert losses["loss"] == losses["loss/b"]


# --- numbers as test assets: a change that is not meant to change results must not change these

GOLDEN = Path(__file__).with_name("golden") / "losses.txt"


def test_golden_losses() -> None:
    """Five steps of every method in fp64. A change that is meant: `python tests/test_methods.py` writes the file anew."""
    assert golden().splitlines()[0] == GOLDEN.read_text().splitlines()[0]
    for line, expected in zip(golden().splitlines()[1:], GOLDEN.read_text().splitlines()[1:], strict=True):
        method, *values = line.split()
        known, *numbers = expected.split()
        assert method == known
        assert [float(v) for v in values] == pytest.approx([float(n) for n in numbers], rel=1e-7), method


def golden() -> str:
    lines = ["method, then the loss of steps 1 to 5"]
    for settings in METHODS:
        trainer = Trainer(0, 1, settings)
        lines.append(" ".join([settings.name, *(f"{trainer.one()['loss'].item():.12g}" for _ in range(5))]))
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    GOLDEN.write_text(golden())
