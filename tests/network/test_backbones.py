"""What every backbone promises, and what resnet1d computes."""

import re
from dataclasses import replace
from pathlib import Path
from textwrap import dedent

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ecgmatch_dist import config, keyed
from ecgmatch_dist.config import Config, Model
from ecgmatch_dist.distributed.collectives import rank, world
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.network.backbones.base import LEADS, Backbone
from ecgmatch_dist.network.backbones.resnet1d import block_widths
from ecgmatch_dist.network.batchnorm import convert_batchnorm
from ecgmatch_dist.network.model import build_model
from ecgmatch_dist.network.probe import classifier_input
from ecgmatch_dist.network.student import Student
from tests.support.ranks import run_threads

SMALL = {
    "attention_cnn": Model(width=16, heads=4, dropout=0.3),
    "resnet1d": Model(width=16, first_width=8, dropout=0.3, backbone="resnet1d"),
}


def keys_of(rows):
    return keyed.row_keys(20, 0, 0, torch.as_tensor(rows))


def test_every_name_of_the_settings_is_a_backbone():
    assert set(config.backbones()) == set(SMALL)


@pytest.mark.parametrize("name", config.backbones())
@pytest.mark.parametrize("length", [1024, 256, 100, 1])
def test_shapes_for_any_length(name, length):
    z, logits = build_model(3, SMALL[name], 0).eval()(torch.randn(2, LEADS, length))
    assert (z.shape, logits.shape) == ((2, 16), (2, 3))


@pytest.mark.parametrize("name", config.backbones())
def test_dropout_belongs_to_the_row(name):
    """In eval-mode normalisation, a row's training output is the same alone and in any batch."""
    model = build_model(5, SMALL[name], 0).double().train()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    x, keys = torch.randn(6, LEADS, 256, dtype=torch.float64), keys_of(range(6))
    whole = model(x, keys).logits
    torch.testing.assert_close(torch.cat([model(x[:2], keys[:2]).logits, model(x[2:], keys[2:]).logits]), whole)
    assert not torch.allclose(model(x, keys_of(range(6, 12))).logits, whole)
    torch.testing.assert_close(model(x, keys).logits, whole)


@pytest.mark.parametrize("name", config.backbones())
def test_every_parameter_is_in_one_group_and_trained(name):
    model = build_model(5, SMALL[name], 0).train()
    groups = [*model.encoder_parameters(), *model.head_parameters()]
    assert len(groups) == len(set(groups)) == len(list(model.parameters()))
    for (
        module
    ) in model.modules():  # the second BatchNorm of a block of resnet1d starts at zero, and hides what is before it
        if isinstance(module, nn.BatchNorm2d):
            nn.init.ones_(module.weight)
    model(torch.randn(4, LEADS, 256), keys_of(range(4))).logits.square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())


def _gradients(rank_: int, world_: int, name: str) -> dict[str, torch.Tensor]:
    model = convert_batchnorm(build_model(5, SMALL[name], 1).double(), "global")
    student = Student(model, "fp64")
    x = torch.randn(8, LEADS, 128, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    share = slice(rank() * 8 // world(), (rank() + 1) * 8 // world())
    student.forward(x[share], keys_of(range(8))[share]).logits.square().mean().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", config.backbones())
def test_ranks_change_no_gradient(name):
    one = _gradients(0, 1, name)
    for found in run_threads(4, _gradients, name):
        for key, value in one.items():
            torch.testing.assert_close(found[key], value, rtol=1e-10, atol=1e-12)


def test_resnet1d_equals_plain_layers():
    """Against 1-d layers and an explicit order of operations."""
    model = build_model(3, SMALL["resnet1d"], 1).double().eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
            module.weight.data.normal_()
    x = torch.randn(4, LEADS, 200, dtype=torch.float64)

    def norm(h, bn):
        return F.batch_norm(h, bn.running_mean, bn.running_var, bn.weight, bn.bias)

    h = F.conv1d(x, model.stem.weight[:, :, 0], stride=2, padding=3)
    h = norm(h, model.stem_bn).clamp(min=0)
    for block in model.blocks:
        y = norm(F.conv1d(h, block.conv1.weight[:, :, 0], stride=2, padding=3), block.bn1).clamp(min=0)
        y = norm(F.conv1d(y, block.conv2.weight[:, :, 0], padding=3), block.bn2)
        kept = F.conv1d(F.avg_pool1d(h, 2, ceil_mode=True), block.shortcut.weight[:, :, 0])
        h = (y + norm(kept, block.shortcut_bn)).clamp(min=0)
    z = model.bottleneck(torch.cat([h.mean(2), h.max(2).values], 1)).clamp(min=0)
    out = model(x)
    torch.testing.assert_close(out.z, z)
    torch.testing.assert_close(out.logits, model.classifier(z))


def test_the_backbone_that_a_page_writes(monkeypatch):
    """docs/extend.md, the code as it stands there."""
    monkeypatch.setattr(Backbone, "registered", dict(Backbone.registered))
    page = (Path(__file__).parents[2] / "docs" / "extend.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(dedent("   " + code.lstrip()), {"__name__": "my_cnn"})
    model = Backbone.registered["my_cnn"](3, Model(width=16, dropout=0.3)).train()
    z, logits = model(torch.randn(2, LEADS, 200), keys_of(range(2)))
    assert (z.shape, logits.shape) == ((2, 16), (2, 3))
    logits.square().sum().backward()
    assert all(p.grad is not None for p in [*model.encoder_parameters(), *model.head_parameters()])


def test_z_is_the_bottlenecks_output_or_its_input():
    """The official code's feature and the paper's: the same network, weights and logits."""
    settings = SMALL["attention_cnn"]
    code, paper = (build_model(3, replace(settings, feature=f), 2).eval() for f in ("bottleneck", "encoder"))
    x = torch.randn(4, LEADS, 200)
    torch.testing.assert_close(code(x).logits, paper(x).logits, rtol=0, atol=0)
    torch.testing.assert_close(paper.bottleneck(paper(x).z), code(x).z, rtol=0, atol=0)
    assert not torch.allclose(paper(x).z, code(x).z)
    z = paper(x).z.detach().numpy()
    assert classifier_input(code, z) is z
    np.testing.assert_allclose(classifier_input(paper, z), code(x).z.detach().numpy(), rtol=1e-5, atol=1e-6)
    assert Config(model=settings).fingerprint() == Config(model=replace(settings, feature="bottleneck")).fingerprint()
    assert Config(model=settings).fingerprint() != Config(model=replace(settings, feature="encoder")).fingerprint()


def test_widths():
    assert block_widths(Model(width=128, first_width=32, backbone="resnet1d")) == [32, 32, 64, 64, 128]
    assert block_widths(Model(width=32, backbone="resnet1d", depth=3)) == [32, 32, 32]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"depth": 0}, r"model\.depth = 0"),
        ({"first_width": 256, "backbone": "resnet1d"}, r"model\.first_width = 256.*128"),
        ({"feature": "encoder", "backbone": "resnet1d"}, r"model\.feature = 'encoder': .*attention_cnn"),
        ({"first_width": 32}, r"model\.first_width = 32: 0: all blocks of attention_cnn"),
    ],
)
def test_impossible_networks_are_refused(change, message):
    with pytest.raises(UserError, match=message):
        Model(**change)
    Model(width=100, backbone="resnet1d")  # which has no heads to divide it
