"""The GPU against the CPU: `pytest -m gpu`, skipped without CUDA."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ecgmatch_dist import augment, keyed
from ecgmatch_dist.augment import ECGAugment
from ecgmatch_dist.bank.ivf import IVFSearch
from ecgmatch_dist.bank.search import BACKENDS, available, exact_search, normalise
from ecgmatch_dist.config import Augment, Bank, Config, Model, Optim, Runtime
from ecgmatch_dist.distributed.devices import has_bf16, use_deterministic_algorithms
from ecgmatch_dist.distributed.session import Ranks
from ecgmatch_dist.learner import Learner, build_learner
from ecgmatch_dist.methods.ecgmatch import ECGMatchSettings
from ecgmatch_dist.methods.views import Views
from ecgmatch_dist.network import batchnorm
from ecgmatch_dist.network.batchnorm import GlobalBatchNorm
from ecgmatch_dist.recovery.checkpoint import Checkpointer
from ecgmatch_dist.recovery.dcp import Rows
from ecgmatch_dist.train import train_step

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

B, U, C, ROWS, LENGTH = 8, 16, 5, 301, 128
CONFIG = Config(
    method=ECGMatchSettings(neighbours=3),
    model=Model(width=16, heads=2),
    optim=Optim(labelled_batch=B, unlabelled_batch=U),
    runtime=Runtime(precision="fp32"),
)


def learn(device: str, rank: int = 0, world: int = 1, config: Config = CONFIG, steps: int = 3) -> dict[str, Tensor]:
    """This rank's share of some steps on fixed inputs: student, teacher, loss and weights of pseudo-labels, on the CPU."""
    g = torch.Generator().manual_seed(0)
    x_b, x_u = (torch.randn(n, 12, LENGTH, generator=g) for n in (B, ROWS))
    labels = (torch.rand(B, C, generator=g) < 0.3).float().to(device)
    ranks = Ranks(rank, world, rank, world, torch.device(device))
    parts: Learner = build_learner(config, ranks, labels, ROWS, seed=1)
    out = {}
    for step in range(1, steps + 1):
        ids_b = torch.arange(B).chunk(world)[rank]
        ids_u = ((torch.arange(U) * 7 + step) % ROWS).chunk(world)[rank]
        at = [t.to(device) for t in (x_b[ids_b], ids_b, x_u[ids_u], ids_u)]
        views = Views(at[0], labels[at[1]], at[1], at[2], at[3], ECGAugment(config.augment), 1, step)
        losses = train_step(parts, views, 0.03, lambda: iter(()))
        out[f"weights {step}"], out[f"loss {step}"] = losses["weights"].cpu(), losses["loss"].detach().cpu()
    return out | {n: t.cpu() for n, t in (parts.model.state_dict() | parts.teacher.state_dict()).items()}


def assert_near(found: dict[str, Tensor], expected: dict[str, Tensor], bound: float) -> None:
    for name, value in expected.items():
        if not name.startswith(("weights ", "loss ")):  # of this rank's rows
            error = ((found[name] - value).abs().max() / value.abs().max().clamp(min=1e-12)).item()
            assert error <= bound, f"{name}: {error}"


def test_steps_are_the_cpu_s() -> None:
    assert_near(learn("cuda"), learn("cpu"), 1e-3)


def test_bf16_is_near() -> None:
    """In the losses, as on a CPU. Weights that begin at 0 are sums of gradients alone: on a CPU they differ by half."""
    if not has_bf16(torch.device("cuda")):
        pytest.skip("this GPU has no bf16 of its own")
    half, full = learn("cuda", config=replace(CONFIG, runtime=Runtime(precision="bf16"))), learn("cpu")
    found, expected = ([out[f"loss {step}"].item() for step in (1, 2, 3)] for out in (half, full))
    assert found == pytest.approx(expected, rel=0.005)
    assert found != pytest.approx(expected, rel=1e-6)  # it was bf16


@pytest.fixture
def same_bits() -> Iterator[None]:
    """By default a GPU sums gradients in the order of arrival: two trainings differ in the last bits."""
    use_deterministic_algorithms()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("same_bits")
def test_search_in_the_background_changes_nothing() -> None:
    background, inline = (learn("cuda", config=replace(CONFIG, bank=Bank(overlap=flag))) for flag in (True, False))
    assert all(torch.equal(background[f"weights {step}"], inline[f"weights {step}"]) for step in (1, 2, 3))


