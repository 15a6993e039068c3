"""Trees on measurements, and their share in the committee."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sklearn.ensemble import ExtraTreesClassifier
from torch import Tensor, nn

from ecgmatch_dist.config import Bank, Optim
from ecgmatch_dist.data.labels import UNKNOWN
from ecgmatch_dist.data.preprocess import Preprocess
from ecgmatch_dist.evaluate import Predictions
from ecgmatch_dist.measurements.measure import measure_all
from ecgmatch_dist.measurements.opinion import Opinion, mixture
from ecgmatch_dist.measurements.trees import FOREST, MeasurementTrees, descend, fit_trees, grow
from ecgmatch_dist.methods.ecgmatch import ECGMatchSettings
from ecgmatch_dist.recovery.signals import Stopped
from tests.support.measured import Shards, recordings
from tests.support.ranks import run_processes, run_threads
from tests.support.training import assert_same_bits, final_state, run, tiny


def fitted(x: NDArray[np.float32], y: NDArray[np.uint8], seed: int = 0, threads: int = 1) -> MeasurementTrees:
    return MeasurementTrees(grow(measure_all(x, 100), y, seed, threads), 100)


def test_trees_learn_what_the_measurements_show() -> None:
    (x, y), (new, truth) = recordings(60, 0), recordings(40, 1)
    p = fitted(x, y).predict(new)
    assert ((p[:, 0] > 0.5) == truth[:, 0]).mean() > 0.9
    assert p.shape == truth.shape


def test_threads_change_no_bit_and_a_seed_does() -> None:
    (x, y), (new, _) = recordings(40, 0), recordings(10, 1)
    one, two, other = (fitted(x, y, seed, threads).predict(new) for seed, threads in ((0, 1), (0, 2), (1, 1)))
    assert np.array_equal(one, two)
    assert not np.array_equal(one, other)


def test_the_arrays_predict_as_scikit_learn_does() -> None:
    (x, y), (new, _) = recordings(50, 0), recordings(30, 1)
    rows, asked = measure_all(x, 100), measure_all(new, 100)
    reference = [ExtraTreesClassifier(**FOREST, random_state=3).fit(rows, column) for column in y.T]
    expected = np.stack([forest.predict_proba(asked)[:, 1] for forest in reference], 1)
    assert np.array_equal(descend(grow(rows, y, seed=3), asked), expected)


@pytest.mark.parametrize(("world", "n"), [(2, 41), (3, 2)])
def test_all_ranks_have_the_trees_of_rank_0(world: int, n: int) -> None:
    """Machines that round differently would grow other trees, as another seed does."""
    (x, y), (new, _) = recordings(n, 0), recordings(10, 1)
    y[:2] = [[1, 0], [0, 1]]

    def fit(rank: int, world: int) -> NDArray[np.float64]:
        return fit_trees(Shards(x), np.arange(n), y, seed=rank).predict(new)  # type: ignore[arg-type]

    first, *others = run_threads(world, fit)
    assert np.array_equal(first, fitted(x, y).predict(new))
    assert all(np.array_equal(first, other) for other in others)


def test_signals_of_another_rate_are_measured_at_theirs() -> None:
    """Fast shards: what is learnt and what is asked is measured alike."""
    (x, y), (new, _) = recordings(40, 0), recordings(10, 1)
    store = Shards(np.repeat(x, 2, axis=2))
    store.preprocess = Preprocess(rate=200, length=600)
    trees, asked = fit_trees(store, np.arange(40), y, seed=0), np.repeat(new, 2, axis=2)  # type: ignore[arg-type]
    assert np.array_equal(trees.predict(asked), descend(trees.forests, measure_all(asked, 200)))
    assert not np.array_equal(trees.predict(asked), descend(trees.forests, measure_all(asked, 100)))


def test_an_unknown_label_is_no_negative() -> None:
    """Half of the positives lose their labels: as negatives they would halve the probability."""
    (x, y), (new, truth) = recordings(80, 0), recordings(40, 1)
    hidden = y.copy()
    hidden[np.flatnonzero(y[:, 0])[::2], 0] = UNKNOWN
    p = fitted(x, hidden).predict(new)[:, 0]
    assert p[truth[:, 0] == 1].mean() > 0.75
    nobody = np.full_like(y, UNKNOWN)
    assert fitted(x, nobody).predict(new) == pytest.approx(0.5)


def test_a_class_without_positives_gets_its_frequency() -> None:
    (x, y), (new, _) = recordings(20, 0), recordings(5, 1)
    y[:, 1] = 0
    assert fitted(x, y).predict(new)[:, 1] == pytest.approx(0.5 / 21)


@pytest.mark.parametrize(("networks", "expected"), [("right", 0.0), ("wrong", 1.0)])
def test_the_validation_part_chooses_the_share(networks: str, expected: float) -> None:
    (x, y), (validation, truth) = recordings(60, 0), recordings(60, 1)
    said: list[str] = []

    def validate(model: nn.Module, part: str) -> Predictions:
        with torch.no_grad():
            p = model(torch.from_numpy(validation)).logits.sigmoid().numpy()
        return Predictions(truth, p, p[:, :0])

    def ask(x: Tensor) -> Tensor:
        known = torch.from_numpy(truth).float()
        known = known if networks == "right" else 1 - known
        return 0.1 + 0.8 * known[: len(x)]

    opinion = Opinion(lambda: fitted(x, y), validate, said.append)
    opinion.weigh(ask)
    if networks == "wrong":
        assert opinion.share >= 0.75
    else:
        assert opinion.share == expected
    signals = torch.from_numpy(validation[:4])
    p = torch.full((4, 2), 0.25)
    mixed = (1 - opinion.share) * p + opinion.share * opinion.ask(signals)
    torch.testing.assert_close(opinion.mix(signals, p), mixed)
    assert "validation MAP" in said[0]


def test_normal_agrees_with_the_other_classes() -> None:
    """One class of three stands for none of the others: .9 by itself, .5 * .8 by the others."""
    p = torch.tensor([[0.5, 0.9, 0.2], [0.0, 0.25, 0.0]], dtype=torch.float64)
    mixed = mixture(p, p, 0.5, normal=1)
    expected = torch.tensor([[0.5, (0.9 * 0.5 * 0.8) ** 0.5, 0.2], [0.0, 0.5, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(mixed, expected)
    torch.testing.assert_close(mixture(p, 1 - p, 0.25, None), 0.75 * p + 0.25 * (1 - p))


@pytest.mark.parametrize(("normal", "expected"), [(None, 0.0), (1, 0.75)])
def test_the_share_is_chosen_for_what_is_used(normal: int | None, expected: float) -> None:
    """The networks know the second class alone, the trees the first alone. If the second is Normal, the first tells it."""
    truth = np.array([[1, 0], [1, 0], [0, 1], [0, 1]], np.uint8)
    networks, trees = (
        np.array([[first, second] for first, second in zip(*columns, strict=True)])
        for columns in (([0.1, 0.95, 0.9, 0.9], [0.2, 0.2, 0.9, 0.7]), ([1.0, 1.0, 0.0, 0.0], [0.9, 0.9, 0.1, 0.1]))
    )
    answers = iter(Predictions(truth, p, np.zeros((4, 0))) for p in (networks, trees))
    opinion = Opinion(lambda: fitted(*recordings(20, 0)), lambda model, part: next(answers), lambda _: None, normal)
    opinion.weigh(lambda x: x)
    assert opinion.share == expected


def test_a_run_knows_which_class_is_normal(data: Path, tmp_path: Path) -> None:
    """What fills the bank of a run on ECGMatch's five classes agrees with the other four."""
    optim = Optim(steps=1, labelled_batch=8, unlabelled_batch=16)
    method = ECGMatchSettings(neighbours=3, measurements=True, memory=1.0)
    bank = final_state(run(tiny(data, tmp_path, method, optim=optim, pretrain=optim)))["bank.p"]
    no_other = (1 - bank[:, :4]).prod(1)
    assert (bank[:, 4] <= no_other.sqrt() + 1e-6).all()  # a probability of at most 1, times that of no other class


