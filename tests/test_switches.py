"""Speed options: bf16 leaves fp32 where it must, fused equals plain, compiled equals eager."""

import shutil
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from ecgmatch_dist.bench.methods import Steps
from ecgmatch_dist.config import Config, MethodSettings, Model, Optim, Runtime
from ecgmatch_dist.methods.dst import DSTSettings
from ecgmatch_dist.methods.ecgmatch import ECGMatchSettings
from ecgmatch_dist.network.model import build_model
from ecgmatch_dist.network.optim import build_optimizer
from ecgmatch_dist.train import train_step
from tests.support.ranks import run_processes

LENGTH, ROWS = 128, 40


def config(method: MethodSettings, **runtime: Any) -> Config:
    optim = Optim(labelled_batch=8, unlabelled_batch=16)
    return Config(method=method, model=Model(width=16, heads=2), optim=optim, runtime=Runtime(device="cpu", **runtime))


def steps(method: MethodSettings, count: int = 2, **runtime: Any) -> tuple[Steps, list[float]]:
    """Train for some steps; return the trained learner and the losses."""
    work, losses = Steps(config(method, **runtime), LENGTH, ROWS), []
    for _ in range(count):
        out = train_step(work.learner, work.views(), 0.03, work.whole_pass)
        assert all(value.dtype in (torch.float32, torch.float64) for value in out.values())
        losses.append(out["loss"].item())
        work.number += 1
    return work, losses


def state(work: Steps) -> dict[str, Tensor]:
    parts = {"student": work.learner.model.state_dict(), "teacher": work.learner.teacher.state_dict()}
    return {f"{part}.{name}": t.clone() for part, tensors in parts.items() for name, t in tensors.items()}


def assert_near(found: dict[str, Tensor], expected: dict[str, Tensor], bound: float) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        error = (found[name] - value).abs().max() / value.abs().max().clamp(min=1e-12)
        assert error <= bound, f"{name}: {error}"


def test_bf16_leaves_losses_bank_and_optimiser_in_fp32() -> None:
    method = ECGMatchSettings(neighbours=3)
    half, full = steps(method, 3, precision="bf16"), steps(method, 3, precision="fp32")
    bank, optimizer = half[0].learner.bank, half[0].learner.optimizer
    assert bank is not None
    assert {bank.z.dtype, bank.p.dtype} == {torch.float32}
    norms = bank.z[:-1].norm(dim=1)
    assert ((norms - 1).abs() < 1e-6).sum() + (norms == 0).sum() == ROWS  # rounded to bf16 they would not be 1
    tensors = [t for entry in optimizer.state.values() for t in entry.values() if isinstance(t, Tensor)]
    assert tensors
    assert {t.dtype for t in tensors} == {torch.float32}
    assert all(t.isfinite().all() for t in state(half[0]).values())
    assert half[1] == pytest.approx(full[1], rel=0.02)
    assert half[1] != full[1]  # it was bf16


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_the_fused_optimiser_is_the_plain_one(optimizer: Any) -> None:
    models = [build_model(5, Model(width=16, heads=2), seed=0) for _ in range(2)]
    both = [build_optimizer(Optim(optimizer=optimizer), m, fused=f) for m, f in zip(models, (False, True), strict=True)]
    for _ in range(3):
        for parameters in zip(*(m.parameters() for m in models), strict=True):
            grad = torch.randn_like(parameters[0])
            for p in parameters:
                p.grad = grad.clone()
        for one in both:
            one.step()
    assert_near(models[1].state_dict(), models[0].state_dict(), 1e-6)
    assert [bool(group["fused"]) for group in both[1].param_groups] == [True, True]


def test_compiled_is_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without code generation. DST has heads outside the compiled part. Weights of one load into the other."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    eager, losses = steps(DSTSettings())
    compiled, found = steps(DSTSettings(), compile=True)
    assert found == pytest.approx(losses, rel=1e-5)
    assert_near(state(compiled), state(eager), 1e-3)
    assert not any("_orig_mod" in name for name in state(compiled))
    resumed, _ = steps(DSTSettings(), 0)
    resumed.learner.model.load_state_dict(compiled.learner.model.state_dict())


def _on_rank(rank: int, world: int, compile_: bool) -> tuple[dict[str, Tensor], list[float]]:
    torch.compile = partial(torch.compile, backend="aot_eager")  # type: ignore[assignment]
    work, losses = steps(ECGMatchSettings(neighbours=3), compile=compile_)
    return state(work), losses


@pytest.mark.slow
def test_compiled_is_eager_on_two_ranks() -> None:
    eager, compiled = (run_processes(2, _on_rank, flag, timeout=280) for flag in (False, True))
    for (found, losses), (expected, wanted) in zip(compiled, eager, strict=True):
        assert losses == pytest.approx(wanted, rel=1e-5)
        assert_near(found, expected, 1e-3)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
def test_generated_code_is_eager() -> None:
    """One block with generated machine code; the whole network would take minutes."""
    block = build_model(5, Model(width=8, heads=2), seed=0).blocks[0]
    x = torch.randn(4, 8, 1, 32)
    torch.testing.assert_close(torch.compile(block)(x), block(x), rtol=1e-4, atol=1e-5)