def _on_rank(rank: int, world: int, folder: str) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl", f"file://{folder}/store", rank=rank, world_size=world)
    torch.save(learn(f"cuda:{rank}", rank, world), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")
def test_two_ranks_over_nccl_are_one(tmp_path: Any) -> None:
    spawn: Callable[..., Any] = torch.multiprocessing.spawn
    spawn(_on_rank, (2, str(tmp_path)), nprocs=2)
    one = learn("cuda")
    for rank in range(2):
        assert_near(torch.load(tmp_path / f"{rank}.pt", weights_only=True), one, 1e-3)


def test_a_checkpoint_is_copied_before_the_next_step(tmp_path: Path) -> None:
    w = torch.zeros(1 << 24, device="cuda")
    checkpointer = Checkpointer(tmp_path, {})
    for step in range(2):  # the second time into memory that is reused
        checkpointer.save(step, {"student": {"w": w}, "bank": {"z": Rows(w[None], 1, None)}}, {})
        w.fill_(step + 1)
        checkpointer.wait()
        found, _ = checkpointer.latest()
        assert found is not None
        assert [t.unique().tolist() for t in found.load({}).values()] == [[step], [step]]


@pytest.mark.parametrize("draw", [keyed.uniform, keyed.normal, keyed.permutation])
def test_keyed_randomness_is_the_cpu_s(draw: Callable[[Tensor, int, int], Tensor]) -> None:
    rows = torch.arange(1000)
    host, device = (draw(keyed.row_keys(1, 2, 3, rows.to(d)), 33, 4).cpu() for d in ("cpu", "cuda"))
    if draw is keyed.normal:  # logarithm and sine differ in the last bits
        torch.testing.assert_close(device, host, rtol=1e-5, atol=1e-6)
    else:
        assert torch.equal(device, host)


@pytest.mark.parametrize(
    "settings", [Augment(), Augment(pipeline="sequential"), Augment(dropout_window="per_lead", crop=100)]
)
@pytest.mark.parametrize("strong", [False, True])
def test_the_kernel_of_views_is_torch(settings: Augment, strong: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled, with libdevice; tests/test_augment.py has it in Triton's interpreter."""
    pytest.importorskip("triton")
    x = torch.randn(40, 12, 500, generator=torch.Generator().manual_seed(0)).cuda()
    keys = keyed.row_keys(1, 2, 3, torch.arange(40, device="cuda"))
    view = ECGAugment(settings).strong if strong else ECGAugment(settings).weak
    fast = view(x, keys)
    monkeypatch.setattr(augment, "has_kernel", lambda *_: False)
    torch.testing.assert_close(fast, view(x, keys), rtol=1e-5, atol=1e-5)


def _normalise(rank: int, world: int, folder: str) -> None:
    """Outputs and gradients of BatchNorm over ranks, by both paths."""
    torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl", f"file://{folder}/norm", rank=rank, world_size=world)
    x = torch.randn(8, 6, 1, 50, generator=torch.Generator().manual_seed(rank)).cuda()
    x = x.contiguous(memory_format=torch.channels_last)
    found = []
    for path in (True, False):
        batchnorm.has_kernels = lambda device, path=path: path
        norm, rows = GlobalBatchNorm(6).cuda(), x.clone().requires_grad_()
        out = norm(rows)
        (out * x.cos()).sum().backward()
        found.append([t.detach().cpu() for t in (out, rows.grad, norm.weight.grad, norm.bias.grad, *norm.buffers())])
    torch.testing.assert_close(*found)
    dist.destroy_process_group()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")
def test_both_ways_of_batchnorm_over_ranks(tmp_path: Path) -> None:
    spawn: Callable[..., Any] = torch.multiprocessing.spawn
    spawn(_normalise, (2, str(tmp_path)), nprocs=2)


def test_ivf_lives_where_the_bank_does() -> None:
    if "faiss-gpu" not in available(torch.device("cuda")):
        pytest.skip("no Faiss for GPUs")
    z = normalise(torch.randn(20_000, 32, generator=torch.Generator().manual_seed(0))).cuda()
    index = IVFSearch(probes=1000)
    index.search(z[:64], z, 5)
    z[7] = -z[7]
    index.changed(z, torch.tensor([7], device="cuda"))
    assert index.frozen
    assert index.search(z[:64], z, 5).rows[:, 0].tolist() == list(range(64))


@pytest.mark.parametrize("name", ["faiss-gpu", "faiss-gpu-index"])
def test_faiss_finds_what_torch_finds(name: str) -> None:
    device = torch.device("cuda")
    if name not in available(device):
        pytest.skip("no Faiss for GPUs")
    g = torch.Generator().manual_seed(0)
    q, z = (normalise(torch.randn(n, 32, generator=g)).to(device) for n in (50, 20_000))
    found, expected = (exact_search(q, z, 5, BACKENDS[name]) for name in (name, "torch"))
    assert torch.equal(found.rows, expected.rows)
    assert torch.equal(found.scores, expected.scores)