def test_a_resumed_run_needs_no_trees(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they have said is in the bank, and the bank is in the checkpoint. At the end they are asked once more."""
    method = ECGMatchSettings(neighbours=3, measurements=True, memory=1.0)
    optim = Optim(steps=4, labelled_batch=8, unlabelled_batch=16)
    config = tiny(data, tmp_path / "untouched", method, optim=optim, pretrain=optim)
    untouched = run(config)
    stopped = replace(config, runs=tmp_path / "stopped")
    run(stopped.supervised())
    monkeypatch.setenv("ECGMATCH_STOP_AT", "1")
    with pytest.raises(Stopped):
        run(stopped)
    monkeypatch.delenv("ECGMATCH_STOP_AT")
    monkeypatch.setattr(Opinion, "weigh", None)
    assert_same_bits(final_state(untouched), final_state(run(stopped)))


def _train(rank: int, world: int, data: Path, runs: Path) -> str:
    method = ECGMatchSettings(neighbours=3, measurements=True, memory=1.0)
    optim = Optim(steps=2, labelled_batch=8, unlabelled_batch=16)
    config = tiny(data, runs, method, optim=optim, pretrain=optim, bank=Bank(shard_group="world"))
    folder = run(config)
    return (folder / "log.txt").read_text()


@pytest.mark.slow
def test_two_ranks_ask_the_same_trees(data: Path, tmp_path: Path) -> None:
    """The bank's predictions are never changed (memory 1), so they are what the committee has said."""
    texts = [run_processes(world, _train, data, tmp_path / str(world), timeout=120)[0] for world in (1, 2)]
    lines = [[line[21:] for line in text.splitlines() if "second opinion" in line] for text in texts]
    assert lines[0] == lines[1]
    assert len(lines[0]) == 2  # before the first step, and with the network at the end
    name = "within-chapman@0.2.s20.ecgmatch"
    one, two = (
        {k: v for k, v in final_state(tmp_path / str(world) / name).items() if k == "bank.p"} for world in (1, 2)
    )
    torch.testing.assert_close(one["bank.p"], two["bank.p"], rtol=1e-5, atol=1e-6)
