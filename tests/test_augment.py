"""The views against a loop over rows and transformations; their distributions; independence of the batch."""

import dataclasses
import os
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from ecgmatch_dist import config, keyed
from ecgmatch_dist.augment import (
    DROPOUT,
    FLIP,
    MILD_STRONG,
    MILD_WEAK,
    NOISE,
    SEQUENCE,
    SHUFFLE,
    ECGAugment,
    apply_mild,
    apply_queue,
    draw_mild,
    draw_queue,
)

PIPELINES = [
    config.Augment(pipeline=pipeline, granularity=granularity, dropout_window=window)
    for pipeline in ("ecgaugment", "sequential", "mild")
    for granularity in ("sample", "batch")
    for window in ("shared", "per_lead")
    if (pipeline, window) != ("mild", "per_lead")
]
each_pipeline = pytest.mark.parametrize(
    "augment",
    [pytest.param(ECGAugment(s), id=f"{s.pipeline}-{s.granularity}-{s.dropout_window}") for s in PIPELINES],
)
BATCH = keyed.batch_key(20, 3, 1)


def keys_of(count, step=0):
    return keyed.row_keys(20, step, 1, torch.arange(count))


def noise_of(keys, length):
    return keyed.normal(keys, 12 * length, 5).view(-1, 12, length)


