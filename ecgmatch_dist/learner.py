"""Everything that a training step changes: networks, method, bank, optimiser. Built from a configuration, without files."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ecgmatch_dist.bank.memory import MemoryBank, resolve_shard_group
from ecgmatch_dist.config import Config
from ecgmatch_dist.distributed.devices import use_whole_fp32
from ecgmatch_dist.distributed.session import Ranks
from ecgmatch_dist.methods.base import Method, Task, build_method
from ecgmatch_dist.network.backbones.base import Backbone
from ecgmatch_dist.network.batchnorm import convert_batchnorm
from ecgmatch_dist.network.model import build_model
from ecgmatch_dist.network.optim import build_optimizer
from ecgmatch_dist.network.student import Student, resolve_precision
from ecgmatch_dist.network.teacher import Teacher


@dataclass
class Learner:
    """Everything that a training step changes."""

    model: Backbone
    student: Student
    teacher: Teacher
    bank: MemoryBank | None
    method: Method[Any]
    optimizer: torch.optim.Optimizer


def build_learner(
    config: Config, ranks: Ranks, labels: Tensor, rows: int, seed: int, starts: Sequence[dict[str, Tensor]] = ()
) -> Learner:
    """`labels` [N_B, C] of the whole labelled part, on the run's device and in its precision; `rows` N_U unlabelled rows;
    `starts` the weights of the runs that this one starts from: first the student's, then the rest of the committee's."""
    runtime, width, classes, crop = config.runtime, config.model.width, labels.shape[1], config.augment.crop
    precision = resolve_precision(runtime.precision, ranks.device)
    if precision == "fp32":
        use_whole_fp32(ranks.device)
    model = build_model(classes, config.model, seed)
    if starts:
        # A classifier that was fitted to measure features without labels is no start, and one of other classes is left out: the
        # run begins with its own.
        new = (config.method.is_start and config.starts > 0) or "classifier.weight" not in starts[0]
        own = model.classifier.state_dict(prefix="classifier.") if new else {}
        model.load_state_dict(starts[0] | own)
    method = build_method(config.method, Task(labels, rows, config.optim.steps, width, seed, config.bank.view))
    committee = []
    for weights in starts[1:]:
        member = build_model(classes, config.model, seed)
        member.load_state_dict(weights)
        committee.append(Teacher(member.to(ranks.device, labels.dtype), 1.0, precision, crop=crop))
    method.set_committee(committee)
    model.auxiliary = method.auxiliary
    model = convert_batchnorm(model.to(ranks.device, labels.dtype), runtime.batchnorm)
    bank = None
    if method.bank_options:
        bank = MemoryBank(
            rows=rows,
            dim=width,
            classes=classes,
            k=method.bank_options.neighbours,
            memory=method.bank_options.memory,
            batch=config.optim.unlabelled_batch,
            shard_group=resolve_shard_group(config.bank.shard_group, ranks.world, ranks.local_world),
            backend=config.bank.backend,
            device=ranks.device,
            overlap=config.bank.overlap,
            timeout_minutes=runtime.timeout_minutes,
        )
    return Learner(
        model=model,
        student=Student(model, precision, runtime.batchnorm, runtime.compile, crop),
        teacher=Teacher(
            model,
            config.optim.teacher_momentum,
            precision,
            warmup=config.optim.teacher_warmup,
            batchnorm=config.optim.teacher_batchnorm,
            crop=crop,
        ),
        bank=bank,
        method=method,
        optimizer=build_optimizer(config.optim, model),
    )
