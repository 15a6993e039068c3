"""The estimated costs against the real code: bytes on 64 and 1,024 fake ranks, memory, operations."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from ecgmatch_dist.augment import ECGAugment
from ecgmatch_dist.bank.memory import MemoryBank
from ecgmatch_dist.capacity.advice import recommend, warnings
from ecgmatch_dist.capacity.command import main
from ecgmatch_dist.capacity.cost import GPUS, Cluster, collectives, fits_memory, memory, network_cost, shard_groups
from ecgmatch_dist.capacity.timing import binding, enough, scaling, times
from ecgmatch_dist.config import Augment, Model
from ecgmatch_dist.distributed.collectives import traffic
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.methods.base import Task
from ecgmatch_dist.methods.ecgmatch import ECGMatch, ECGMatchSettings
from ecgmatch_dist.methods.views import Views
from ecgmatch_dist.network import batchnorm
from ecgmatch_dist.network.batchnorm import convert_batchnorm
from ecgmatch_dist.network.model import build_model
from ecgmatch_dist.network.student import Student
from ecgmatch_dist.network.teacher import Teacher
from tests.support.native_norm import kernels

H100 = GPUS["h100"]
SMALL = Cluster(64, 8, 3000, 2, 16, 128, 5, 3, replace(H100, bf16=0))
BIG = Cluster(1024, 8, 100_000_000, 448, 128, 6144, 5, 5, H100)


@contextmanager
def fake_ranks(world: int) -> Iterator[None]:
    """This process as one rank of many: collectives have the right shapes, but no real contents."""
    dist.init_process_group("fake", rank=9, world_size=world, store=FakeStore())
    try:
        traffic.reset()
        yield
    finally:
        traffic.reset()
        dist.destroy_process_group()


def real_step(c: Cluster, shard_group: int) -> tuple[dict[str, int], MemoryBank]:
    """What one rank's step of ECGMatch receives, by collective, and the bank it used."""
    model = convert_batchnorm(build_model(c.classes, Model(width=c.width, heads=8), seed=0), "global")
    student, teacher = Student(model, "fp32"), Teacher(model, 0.9)
    reduced: list[int] = []

    def hook(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        reduced.append(bucket.buffer().nbytes)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    assert isinstance(student.forward, DistributedDataParallel)
    student.forward.register_comm_hook(None, hook)
    g = torch.Generator().manual_seed(0)
    x_b, x_u = (torch.randn(n, 12, c.length, generator=g) for n in (c.labelled, c.batch))
    y_b = (torch.rand(c.labelled, c.classes, generator=g) < 0.5).float()
    method = ECGMatch(ECGMatchSettings(neighbours=c.neighbours), Task(y_b, c.bank, steps=10, width=c.width, seed=1))
    options: dict[str, Any] = {"shard_group": shard_group, "backend": "torch", "overlap": False}
    bank = MemoryBank(c.bank, c.width, c.classes, c.neighbours, c.batch * c.gpus, **options)
    bank.z.copy_(torch.randn(bank.z.shape, generator=g))
    ids_b, ids_u = torch.arange(c.labelled), torch.arange(c.batch)
    traffic.reset()
    views = Views(x_b, y_b, ids_b, x_u, ids_u, ECGAugment(Augment()), 1, 1)
    method.losses(views, student, teacher, bank)["loss"].backward()  # type: ignore[no-untyped-call]
    w = c.gpus
    return {**traffic.received(), "gradients": 2 * (w - 1) * sum(reduced) // w}, bank


@pytest.mark.parametrize(("world", "shard_group"), [(64, 1), (64, 8), (64, 64), (1024, 8), (1024, 1024)])
def test_bytes_are_those_of_the_code(world: int, shard_group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    c = replace(SMALL, gpus=world)
    monkeypatch.setattr(batchnorm, "has_kernels", lambda device: True)  # as on GPUs
    with kernels("CPU"), fake_ranks(world):
        received, bank = real_step(c, shard_group)
    planned = {x.name: x.total for x in collectives(c, shard_group) if x.total}
    planned["all_sum"] = planned.pop("correlation")
    assert received == planned
    assert memory(c, shard_group)["bank"] == bank.z.nbytes + bank.p.nbytes + bank.written.nbytes


@pytest.mark.parametrize(
    ("world", "node", "shard_group"), [(8, 8, 8), (8, 4, 2), (16, 4, 4), (16, 4, 8), (64, 8, 1), (6, 8, 3)]
)
def test_inside_and_between_nodes(world: int, node: int, shard_group: int) -> None:
    """Counted sender by sender, for every rank."""
    c = replace(SMALL, gpus=world, gpus_per_node=node)
    planned = {x.name: x for x in collectives(c, shard_group)}
    for rank in range(world):
        place, copy = rank % shard_group, rank // shard_group
        groups = {
            "bank/rows": (range(place, world, shard_group), c.batch * c.row),
            "bank/candidates": (range(copy * shard_group, (copy + 1) * shard_group), c.batch * 3 * (16 + 20)),
        }
        for name, (peers, each) in groups.items():
            near = sum(each for peer in peers if peer != rank and peer // node == rank // node)
            far = sum(each for peer in peers if peer // node != rank // node)
            assert (planned[name].inside, planned[name].between) == (near, far), (name, rank)


def test_the_network_is_counted() -> None:
    assert network_cost(Model(width=128), 6144, 5, half=False).parameters == 1_665_541
    assert (
        network_cost(Model(width=128), 6144, 5, half=True).saved
        < 0.6 * network_cost(Model(width=128), 6144, 5, half=False).saved
    )
    long, short = network_cost(Model(width=16), 2048, 5, half=False), network_cost(Model(width=16), 1024, 5, half=False)
    assert long.saved / short.saved == pytest.approx(2, rel=0.05)
    full = network_cost(Model(width=128), 6144, 5, half=True)
    assert 1.9 < full.backward / full.forward <= 2  # less than 2: the first layer needs no gradient of the signals

    kept: dict[int, int] = {}
    model = build_model(5, Model(width=16), seed=0)
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def keep(t: torch.Tensor) -> torch.Tensor:
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        out = model(torch.randn(8, 12, 1024), torch.arange(8)).logits.sum()
    real = sum(count for pointer, count in kept.items() if pointer not in own) / 8
    assert short.saved == pytest.approx(real, rel=0.1)
    out.backward()


def test_search_time_is_products_and_scores() -> None:
    """1M rows, 448 queries of 128 features: 1.15e11 operations in fp32, 3.6 GB of scores, at 60 % of an H100."""
    c = replace(BIG, bank=1_000_000)
    assert 1e3 * times(c, 8)["search"] == pytest.approx(115 / (0.6 * 67) + 3.584 / (0.6 * 3.35), rel=0.01)
    assert times(c, 1)["search"] == times(c, 1024)["search"]


def test_more_gpus_do_not_help_when_the_host_binds() -> None:
    """The paper's batch on H100s: a few GPUs compute it as fast as a host launches the step."""
    c = replace(BIG, gpus=8, batch=56, bank=66_000)
    fixed, grown = (list(scaling(c, grows=grows)) for grows in (False, True))
    assert [x.gpus for x in fixed] == [x.gpus for x in grown] == [1, 2, 4, 8, 16, 32, 64]
    assert all(x.batch * x.gpus == 448 for x in fixed)
    assert fixed[0].binds == "computing"
    assert fixed[-1].binds == "launches"
    assert fixed[-1].seconds == fixed[-2].seconds == times(c, 8)["launches"]
    assert enough(c) < 64
    assert grown[-1].rate > 7 * grown[3].rate  # a batch that grows with the GPUs keeps them busy
    assert binding(replace(BIG, bank=100_000_000), 8) == "search"


def test_recommendation() -> None:
    assert recommend(BIG) == 8  # a twelfth of the bytes between nodes of L = 1024
    inside, over_all = ({x.name: x.between for x in collectives(BIG, L)} for L in (8, 1024))
    bank = [sum(count for name, count in way.items() if name.startswith("bank/")) for way in (inside, over_all)]
    assert bank[1] / bank[0] > 12
    assert recommend(replace(BIG, gpus=8, bank=66_000)) == 8
    assert shard_groups(replace(BIG, gpus=12)) == [1, 2, 4, 12]
    huge = replace(BIG, bank=5_000_000_000)
    assert not fits_memory(huge, 8)
    assert recommend(huge) > 8


def test_warnings_name_the_remedy() -> None:
    (slow,) = warnings(BIG, 8)
    assert "take longer than the training forward" in slow
    assert "faiss-ivf" in slow
    assert warnings(replace(BIG, gpus=8, bank=66_000), 8) == []
    (batch,) = warnings(replace(BIG, bank=66_000), 8)
    assert "--batch 64 or fewer GPUs" in batch
    (too_much,) = [
        text for text in warnings(replace(BIG, gpus=8, bank=1_000_000, batch=20_000), 8) if "do not fit" in text
    ]
    fewer = int(too_much.split("--batch ")[1])
    assert fits_memory(replace(BIG, gpus=8, bank=1_000_000, batch=fewer), 8)
    assert any("no bf16" in text for text in warnings(replace(BIG, gpus=8, bank=66_000, gpu=GPUS["v100"]), 8))


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(gpus=1024, bank=100e6, out=tmp_path / "plan.svg")
    text = capsys.readouterr().out
    for word in ("bank/exchange", "gradients", "DDP buckets", "bank.shard_group = 'node'", "WARNING"):
        assert word in text
    assert "<svg" in (tmp_path / "plan.svg").read_text()
    for wrong, message in (
        ({"gpus": 0}, "--gpus 0"),
        ({"bank": 1.5}, "--bank 1.5"),
        ({"shard_group": 3}, "must divide the 8"),
        ({"out": tmp_path / "plan.txt"}, "ends in .svg or .png"),
    ):
        with pytest.raises(UserError, match=message):
            main(**{"gpus": 8, **wrong})  # type: ignore[arg-type]


def test_the_network_of_a_run_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    """Its name, width and depth are the settings of `model`."""
    main(gpus=1, width=32, length=256, backbone="resnet1d", first_width=8, depth=3)
    network = build_model(5, Model(32, backbone="resnet1d", first_width=8, depth=3), seed=0)
    assert f"resnet1d: {sum(p.numel() for p in network.parameters()):,} parameters" in capsys.readouterr().out