def augment_reference(x, queue):
    """Each row's transformations one after another, as in the paper; x [b, 12, T] as numpy."""
    out = []
    for i, row in enumerate(x):
        places = [(int(queue.order[i, k]), k) for k in range(4) if queue.used[i, k]]
        order = [k for _, k in sorted(places)]
        row = row.copy()
        lead = queue.lead[i].numpy()
        for place, k in enumerate(order):
            if k == DROPOUT:
                for v in range(12):
                    column = v if queue.start.shape[1] == 12 else 0
                    row[v, int(queue.start[i, column]) : int(queue.stop[i, column])] = 0
            if k == FLIP:
                row = row[:, ::-1]
            if k == SHUFFLE:
                row = row[lead]
            if k == NOISE:
                # The noise is drawn as it is in the result: undo what later transformations would do to it.
                noise = queue.noise[i].to(torch.from_numpy(x).dtype).numpy() * x.dtype.type(queue.sigma)
                if FLIP in order[place:]:
                    noise = noise[:, ::-1]
                if SHUFFLE in order[place:]:
                    noise = noise[np.argsort(lead)]
                row = row + noise
        out.append(row)
    return np.stack(out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(
    length=st.sampled_from([1, 2, 7, 64]),
    rows=st.integers(1, 40),
    step=st.integers(0, 10_000),
    strong=st.booleans(),
    window=st.sampled_from(["shared", "per_lead"]),
    pipeline=st.sampled_from(["ecgaugment", "sequential"]),
)
@settings(max_examples=60, deadline=None)
def test_one_pass_equals_one_after_another(dtype, length, rows, step, strong, window, pipeline):
    keys = keys_of(rows, step)
    x = keyed.normal(keys, 12 * length, 99).view(rows, 12, length).to(dtype)
    augment = config.Augment(pipeline=pipeline, dropout_window=window)
    queue = draw_queue(augment, keys, noise_of(keys, length), strong=strong)
    assert torch.equal(apply_queue(x, queue), torch.from_numpy(augment_reference(x.numpy(), queue)))


def test_known_draws_never_change():
    """A later version must draw the same views, or old runs cannot be resumed or compared."""
    keys = keys_of(2)
    queue = draw_queue(config.Augment(), keys, torch.zeros(2, 12, 1000), strong=True)
    assert queue.used.int().tolist() == [[1, 1, 1, 0], [0, 1, 1, 1]]
    assert queue.order.tolist() == [[1, 0, 3, 2], [3, 0, 1, 2]]
    assert torch.cat([queue.start, queue.stop], 1).tolist() == [[16, 834], [630, 790]]
    assert queue.lead.tolist() == [[8, 3, 11, 2, 0, 1, 5, 4, 9, 10, 6, 7], [4, 6, 5, 11, 8, 9, 3, 7, 10, 0, 2, 1]]
    view = draw_mild(keys, torch.zeros(2, 12, 1000), MILD_STRONG)
    assert view.shift.tolist() == [285, 66]
    assert view.start.tolist() == [
        [0, 53, 53, 53, 53, 53, 53, 0, 53, 53, 53, 53],
        [691, 691, 0, 691, 691, 691, 691, 691, 691, 691, 0, 691],
    ]
    np.testing.assert_allclose(view.gain[:, :2], [[0.6863, 0.9602], [1.1733, 1.6523]], atol=1e-4)


def test_all_queues_occur_with_their_probabilities():
    """Weak: each with 1/4. Strong: 1, 2, 3, 4 transformations with 1, 21, 36, 6 of 64, all orders equally likely."""
    keys = keys_of(20_000)
    noise = torch.zeros(20_000, 12, 1)

    def queues(strong):
        queue = draw_queue(config.Augment(), keys, noise, strong=strong)
        rank = torch.where(queue.used, queue.order, 4)
        return Counter(tuple(k for k in r.argsort().tolist() if r[k] < 4) for r in rank)

    weak = queues(strong=False)
    assert set(weak) == {(0,), (1,), (2,), (3,)}
    assert stats.chisquare(list(weak.values())).pvalue > 1e-4
    strong = queues(strong=True)
    # The number of orders of T of 4 transformations is 4, 12, 24, 24.
    expected = {1: 1 / 64 / 4, 2: 21 / 64 / 12, 3: 36 / 64 / 24, 4: 6 / 64 / 24}
    assert len(strong) == 4 + 12 + 24 + 24
    observed, law = zip(*((n, 20_000 * expected[len(queue)]) for queue, n in strong.items()), strict=True)
    assert stats.chisquare(observed, law).pvalue > 1e-4


@pytest.mark.parametrize("window", ["shared", "per_lead"])
def test_dropout_window_law(window):
    keys, length = keys_of(30_000), 12
    augment = config.Augment(dropout_window=window)
    queue = draw_queue(augment, keys, torch.zeros(30_000, 12, length), strong=False)
    assert queue.start.shape == (30_000, 12 if window == "per_lead" else 1)
    start, stop = queue.start[:, -1], queue.stop[:, -1]
    half, centre = (stop - start) // 2, (stop + start) // 2
    pairs = Counter(zip(half.tolist(), centre.tolist(), strict=True))
    law = {(h, c): 1 / 6 / (length - 2 * h) for h in range(6) for c in range(h, length - h)}
    assert set(pairs) == set(law)
    assert stats.chisquare([pairs[k] for k in law], [30_000 * p for p in law.values()]).pvalue > 1e-4
    if window == "per_lead":
        a, b = queue.start[:, 0].double(), queue.start[:, 1].double()
        assert abs(torch.corrcoef(torch.stack([a, b]))[0, 1]) < 4 / 30_000**0.5


def test_lead_shuffle_and_noise_law():
    keys = keys_of(6000)
    queue = draw_queue(config.Augment(), keys, noise_of(keys, 16), strong=True)
    counts = torch.stack([(queue.lead == v).sum(0) for v in range(12)])
    assert stats.chisquare(counts.numpy().flatten()).pvalue > 1e-4
    only_noise = dataclasses.replace(queue, used=torch.tensor([False, False, False, True]).expand(6000, 4))
    out = apply_queue(torch.zeros(6000, 12, 16), only_noise)
    assert abs(out.std() - 0.5) < 0.002
    weak = draw_queue(config.Augment(noise_weak=0.07), keys, noise_of(keys, 16), strong=False)
    assert weak.sigma == 0.07


def test_fixed_sequence():
    augment, keys = config.Augment(pipeline="sequential"), keys_of(50)
    strong = draw_queue(augment, keys, noise_of(keys, 8), strong=True)
    assert strong.used.all()
    assert (strong.order.argsort(1) == torch.tensor(SEQUENCE)).all()
    weak = draw_queue(augment, keys, noise_of(keys, 8), strong=False)
    assert weak.used.nonzero()[:, 1].tolist() == [SEQUENCE[0]] * 50
    x = torch.randn(50, 12, 8)
    torch.testing.assert_close(ECGAugment(augment).weak(x, keys), x + 0.05 * noise_of(keys, 8))


@pytest.mark.parametrize("magnitude", [MILD_WEAK, MILD_STRONG])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_mild_equals_one_after_another(magnitude, dtype):
    keys, length = keys_of(200), 40
    x = torch.randn(200, 12, length, dtype=dtype)
    view = draw_mild(keys, noise_of(keys, length), magnitude)
    expected = torch.stack([row.roll(-int(s), 1) for row, s in zip(x, view.shift, strict=True)])
    expected = expected * view.gain.to(dtype)[:, :, None] + view.noise.to(dtype)
    lost = (view.stop - view.start == length).sum(1)
    for i, row in enumerate(expected):
        for v in range(12):
            row[v, int(view.start[i, v]) : int(view.stop[i, v])] = 0
    assert torch.equal(apply_mild(x, view), expected)
    assert set(lost.tolist()) == set(range(magnitude.lost + 1))
    window = (view.stop - view.start).where(view.stop - view.start < length, -1).max(1).values
    assert set(window.tolist()) == set(range(int(magnitude.window * length) + 1))
    assert set(view.shift.tolist()) == set(range(length))
    assert abs(view.gain.mean() - 1) < 4 * magnitude.gain / 2400**0.5
    assert abs(view.gain.std() - magnitude.gain) < 0.1 * magnitude.gain
    assert abs(view.noise.std() - magnitude.noise) < 0.02 * magnitude.noise


@each_pipeline
@pytest.mark.parametrize("view", ["weak", "strong"])
def test_result_does_not_depend_on_the_batch_and_input_is_kept(augment, view):
    for dtype in (torch.float16, torch.float32, torch.float64):
        x, keys = torch.randn(37, 12, 101).to(dtype), keys_of(37)
        before = x.clone()
        make = getattr(augment, view)
        whole = make(x, keys, BATCH)
        assert torch.equal(x, before)
        assert whole.dtype == dtype
        assert whole.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
        parts = [make(x[i:j], keys[i:j], BATCH) for i, j in ((0, 1), (1, 20), (20, 37))]
        assert torch.equal(torch.cat(parts), whole)
        order = torch.randperm(37)
        assert torch.equal(make(x[order], keys[order], BATCH), whole[order])
        assert not torch.equal(whole, make(x, keys_of(37, step=1), keyed.batch_key(20, 4, 1)))


def test_views_of_rows_whose_memory_is_not_contiguous():
    x = torch.randn(12, 5, 64).transpose(0, 1)
    for augment in map(ECGAugment, PIPELINES):
        expected = augment.strong(x.contiguous(), keys_of(5), BATCH)
        assert torch.equal(augment.strong(x, keys_of(5), BATCH), expected)


@pytest.mark.parametrize("pipeline", ["ecgaugment", "mild"])
def test_granularity(pipeline):
    """Per batch: all rows share everything but the noise. Per signal: rows differ."""
    keys, length = keys_of(64), 32
    noise = noise_of(keys, length)
    for key in map(keyed.batch_key, range(8), range(8), range(8)):
        shared = key.expand(64)
        if pipeline == "mild":
            drawn = dataclasses.asdict(draw_mild(shared, noise, MILD_STRONG))
        else:
            drawn = dataclasses.asdict(
                draw_queue(config.Augment(dropout_window="per_lead"), shared, noise, strong=True)
            )
        assert all((v == v[:1]).all() for k, v in drawn.items() if k not in ("noise", "sigma"))
    x = torch.randn(1, 12, length).expand(64, -1, -1)
    batch = ECGAugment(config.Augment(pipeline=pipeline, granularity="batch", noise_weak=0))
    sample = ECGAugment(config.Augment(pipeline=pipeline, noise_weak=0))
    rows = len(torch.unique(batch.weak(x, keys, BATCH), dim=0))
    assert rows == (64 if pipeline == "mild" else 1)  # the mild view has its own noise, in every row
    assert len(torch.unique(sample.weak(x, keys), dim=0)) > 10
    noisy = ECGAugment(config.Augment(pipeline="sequential", granularity="batch"))
    assert len(torch.unique(noisy.weak(x, keys, BATCH), dim=0)) == 64
    with pytest.raises(AssertionError, match="batch"):
        batch.weak(x, keys)


@each_pipeline
def test_works_without_data_on_meta(augment):
    """The meta device has no values: any hidden host synchronisation would raise."""
    x = torch.empty(3, 12, 64, device="meta")
    keys = keyed.row_keys(0, 0, 0, torch.arange(3, device="meta"))
    for view in (augment.weak, augment.strong):
        assert view(x, keys, keyed.batch_key(0, 0, 0, "meta")).shape == x.shape


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: pip install triton (280 MB)")
def test_the_kernel_of_gpus_is_this_one() -> None:
    """In Triton's interpreter: the same bits but for the noise, whose logarithm, sine and cosine come from NumPy there."""
    command = [sys.executable, "-m", "tests.support.view_kernel"]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    differ, largest = done.stdout.splitlines()
    assert differ == "differ []"
    assert 0 < float(largest.removeprefix("largest ")) < 2e-6


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: pip install triton (280 MB)")
def test_the_kernel_compiles_to_machine_code_of_gpus() -> None:
    """By the compiler and the assembler that Triton brings: no GPU is needed."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as build

    from ecgmatch_dist.augment import kernel

    options = {"STRONG": True, "SEQUENTIAL": False, "PER_LEAD": False, "LIBDEVICE": True, "SIZE": kernel.BLOCK}
    types = {"x": "*fp32", "out": "*fp32", "keys": "*i64", "choices": "*i64", "choice_stride": "i32"}
    types |= {"length": "i32", "source_length": "i32", "sigma": "fp32"} | dict.fromkeys(options, "constexpr")
    assert list(types) == kernel._view.arg_names
    places = {(kernel._view.arg_names.index(name),): value for name, value in options.items()}
    source = ASTSource(kernel._view, signature=types, constexprs=places)
    for capability in (80, 90):
        built = build(source, target=GPUTarget("cuda", capability, 32), options={"enable_fp_fusion": False})
        assert len(built.asm["cubin"]) > 10_000
        assert f".target sm_{capability}" in built.asm["ptx"]
