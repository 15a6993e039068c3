"""Collectives, the differentiable sum and BatchNorm: W ranks give what one process gives on everything."""

import copy
import os
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ecgmatch_dist.distributed import collectives
from ecgmatch_dist.distributed.devices import pick_device
from ecgmatch_dist.distributed.session import Ranks, session
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.network.batchnorm import GlobalBatchNorm, convert_batchnorm
from ecgmatch_dist.network.student import data_parallel
from tests.support.ranks import free_port, run_processes, run_threads

RUNNERS = pytest.mark.parametrize(("run", "w"), [(run_threads, 2), (run_threads, 4), (run_processes, 2)])


# The helpers themselves


def fail_on_one(rank: int, world: int) -> None:
    if rank == 1:
        raise ValueError("boom")
    dist.barrier()


def test_a_failing_rank_is_reported_and_does_not_hang_the_others() -> None:
    with pytest.raises(ValueError, match="boom"):
        run_threads(3, fail_on_one)
    with pytest.raises(RuntimeError, match=r"rank 1[^$]*boom"):
        run_processes(2, fail_on_one)
    assert run_threads(2, lambda rank, world: (rank, world)) == [(0, 2), (1, 2)]


# Gathers


def gather_everything(rank: int, world: int) -> dict[str, Any]:
    rows = torch.arange(6).reshape(2, 3) + 10 * rank
    types = (torch.bool, torch.uint8, torch.int16, torch.int64, torch.float16, torch.bfloat16, torch.float64)
    collectives.traffic.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        out: dict[str, Any] = {str(t): collectives.all_gather(rows.to(t)).to(torch.float64) for t in types}
        out["scalar"] = collectives.all_gather(torch.tensor(rank))
        out["rows"] = collectives.gather_rows(rows.t())  # not contiguous
        out["empty"] = collectives.gather_rows(rows[:0])
        out["uneven"] = collectives.gather_uneven(rows[: rank % 3])
        pending = collectives.all_to_all_async(torch.arange(world * 2).reshape(world, 2) + 100 * rank, name="exchange")
        out["exchange"] = pending.wait()
    out["bytes"] = collectives.traffic.received()
    return out


@RUNNERS
def test_gathers_keep_rank_order_type_and_count_bytes(run: Any, w: int) -> None:
    rows = [torch.arange(6).reshape(2, 3) + 10 * r for r in range(w)]
    for rank, out in enumerate(run(w, gather_everything)):
        for key in [key for key in out if key.startswith("torch.")]:
            dtype = getattr(torch, key.removeprefix("torch."))
            assert torch.equal(out[key], torch.stack(rows).to(dtype).to(torch.float64)), key
        assert out["scalar"].tolist() == list(range(w))
        assert torch.equal(out["rows"], torch.cat([r.t() for r in rows]))
        assert out["empty"].shape == (0, 3)
        assert torch.equal(out["uneven"], torch.cat([r[: i % 3] for i, r in enumerate(rows)]))
        expected = torch.stack([torch.arange(2) + 2 * rank + 100 * r for r in range(w)])
        assert torch.equal(out["exchange"], expected)
        largest = max(r % 3 for r in range(w))
        assert out["bytes"]["exchange"] == (w - 1) * 16
        assert out["bytes"]["gather_rows"] == (w - 1) * 48
        assert out["bytes"]["gather_uneven"] == (w - 1) * (8 + largest * 24)
        assert out["bytes"]["all_gather"] == (w - 1) * (8 + 6 * (1 + 1 + 2 + 8 + 2 + 2 + 8))


@settings(max_examples=20, deadline=None)
@given(sizes=st.lists(st.integers(0, 5), min_size=2, max_size=5))
def test_uneven_gather_of_any_sizes(sizes: list[int]) -> None:
    rows = [torch.randn(n, 2, 3) for n in sizes]
    for out in run_threads(len(sizes), lambda rank, world: collectives.gather_uneven(rows[rank])):
        assert torch.equal(out, torch.cat(rows))


