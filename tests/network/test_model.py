"""The network: size, shapes, keyed dropout, initial weights."""

import numpy as np
import pytest
import torch
from torch import nn

from ecgmatch_dist import config, keyed
from ecgmatch_dist.network.backbones.base import LEADS, keyed_dropout
from ecgmatch_dist.network.model import build_model

SMALL = config.Model(width=16, heads=4)


def keys_of(rows):
    return keyed.row_keys(20, 0, 0, torch.as_tensor(rows))


@pytest.mark.parametrize(
    ("width", "classes", "count"), [(128, 5, 1_665_541), (64, 5, 0), (128, 25, 1_665_541 + 20 * 129)]
)
def test_number_of_parameters(width, classes, count):
    stem, block = LEADS * width * 15 + 2 * width, 2 * (9 * width**2 + 2 * width) + width**2
    attention, bottleneck = 4 * (width**2 + width), width**2 + width
    by_hand = stem + 5 * block + attention + bottleneck + classes * (width + 1)
    found = sum(p.numel() for p in build_model(classes, config.Model(width=width), 0).parameters())
    assert found == by_hand == (count or by_hand)


@pytest.mark.parametrize(("length", "steps"), [(6144, 96), (1024, 16), (1000, 16), (65, 2), (64, 1), (1, 1)])
def test_length_is_divided_by_64(length, steps):
    model = build_model(5, SMALL, 0).eval()
    seen = []
    model.attention.register_forward_hook(lambda _module, inputs, _output: seen.append(inputs[0].shape))
    z, logits = model(torch.randn(2, LEADS, length))
    assert seen == [(2, steps, 16)]
    assert z.shape == (2, 16)
    assert logits.shape == (2, 5)


def test_forward_equals_plain_layers():
    """Against ordinary 1-d layers, torch's own attention and an explicit order of operations."""
    model = build_model(3, SMALL, 1).double().eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    x = torch.randn(4, LEADS, 200, dtype=torch.float64)

    def norm(h, bn):
        h = (h - bn.running_mean[:, None]) / (bn.running_var[:, None] + bn.eps).sqrt()
        h = h * bn.weight[:, None] + bn.bias[:, None]
        return torch.where(h > 0, h, 0.01 * h)

    h = norm(nn.functional.conv1d(x, model.stem.weight[:, :, 0], stride=2, padding=7), model.stem_bn)
    for block in model.blocks:
        y = norm(nn.functional.conv1d(h, block.conv1.weight[:, :, 0], stride=2, padding=4), block.bn1)
        y = norm(nn.functional.conv1d(y, block.conv2.weight[:, :, 0], padding=4), block.bn2)
        pooled = nn.functional.avg_pool1d(h, 2, ceil_mode=True)
        h = y + nn.functional.conv1d(pooled, block.shortcut.weight[:, :, 0])
    official = nn.MultiheadAttention(16, 4, batch_first=True).double().eval()
    official.in_proj_weight.data.copy_(model.attention.project_in.weight)
    official.in_proj_bias.data.copy_(model.attention.project_in.bias)
    official.out_proj.load_state_dict(model.attention.project_out.state_dict())
    h = h.transpose(1, 2)
    z = model.bottleneck(official(h, h, h)[0].max(dim=1).values)
    out = model(x)
    torch.testing.assert_close(out.z, z)
    torch.testing.assert_close(out.logits, model.classifier(z))


def test_initial_weights_follow_the_seed_alone():
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    first = build_model(5, SMALL, 7).state_dict()
    assert torch.equal(before, torch.random.get_rng_state())
    torch.manual_seed(2)
    second, other = build_model(5, SMALL, 7).state_dict(), build_model(5, SMALL, 8).state_dict()
    assert all(torch.equal(first[k], second[k]) for k in first)
    assert not torch.equal(first["stem.weight"], other["stem.weight"])


def test_attention_starts_as_torch_starts_it():
    attention = build_model(5, config.Model(width=64), 0).attention
    bound = (6 / (64 + 3 * 64)) ** 0.5
    assert attention.project_in.weight.abs().max() <= bound
    assert abs(attention.project_in.weight.std() - bound / 3**0.5) < 0.05 * bound
    assert not attention.project_in.bias.any()
    assert not attention.project_out.bias.any()


def test_dropout_law():
    x = torch.ones(64, 16, 32)
    out = keyed_dropout(x, keys_of(range(64)), 0.3)
    np.testing.assert_allclose(out.unique(), [0, 1 / 0.7], rtol=1e-6)
    assert abs(out.mean() - 1) < 4 * (0.3 / 0.7 / x.numel()) ** 0.5
    assert keyed_dropout(x.bfloat16(), keys_of(range(64)), 0.5).dtype == torch.bfloat16


def test_dropout_is_off_in_evaluation_and_needs_keys_in_training():
    model = build_model(5, SMALL, 0)
    x = torch.randn(2, LEADS, 64)
    assert torch.equal(model.eval()(x).z, model(x, keys_of([0, 1])).z)
    with pytest.raises(AssertionError, match="keys"):
        model.train()(x)
    build_model(5, config.Model(width=16, heads=4, dropout=0.0), 0).train()(x)


def test_two_groups_hold_every_parameter_once():
    model = build_model(5, SMALL, 0)
    groups = [*model.encoder_parameters(), *model.head_parameters()]
    assert len(groups) == len(set(groups)) == len(list(model.parameters()))
    heads = {name for name, p in model.named_parameters() if any(p is q for q in model.head_parameters())}
    assert heads == {f"{layer}.{kind}" for layer in ("bottleneck", "classifier") for kind in ("weight", "bias")}


def test_every_parameter_is_trained():
    model = build_model(5, SMALL, 0).train()
    model(torch.randn(4, LEADS, 256), keys_of(range(4))).logits.square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())


def test_double_precision_and_meta():
    out = build_model(5, SMALL, 0).double()(torch.randn(3, LEADS, 64, dtype=torch.float64), keys_of(range(3)))
    assert out.z.dtype == out.logits.dtype == torch.float64
    meta = build_model(5, SMALL, 0).to("meta")
    out = meta(torch.empty(3, LEADS, 128, device="meta"), keyed.row_keys(0, 0, 0, torch.arange(3, device="meta")))
    assert out.logits.shape == (3, 5)


def test_keyed_dropout_is_never_compiled():
    """Its integers overflow, which is undefined in the compiler's C++ code. What stands around it is compiled."""
    graphs = []

    def keep(graph, inputs):
        graphs.append([node.name for node in graph.graph.nodes if node.op.startswith("call")])
        return graph.forward

    def forward(x, keys):
        return keyed_dropout(x.sin(), keys, 0.5).cos()

    x, keys = torch.randn(4, 8), keys_of(range(4))
    assert torch.equal(torch.compile(forward, backend=keep)(x, keys), forward(x, keys))
    assert graphs == [["sin"], ["cos"]]
