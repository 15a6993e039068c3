"""What learns: the networks, the method, its bank and the optimiser, built from a configuration without any file."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ecgmatch_dist.bank import MemoryBank, resolve_shard_group
from ecgmatch_dist.batchnorm import convert_batchnorm
from ecgmatch_dist.config import Config
from ecgmatch_dist.distributed import Ranks
from ecgmatch_dist.methods.base import Method
from ecgmatch_dist.methods.ecgmatch import ECGMatch
from ecgmatch_dist.methods.registry import build as build_method
from ecgmatch_dist.model import AttentionCNN, build_model
from ecgmatch_dist.schedule import build_optimizer
from ecgmatch_dist.student import Student
from ecgmatch_dist.teacher import Teacher


@dataclass
class Learner:
    """All that a step changes."""

    model: AttentionCNN
    student: Student
    teacher: Teacher
    bank: MemoryBank | None
    method: Method
    optimizer: torch.optim.Optimizer


def build_learner(
    config: Config, ranks: Ranks, labels: Tensor, rows: int, seed: int, starts: Sequence[dict[str, Tensor]] = ()
) -> Learner:
    """`labels` [N_B, C] of the whole labelled part, on the device and in the type that the run computes in; `rows` N_U of the
    unlabelled part; `starts`: weights to begin with instead of random ones, and those of the rest of the committee."""
    runtime, width, classes = config.runtime, config.model.width, labels.shape[1]
    precision = runtime.precision
    if precision == "auto":
        precision = "bf16" if ranks.device.type == "cuda" else "fp32"
    model = build_model(classes, config.model, seed)
    if starts:
        model.load_state_dict(starts[0])
    method = build_method(config, labels, rows, seed)
    if isinstance(method, ECGMatch):
        for weights in starts[1:]:
            member = build_model(classes, config.model, seed)
            member.load_state_dict(weights)
            method.committee.append(Teacher(member.to(ranks.device, labels.dtype), 1.0, precision))
    model.auxiliary = method.auxiliary
    model = convert_batchnorm(model.to(ranks.device, labels.dtype), runtime.batchnorm)
    bank = None
    if method.uses_bank:
        bank = MemoryBank(
            rows=rows,
            dim=width,
            classes=classes,
            k=config.method.neighbours,  # type: ignore[union-attr]  # whoever uses the bank has both
            memory=config.method.memory,  # type: ignore[union-attr]
            batch=config.optim.unlabelled_batch,
            shard_group=resolve_shard_group(config.bank.shard_group, ranks.world, ranks.local_world),
            backend=config.bank.backend,
            device=ranks.device,
            overlap=config.bank.overlap,
            timeout_minutes=runtime.timeout_minutes,
        )
    return Learner(
        model=model,
        student=Student(model, precision, runtime.batchnorm, runtime.compile),
        teacher=Teacher(
            model,
            config.optim.teacher_momentum,
            precision,
            warmup=config.optim.teacher_warmup,
            batchnorm=config.optim.teacher_batchnorm,
        ),
        bank=bank,
        method=method,
        optimizer=build_optimizer(config.optim, model),
    )
