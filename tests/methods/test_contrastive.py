"""Self-supervised starts: the loss against loops, negatives of all ranks, the linear probe, and chains of runs."""

import json
import math
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import normalize

from ecgmatch_dist.config import Augment, Config, Model, Optim, Runtime
from ecgmatch_dist.data.labels import UNKNOWN
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.methods.contrastive import ContrastiveSettings, nt_xent
from ecgmatch_dist.methods.ecgmatch import ECGMatchSettings
from ecgmatch_dist.methods.fixmatch import FixMatchSettings
from ecgmatch_dist.methods.supervised import SupervisedSettings
from ecgmatch_dist.network.probe import linear_probe
from tests.support.ranks import run_processes, run_threads
from tests.support.training import assert_near, assert_same_bits, final_state, run, tiny

NAME = "within-chapman@0.2.s20"


def slow_nt_xent(one: Tensor, other: Tensor, ids: Tensor, temperature: float) -> float:
    """One view after the other, as the definition says."""
    views = [(i, int(ids[i]), normalize(x[i], dim=0)) for x in (one, other) for i in range(len(ids))]
    total = 0.0
    for a, (row, id_, view) in enumerate(views):
        scores = {b: float(view @ views[b][2]) / temperature for b in range(len(views)) if b != a}
        positive = next(b for b in scores if views[b][0] == row)
        kept = {b: score for b, score in scores.items() if views[b][1] != id_ or b == positive}
        total += math.log(sum(math.exp(score) for score in kept.values())) - kept[positive]
    return total / len(views)


def pairs() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    one, other = (torch.randn(16, 6, generator=generator, dtype=torch.float64) for _ in range(2))
    ids = torch.arange(16)
    ids[9], ids[15] = 2, 2  # a recording that occurs three times, on several ranks
    return one, other, ids


def test_the_loss_is_its_definition() -> None:
    one, other, ids = pairs()
    assert float(nt_xent(one, other, ids, 0.2)) == pytest.approx(slow_nt_xent(one, other, ids, 0.2), rel=1e-12)
    assert float(nt_xent(one, one, ids, 0.01)) < float(nt_xent(one, other, ids, 0.01))


