"""One thread, one order: all collectives of a run are issued by the thread that trains, in the same order on all ranks.

NCCL calls several threads on one device unsafe, and needs one order of the collectives. The one exception is a checkpoint,
which DCP writes in a thread of its own, with a gloo group of its own: it never touches a GPU.
"""

import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.testing._internal.distributed.multi_threaded_pg as threaded

from ecgmatch_dist.config import Bank, Config, Optim, methods
from ecgmatch_dist.recovery.signals import Stopped
from tests.support.method_trainer import METHODS, Trainer
from tests.support.order import Call, recorded
from tests.support.ranks import run_processes, run_threads
from tests.support.training import run, tiny

CHECKPOINT = "checkpoint"


def _on_rank(rank: int, world: int, configs: list[Config], until: str) -> list[list[Call]]:
    """Runs one after the other, each to its end or to the deadline."""
    torch.set_num_threads(1)
    os.environ["ECGMATCH_STOP_AT"] = until
    out = []
    for config in configs:
        with recorded() as calls, suppress(Stopped):
            run(config)
        main = threading.get_ident()
        out.append([call._replace(thread=int(call.thread == main)) for call in calls])
    return out


def check(ranks: list[list[Call]]) -> None:
    """One thread, one order, equal on all ranks."""
    for calls in ranks:
        elsewhere = [call for call in calls if not call.thread and call.group != CHECKPOINT]
        assert elsewhere == [], "not issued by the thread that trains"
    orders = [[call[1:] for call in calls if call.thread] for calls in ranks]
    assert len(orders[0]) > 10
    for rank, order in enumerate(orders):
        assert order == orders[0], f"rank {rank} has another order than rank 0"


@pytest.mark.slow
@pytest.mark.parametrize("shard_group", [2, "world"])
def test_whole_runs_on_four_processes(data: Path, tmp_path: Path, shard_group: Any) -> None:
    """Every method; stopped after a step or two, resumed on as many ranks, and run to the end."""
    optim = Optim(steps=4, labelled_batch=8, unlabelled_batch=16)
    names = methods() if shard_group == 2 else {"ecgmatch": methods()["ecgmatch"]}
    configs = [
        tiny(
            data,
            tmp_path,
            method(),
            optim=optim,
            pretrain=optim,
            contrast=optim,
            init="scratch",
            bank=Bank(shard_group=shard_group),
        )
        for method in names.values()
    ]
    configs = [config.settled() for config in configs]
    for until in ("1", "inf"):
        ranks = run_processes(4, _on_rank, configs, until, timeout=240)
        for number, config in enumerate(configs):
            check([calls[number] for calls in ranks])
            groups = {call.group for call in ranks[0][number]}
            assert ("bank/within" in groups) == (config.method.name in ("ecgmatch",))
    for config in configs:
        text = (tmp_path / config.run_name("within-chapman@0.2.s20") / "log.txt").read_text()
        assert "resumed at step" in text


def _steps(rank: int, world: int, settings: Any, shard_group: int, resumed: bool) -> int:
    """A few steps in this thread; after a resume, the bank is loaded instead of filled. Returns the thread."""
    bank = Bank(shard_group=shard_group, backend="torch", overlap=True)
    trainer = Trainer(rank, world, settings, bank=bank)
    if resumed:
        before, trainer = trainer, Trainer(rank, world, settings, bank=bank)
        before.one()
        trainer.step = before.step
        trainer.method.load_state_dict(before.method.state_dict())
        if trainer.bank and before.bank:
            trainer.bank.load(before.bank.state())
    for _ in range(2):
        trainer.one()
    return threading.get_ident()


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("settings", METHODS, ids=lambda settings: settings.name)
def test_steps_on_eight_threads(settings: Any, resumed: bool) -> None:
    """DDP's all-reduces included."""
    groups = (2, 8) if settings.name == "ecgmatch" else (8,)
    for shard_group in groups:
        with recorded(threaded.ProcessLocalGroup) as calls:
            mains = run_threads(8, _steps, settings, shard_group, resumed)
        ranks = [[call._replace(thread=1) for call in calls if call.thread == main] for main in mains]
        strangers = [call._replace(thread=0) for call in calls if call.thread not in mains]
        check([ranks[0] + strangers, *ranks[1:]])


def test_the_check_can_fail() -> None:
    order = [Call(1, "default_pg", "allreduce")] * 11
    check([order, order])
    with pytest.raises(AssertionError, match="not issued"):
        check([order, [*order, Call(0, "bank/within", "allgather")]])
    with pytest.raises(AssertionError, match="another order"):
        check([order, [*order, Call(1, "bank/within", "allgather")]])
    a, b = Call(1, "a", "barrier"), Call(1, "b", "barrier")
    with pytest.raises(AssertionError, match="another order"):
        check([[*order, a, b], [*order, b, a]])
