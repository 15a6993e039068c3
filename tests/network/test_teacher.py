"""The moving average against plain arithmetic over many steps; eval mode; saving and loading."""

import pytest
import torch

from ecgmatch_dist import config, keyed
from ecgmatch_dist.network.backbones.base import LEADS
from ecgmatch_dist.network.model import build_model
from ecgmatch_dist.network.teacher import Teacher

SMALL = config.Model(width=16, heads=4)


def train(student, optimiser, step):
    keys = keyed.row_keys(20, step, 0, torch.arange(8))
    x = keyed.normal(keys, LEADS * 64, 0).view(8, LEADS, 64)
    student(x, keys).logits.square().mean().backward()
    optimiser.step()
    optimiser.zero_grad()


@pytest.mark.parametrize("batchnorm", ["copied", "averaged"])
@pytest.mark.parametrize("warmup", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.9, 0.999, 1.0])
def test_hundred_steps_equal_plain_arithmetic(momentum, warmup, batchnorm):
    student = build_model(5, SMALL, 0)
    teacher = Teacher(student, momentum, warmup=warmup, batchnorm=batchnorm)
    names = dict(student.named_parameters())
    slow = {k: v.double().clone() for k, v in student.state_dict().items()}
    for step in range(100):
        m = min(momentum, (1 + step) / (10 + step)) if warmup else momentum
        for name, value in student.state_dict().items():
            value.add_(torch.randn_like(value) if value.is_floating_point() else 1)
            average = name in names or (batchnorm == "averaged" and value.is_floating_point())
            slow[name] = m * slow[name] + (1 - m) * value if average else value.double().clone()
        teacher.update(student, step)
    state = teacher.state_dict()
    assert state.keys() == slow.keys()
    for name, value in state.items():
        torch.testing.assert_close(value.double(), slow[name], rtol=1e-5, atol=1e-5)
    assert torch.equal(state["stem_bn.running_mean"], student.stem_bn.running_mean) == (
        batchnorm == "copied" or momentum == 0
    )
    assert state["stem_bn.num_batches_tracked"] == 100
    moved = not torch.equal(state["stem.weight"], build_model(5, SMALL, 0).stem.weight)
    assert moved == (momentum < 1 or warmup)


def test_teacher_is_a_separate_frozen_copy():
    student = build_model(5, SMALL, 0).train()
    teacher = Teacher(student, 0.5)
    assert student.training
    assert not any(m.training for m in teacher.module.modules())
    assert not any(p.requires_grad for p in teacher.module.parameters())
    assert all(p.requires_grad for p in student.parameters())
    memory = {p.data_ptr() for p in (*student.parameters(), *student.buffers())}
    assert memory.isdisjoint(p.data_ptr() for p in (*teacher.module.parameters(), *teacher.module.buffers()))
    x = torch.randn(2, LEADS, 64)
    taught, own = teacher.infer(x), student.eval()(x)
    assert torch.equal(taught.z, own.z)
    assert torch.equal(taught.logits, own.logits)
    assert not taught.z.requires_grad


def test_bf16_inference_returns_the_precision_of_the_signal():
    student = build_model(5, SMALL, 0)
    x = torch.randn(2, LEADS, 64)
    full, half = Teacher(student, 0.5).infer(x), Teacher(student, 0.5, "bf16").infer(x)
    assert half.z.dtype == half.logits.dtype == torch.float32
    assert not torch.equal(full.z, half.z)
    torch.testing.assert_close(full.z, half.z, rtol=0.1, atol=0.05)


def test_saved_and_loaded_teacher_goes_on_to_the_bit():
    student = build_model(5, SMALL, 0).train()
    optimiser = torch.optim.SGD(student.parameters(), lr=0.1)
    teacher, other = Teacher(student, 0.9), Teacher(build_model(5, SMALL, 1), 0.9)
    train(student, optimiser, 0)
    teacher.update(student, 0)
    other.load_state_dict({k: v.clone() for k, v in teacher.state_dict().items()})
    train(student, optimiser, 1)
    teacher.update(student, 1)
    other.update(student, 1)
    for name, value in teacher.state_dict().items():
        assert torch.equal(other.state_dict()[name], value)


def test_double_precision_and_meta():
    student = build_model(5, SMALL, 0).double()
    teacher = Teacher(student, 0.5)
    teacher.update(student, 0)
    assert teacher.module.stem.weight.dtype == torch.float64
    meta = build_model(5, SMALL, 0).to("meta")
    Teacher(meta, 0.5).update(meta, 0)


def test_a_network_without_batchnorm_has_nothing_to_copy():
    """A state-space model has none; its first step ended in an error of torch."""
    student = torch.nn.Sequential(torch.nn.LayerNorm(4), torch.nn.Linear(4, 2))
    teacher = Teacher(student, momentum=0.5)
    before = student[1].weight.detach().clone()
    with torch.no_grad():
        student[1].weight += 1
    teacher.update(student, step=0)
    torch.testing.assert_close(teacher.module[1].weight, before + 0.5)