def _gradients(rank: int, world: int) -> tuple[Tensor, Tensor]:
    """The loss of all ranks and the gradient of each row, as DDP would average them: 1 / W of what each rank computes."""
    one, other, ids = pairs()
    share = slice(rank * 16 // world, (rank + 1) * 16 // world)
    one, other = one[share].requires_grad_(), other[share].requires_grad_()
    loss = nt_xent(one, other, ids[share], 0.2)
    loss.backward()  # type: ignore[no-untyped-call]
    assert one.grad is not None
    assert other.grad is not None
    return loss.detach(), torch.cat([one.grad, other.grad], 1) / world


@pytest.mark.parametrize(
    ("runner", "world"), [(run_threads, 2), (run_threads, 8), (run_threads, 16), (run_processes, 2)]
)
def test_negatives_and_gradients_cross_the_ranks(runner: Any, world: int) -> None:
    alone_loss, alone = _gradients(0, 1)
    found = runner(world, _gradients)
    torch.testing.assert_close(torch.stack([loss for loss, _ in found]).mean(), alone_loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(torch.cat([gradient for _, gradient in found]), alone, rtol=1e-10, atol=1e-14)


def test_the_linear_probe_separates_what_a_plane_separates_and_survives_lonely_classes() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((200, 5)) * [1, 2, 1e-9, 1, 0] + 3
    labels = np.column_stack([x[:, 0] > 3, x[:, 1] > 3, np.zeros(200), np.ones(200)]).astype(np.uint8)
    weight, bias = linear_probe(x, labels)
    logits = x @ weight.T + bias
    assert ((logits[:, :2] > 0) == (labels[:, :2] > 0)).mean() > 0.95
    assert np.abs(weight).max() < 100  # also of what hardly varies
    assert np.allclose(logits[:, 2], -logits[:, 3])
    assert (logits[:, 2] < -5).all()
    some, half = labels.copy(), labels[100:]
    some[:100, 0] = UNKNOWN
    assert np.allclose(linear_probe(x, some)[0][1:], weight[1:])
    assert np.corrcoef(linear_probe(x, some)[0][0], linear_probe(x[100:], half)[0][0])[0, 1] > 0.999


def chain(data: Path, runs: Path, method: Any = None, **changes: Any) -> Config:
    contrast = Optim(optimizer="adamw", lr=2e-3, encoder_lr_scale=1.0, steps=8, unlabelled_batch=16)
    options: dict[str, Any] = {
        "model": Model(width=16, first_width=8, backbone="resnet1d"),
        "augment": Augment(pipeline="mild", labelled="strong", crop=64),
        "selfsupervised": "contrastive",
        "contrast": contrast,
    }
    return tiny(data, runs, method or ECGMatchSettings(neighbours=3), **(options | changes))


def test_a_chain_of_runs_each_trained_once(data: Path, tmp_path: Path) -> None:
    config = chain(data, tmp_path, ECGMatchSettings(neighbours=3, committee=2, memory=1.0))
    folder = run(config)
    first, second, third = (tmp_path / f"{NAME}.{name}" for name in ("contrastive", "supervised", "supervised.member2"))
    assert {path.name for path in tmp_path.iterdir()} == {first.name, second.name, third.name, folder.name}
    results = {path.name: json.loads((path / "result.json").read_text()) for path in tmp_path.iterdir()}
    assert results[folder.name]["started_from"] == second.name
    assert [results[path.name]["started_from"] for path in (first, second, third)] == [None, first.name, first.name]
    before = {path: (path / "result.json").stat().st_mtime_ns for path in (first, second, third)}
    run(replace(config, method=FixMatchSettings()))
    run(replace(config, method=SupervisedSettings()))
    assert {path: (path / "result.json").stat().st_mtime_ns for path in before} == before

    run(chain(data, tmp_path, SupervisedSettings(), selfsupervised="none", tag="scratch"))
    started = load_file(second / "best.safetensors")["stem.weight"]
    alone = load_file(tmp_path / f"{NAME}.supervised.scratch" / "best.safetensors")["stem.weight"]
    learnt = load_file(first / "best.safetensors")["stem.weight"]
    assert (started - learnt).abs().max() < (alone - learnt).abs().max()


def test_it_sees_the_training_part_alone_and_no_label(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other labels, the same weights but for the probe; and as many recordings as are labelled or unlabelled."""
    seen: set[int] = set()

    def watched(one: Tensor, other: Tensor, ids: Tensor, temperature: float) -> Tensor:
        seen.update(ids.tolist())
        return nt_xent(one, other, ids, temperature)

    monkeypatch.setattr("ecgmatch_dist.methods.contrastive.nt_xent", watched)
    config = chain(data, tmp_path / "a", ContrastiveSettings(), contrast=Optim(steps=20, unlabelled_batch=16))
    folder = run(config)
    parts = json.loads((folder / "split.json").read_text())["parts"]
    assert seen == set(range(len(parts["labelled"]) + len(parts["unlabelled"])))
    y = np.eye(5, dtype=np.uint8)[np.arange(200) % 5]
    monkeypatch.setattr("ecgmatch_dist.data.split_file.labels_of", lambda *_: y)
    other = run(replace(config, runs=tmp_path / "b"))
    one, two = (load_file(path / "best.safetensors") for path in (folder, other))
    different = {name for name in one if not torch.equal(one[name], two[name])}
    assert different == {"classifier.weight", "classifier.bias"}


def _train_on_rank(rank: int, world: int, config: Config) -> None:
    torch.set_num_threads(1)
    run(config)


def test_a_chain_is_the_same_on_two_ranks(data: Path, tmp_path: Path) -> None:
    runtime = Runtime(device="cpu", precision="fp64", log_every=1, save_every=0)
    one = chain(data, tmp_path / "one", SupervisedSettings(), runtime=runtime)
    run(one)
    run_processes(2, _train_on_rank, replace(one, runs=tmp_path / "two"))
    for name in (f"{NAME}.contrastive", f"{NAME}.supervised"):
        assert_near(final_state(one.runs / name), final_state(tmp_path / "two" / name))


def test_it_resumes_to_the_bit(data: Path, tmp_path: Path) -> None:
    config = chain(data, tmp_path, ContrastiveSettings())  # checkpoints after 5 and 8 steps
    folder = run(config)
    expected = {name: tensor.clone() for name, tensor in final_state(folder).items()}
    (folder / "result.json").unlink()
    for path in (folder / "checkpoints").glob("step-000008*"):
        subprocess.run(["rm", "-r", path], check=True)
    run(config)
    assert "resumed at step 5" in (folder / "log.txt").read_text()
    assert_same_bits(expected, final_state(folder))


def test_what_starts_from_what() -> None:
    config = Config(method=ECGMatchSettings(), selfsupervised="contrastive", contrast=Optim(steps=7))
    supervised = config.start()
    first = supervised.start()
    assert [c.method.name for c in (supervised, first)] == ["supervised", "contrastive"]
    assert (config.starts, supervised.starts, first.starts) == (1, 1, 0)
    assert first.optim.steps == 7
    assert first.settled() == first
    assert supervised.settled() == supervised
    assert supervised.settled().fingerprint() != Config().supervised().fingerprint()
    # Whatever concerns labels alone leaves it as it is.
    other = replace(config, method=FixMatchSettings(), pretrain=Optim(lr=0.5), augment=Augment(labelled="strong"))
    assert other.start().start().fingerprint() == first.fingerprint()
    asked = Config(method=ContrastiveSettings(), contrast=Optim(steps=7)).settled()
    assert asked.fingerprint() == first.fingerprint()
    assert replace(config, model=Model(backbone="resnet1d")).start().start().fingerprint() != first.fingerprint()
    assert Config(init="scratch", selfsupervised="contrastive").starts == 0


@pytest.mark.parametrize(
    ("name", "message"), [("fixmatch", "a method without labels"), ("moco", "one of supervised, contra")]
)
def test_only_a_method_without_labels_can_come_first(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Config(selfsupervised=name).start().start()
    with pytest.raises(UserError, match=r"contrast\.unlabelled_batch = 7"):
        Config(method=ContrastiveSettings(), contrast=Optim(unlabelled_batch=7)).settled().check_shares(2)
