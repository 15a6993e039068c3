"""Predictions over crops: where the crops lie, that they are means; and a run that trains on crops and predicts with them."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from ecgmatch_dist import keyed
from ecgmatch_dist.augment import ECGAugment, random_crop
from ecgmatch_dist.config import Augment, Model, Runtime
from ecgmatch_dist.data.store import ShardStore
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.methods.ecgmatch import ECGMatchSettings
from ecgmatch_dist.network.crops import over_crops, places
from ecgmatch_dist.network.model import build_model
from ecgmatch_dist.network.student import Student
from ecgmatch_dist.network.teacher import Teacher
from ecgmatch_dist.record.weights import read_notes
from tests.support.ranks import run_processes
from tests.support.training import assert_near, final_state, run, tiny

SMALL = Model(width=16, heads=2)


@pytest.mark.parametrize(
    ("length", "crop", "starts"),
    [
        (1024, 512, [0, 256, 512]),
        (1024, 256, [0, 128, 256, 384, 512, 640, 768]),
        (1000, 512, [0, 244, 488]),
        (600, 512, [0, 88]),
        (512, 512, [0]),
        (300, 512, [0]),
        (1024, 0, [0]),
    ],
)
def test_places(length, crop, starts):
    assert places(length, crop) == starts


@pytest.mark.parametrize("length", [129, 200, 1000, 6000])
def test_crops_cover_the_recording_and_overlap_by_half(length):
    starts = np.array(places(length, 128))
    assert starts[0] == 0
    assert starts[-1] + 128 == length
    assert np.diff(starts).max() <= 64


def test_the_mean_over_crops_one_by_one():
    model = build_model(5, SMALL, 0).double().eval()
    x = torch.randn(3, 12, 200, dtype=torch.float64)
    each = [model(x[:, :, start : start + 128]) for start in (0, 36, 72)]
    for infer in (Student(model, "fp64", crop=128).infer, Teacher(model, 0.9, crop=128).infer):
        found = infer(x)
        torch.testing.assert_close(found.z, sum(out.z for out in each) / 3)
        torch.testing.assert_close(found.logits, sum(out.logits for out in each) / 3)
        torch.testing.assert_close(found.logits, model.classifier(found.z))
        torch.testing.assert_close(infer(x[:, :, :100]).z, model.eval()(x[:, :, :100]).z)


def test_each_crop_drops_something_else_and_each_row_its_own():
    model = build_model(5, SMALL, 0).double()
    student = Student(model, "fp64", crop=64)
    x = torch.randn(1, 12, 64, dtype=torch.float64).repeat(4, 1, 2)  # all rows and both halves alike
    keys = keyed.row_keys(0, 0, 0, torch.arange(4))
    seen = []
    over_crops(lambda part, own: seen.append(own) or model.eval()(part), x, 64, keys)
    assert len(torch.cat(seen).unique()) == 4 * len(places(128, 64))
    whole = student.infer(x, keys, "dropout").logits
    torch.testing.assert_close(student.infer(x[2:], keys[2:], "dropout").logits, whole[2:])
    assert not torch.allclose(whole[0], whole[1])


def test_random_crops_are_pieces_of_the_signal_keyed_by_the_row():
    x = torch.arange(200.0).repeat(500, 12, 1) + 1000 * torch.arange(500.0)[:, None, None]
    keys = keyed.row_keys(1, 2, 3, torch.arange(500))
    out = random_crop(x, keys, 64)
    start = out[:, 0, 0] - x[:, 0, 0]
    assert torch.equal(out, x[:, :, :64] + start[:, None, None])
    assert (start.min(), start.max()) == (0, 136)
    assert torch.equal(random_crop(x[7:9], keys[7:9], 64), out[7:9])
    assert random_crop(x, keys, 200) is x


@pytest.mark.parametrize("pipeline", ["ecgaugment", "sequential", "mild"])
def test_views_are_crops_and_do_not_depend_on_the_batch(pipeline):
    augment = ECGAugment(Augment(pipeline=pipeline, crop=64))
    x, keys = torch.randn(8, 12, 200), keyed.row_keys(1, 2, 3, torch.arange(8))
    for view in (augment.weak, augment.strong):
        out = view(x, keys)
        assert out.shape == (8, 12, 64)
        assert torch.equal(view(x[3:5], keys[3:5]), out[3:5])


def test_a_crop_that_keeps_the_diagnosis_is_not_turned_around_its_ends():
    """Of a straight line in time, no step is as large as that from its end to its beginning."""
    x = torch.arange(1000.0).expand(64, 12, 1000)
    out = ECGAugment(Augment(pipeline="mild", crop=100)).weak(x, keyed.row_keys(1, 2, 3, torch.arange(64)))
    steps = out.diff(dim=2)
    inside = (out[:, :, 1:] != 0) & (out[:, :, :-1] != 0)
    assert steps[inside].min() > -2


def _train_on_rank(rank, world, config):
    torch.set_num_threads(1)
    run(config)


@pytest.mark.slow
def test_a_run_on_crops_is_the_same_on_two_ranks_and_says_what_it_was_trained_on(data: Path, tmp_path: Path) -> None:
    """The bank is filled, asked and tested with means over crops; the test's predictions are made again by hand."""
    runtime = Runtime(device="cpu", precision="fp64", log_every=1, save_every=0)
    model = Model(width=16, first_width=8, backbone="resnet1d")
    options = {"augment": Augment(pipeline="mild", crop=64), "model": model, "runtime": runtime}
    one = tiny(data, tmp_path / "one", ECGMatchSettings(neighbours=3), **options)
    folder = run(one)
    run_processes(2, _train_on_rank, tiny(data, tmp_path / "two", ECGMatchSettings(neighbours=3), **options))
    assert_near(final_state(folder), final_state(tmp_path / "two" / folder.name))

    notes = read_notes(folder / "best.safetensors")
    assert (notes.crop, notes.model) == (64, model)
    network = build_model(5, model, seed=0).double().eval()
    network.load_state_dict(load_file(folder / "best.safetensors"))
    store = ShardStore(data / "shards", ["chapman"])
    ids = json.loads((folder / "split.json").read_text())["parts"]["test"]
    x = torch.from_numpy(store.read(store.rows(ids))).double()
    with torch.no_grad():
        logits = sum(network(x[:, :, start : start + 64]).logits for start in (0, 32, 64)) / 3
    with np.load(folder / "predictions" / "test.npz") as saved:
        np.testing.assert_allclose(saved["probabilities"], logits.sigmoid().numpy(), rtol=1e-5)


def test_a_crop_that_is_longer_than_the_recordings_is_refused(data: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"augment\.crop = 129: at most 128, as the shards have"):
        run(tiny(data, tmp_path, augment=Augment(crop=129), init="scratch"))


def test_the_views_of_a_pair_lose_leads_but_no_window():
    x, keys = torch.ones(200, 12, 300), keyed.row_keys(1, 2, 3, torch.arange(200))
    augment = ECGAugment(Augment(pipeline="mild", crop=64))
    pair, strong = augment.pair(x, keys), augment.strong(x, keys)
    lost = (pair == 0).all(2)
    assert (lost.sum(1).max(), lost.sum(1).min()) == (4, 0)
    assert ((pair == 0).any(2) == lost).all()
    assert not ((strong == 0).any(2) == (strong == 0).all(2)).all()