def test_groups_gather_among_themselves() -> None:
    def body(rank: int, world: int) -> tuple[Tensor, Tensor]:
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        mine = groups[rank // 2]
        return collectives.all_gather(torch.tensor(rank), mine), collectives.all_sum(torch.tensor(rank), mine)

    for rank, (gathered, total) in enumerate(run_threads(4, body)):
        first = 2 * (rank // 2)
        assert gathered.tolist() == [first, first + 1]
        assert int(total) == 2 * first + 1


def test_one_process_needs_no_group() -> None:
    t = torch.randn(3, 2, requires_grad=True)
    assert collectives.all_sum(t) is t
    assert not collectives.all_sum_nograd(t).requires_grad
    assert torch.equal(collectives.all_gather(t), t[None])
    assert torch.equal(collectives.gather_uneven(t), t)
    assert torch.equal(collectives.all_to_all(t), t)
    assert (collectives.rank(), collectives.world()) == (0, 1)


def test_bytes_of_1024_ranks() -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=5, world_size=1024, store=FakeStore())
    try:
        collectives.traffic.reset()
        assert collectives.all_gather(torch.zeros(7, 3)).shape == (1024, 7, 3)
        assert collectives.all_to_all(torch.zeros(2048, 5)).shape == (2048, 5)
        collectives.all_sum(torch.zeros(5, 5))
        expected = {"all_gather": 1023 * 84, "all_to_all": 1023 * 40, "all_sum": 2 * 1023 * 100 // 1024}
        assert collectives.traffic.received() == expected
    finally:
        dist.destroy_process_group()
        collectives.traffic.reset()


# The differentiable sum


def sum_gradient(rank: int, world: int, layer: nn.Linear, x: Tensor) -> tuple[float, Tensor]:
    """A loss that is not linear in the batch: norm of the mean over the global batch of a layer's outputs."""
    layer = copy.deepcopy(layer)
    model = data_parallel(layer)
    loss = (collectives.all_sum(model(x.chunk(world)[rank]).sigmoid().sum(0)) / len(x)).norm()
    loss.backward()
    assert layer.weight.grad is not None
    return loss.item(), layer.weight.grad.clone()


@RUNNERS
def test_all_sum_gives_ddp_the_gradient_of_the_global_batch(run: Any, w: int) -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(3, 4).double(), torch.randn(8, 3, dtype=torch.float64)
    loss, gradient = sum_gradient(0, 1, layer, x)
    for got_loss, got_gradient in run(w, sum_gradient, layer, x):
        assert got_loss == pytest.approx(loss, rel=1e-14)
        torch.testing.assert_close(got_gradient, gradient, rtol=1e-12, atol=0)


# BatchNorm


def toy() -> nn.Sequential:
    torch.manual_seed(1)
    convolutions = nn.Conv2d(3, 4, 3, bias=False), nn.Conv2d(4, 5, 1, bias=False)
    return nn.Sequential(convolutions[0], nn.BatchNorm2d(4), nn.LeakyReLU(), convolutions[1], nn.BatchNorm2d(5))


def train_toy(rank: int, world: int, model: Any, sizes: list[int], x: Tensor, target: Tensor) -> dict[str, Tensor]:
    """Three steps on this rank's rows; loss: mean over the global batch. Gradients of the last step, rows' included."""
    start = sum(sizes[:rank])
    share = slice(start, start + sizes[rank]) if world > 1 else slice(None)
    rows, wanted = x[share].clone(memory_format=torch.preserve_format).requires_grad_(), target[share]
    model = convert_batchnorm(copy.deepcopy(model), "global")
    kinds = [type(m) for m in model if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    assert kinds == [GlobalBatchNorm if world > 1 else nn.BatchNorm2d] * 2
    ddp = data_parallel(model)
    optimiser = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        optimiser.zero_grad()
        rows.grad = None
        out = ddp(rows)
        loss = (out - wanted).abs().pow(3).sum() * world / target.numel()
        loss.backward()
        optimiser.step()
    assert rows.grad is not None
    found = {f"grad {name}": p.grad.clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        found["eval"] = model.eval()(rows)
    # DDP averages the gradients of W losses; a row's own gradient is of their sum.
    return {**model.state_dict(), **found, "rows": rows.grad / world, "out": out.detach()}


def check_toy(run: Any, sizes: list[int], last: bool, dtype: torch.dtype, tol: float) -> None:
    model: Any = toy().to(dtype)
    torch.manual_seed(2)
    x, target = 3 + 2 * torch.randn(sum(sizes), 3, 3, 9, dtype=dtype), torch.randn(sum(sizes), 5, 1, 7, dtype=dtype)
    if last:
        model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    one = train_toy(0, 1, model, sizes, x, target)
    results = run(len(sizes), train_toy, model, sizes, x, target)
    starts = torch.tensor([0, *sizes]).cumsum(0).tolist()
    for rank, result in enumerate(results):
        assert list(result) == list(one)
        for key, value in one.items():
            expected = value[starts[rank] : starts[rank + 1]] if key in ("rows", "out", "eval") else value
            error = (result[key] - expected).abs().max().item() if expected.numel() else 0.0
            assert error <= tol * value.abs().max().item(), f"rank {rank}, {key}: {error}"
            if expected is value:
                assert torch.equal(result[key], results[0][key]), f"{key} differs between ranks"
    assert int(results[0]["1.num_batches_tracked"]) == 3


@pytest.mark.parametrize("sizes", [[3, 3], [2, 2, 2, 2], [5, 1, 3], [4, 0, 2]])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(("dtype", "tol"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
def test_global_batchnorm_is_batchnorm_of_the_global_batch(
    sizes: list[int], last: bool, dtype: torch.dtype, tol: float
) -> None:
    check_toy(run_threads, sizes, last, dtype, tol)


def test_global_batchnorm_on_processes() -> None:
    check_toy(run_processes, [4, 2], True, torch.float64, 1e-12)


def test_batchnorm_conversion_keeps_names_and_tensors() -> None:
    original = toy()

    def body(rank: int, world: int) -> None:
        model = copy.deepcopy(original)
        before = {name: t.data_ptr() for name, t in model.state_dict().items()}
        model.eval()
        convert_batchnorm(model, "local")
        assert type(model[1]) is nn.BatchNorm2d
        convert_batchnorm(model, "global")
        assert {name: t.data_ptr() for name, t in model.state_dict().items()} == before
        assert not model[1].training
        original.load_state_dict(model.state_dict())

    run_threads(2, body)


@pytest.mark.parametrize("shape", [(6, 4), (6, 4, 5)])
def test_global_batchnorm_of_vectors_and_signals(shape: tuple[int, ...]) -> None:
    torch.manual_seed(3)
    x = torch.randn(shape) + torch.tensor([0.0, 1e3, -5, 2]).view(1, 4, *[1] * (len(shape) - 2))
    norm = nn.BatchNorm1d(4, momentum=None)
    expected = norm(x)

    def body(rank: int, world: int) -> tuple[Tensor, Tensor]:
        model = convert_batchnorm(nn.Sequential(nn.BatchNorm1d(4, momentum=None)), "global")
        return model(x.chunk(world)[rank]).detach(), model.state_dict()["0.running_var"]

    outs, variances = zip(*run_threads(3, body), strict=True)
    torch.testing.assert_close(torch.cat(outs), expected, rtol=1e-4, atol=1e-3)  # a mean of 1000 leaves 4 digits
    torch.testing.assert_close(variances[0], norm.running_var)
    assert all(torch.equal(v, variances[0]) for v in variances)


def test_global_batchnorm_takes_bf16_rows() -> None:
    x = torch.randn(8, 4, 1, 6).bfloat16()
    expected = nn.BatchNorm2d(4)(x)

    def body(rank: int, world: int) -> tuple[Tensor, Tensor]:
        rows = x.chunk(world)[rank].requires_grad_()
        out = convert_batchnorm(nn.Sequential(nn.BatchNorm2d(4)), "global")(rows)
        out.float().square().sum().backward()
        assert rows.grad is not None
        return out.detach(), rows.grad

    outs, grads = zip(*run_threads(2, body), strict=True)
    torch.testing.assert_close(torch.cat(outs), expected)
    assert torch.cat(grads).dtype == torch.bfloat16


# Start and end


def torchrun_environment(monkeypatch: pytest.MonkeyPatch, **changes: str) -> None:
    names = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": "lo"}
    for name, value in {**names, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), **changes}.items():
        monkeypatch.setenv(name, value)


def test_session_of_one_process() -> None:
    assert "RANK" not in os.environ
    with session("cpu") as ranks:
        cores = len(os.sched_getaffinity(0))
        assert ranks == Ranks(0, 1, 0, 1, torch.device("cpu"), threads=cores)
        assert ranks.main
        assert not dist.is_initialized()


def test_session_from_the_environment_is_closed_also_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    torchrun_environment(monkeypatch)

    def use() -> None:
        with session("cpu", timeout_minutes=0.5) as ranks:
            assert dist.get_backend() == "gloo"
            assert (ranks.rank, ranks.world) == (0, 1)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        use()
    assert not dist.is_initialized()


def test_session_names_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def message() -> str:
        with pytest.raises(UserError) as caught, session("cpu", timeout_minutes=0.01):
            pass
        return str(caught.value)

    torchrun_environment(monkeypatch, LOCAL_WORLD_SIZE="")
    assert "LOCAL_WORLD_SIZE" in message()
    torchrun_environment(monkeypatch, RANK="3", WORLD_SIZE="2", LOCAL_WORLD_SIZE="1")
    assert "less than its world size" in message()
    torchrun_environment(monkeypatch, RANK="1", WORLD_SIZE="2", MASTER_PORT="1")
    assert "rank 1 of 2 does not reach the others at 127.0.0.1:1" in message()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UserError, match="2 GPUs on this node"):
        pick_device("cuda", 2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert pick_device("cuda", 3) == torch.device("cuda", 0)


def test_session_joins_a_group_that_exists_and_leaves_it_open() -> None:
    def body(rank: int, world: int) -> Ranks:
        with session("cpu") as ranks:
            pass
        dist.barrier()
        return ranks

    assert run_threads(2, body)[1] == Ranks(1, 2, 1, 2, torch.device("cpu"))
