"""trees.safetensors: what is written is read back, what is no tree is refused, and what public trees say is used."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from ecgmatch_dist.config import OPINION
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.measurements.measure import measure, measure_all, number_of_measurements
from ecgmatch_dist.measurements.trees import (
    PUBLISHED,
    MeasurementTrees,
    PublicTrees,
    descend,
    fit_trees,
    grow,
    with_answers,
)
from ecgmatch_dist.measurements.trees_file import FORMAT, NAME, load_trees, save_trees, what_is_wrong
from ecgmatch_dist.record.hub import INCLUDED
from tests.support.measured import Shards, recordings
from tests.support.ranks import run_threads

Arrays = dict[str, NDArray[Any]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    x, y = recordings(60, 0)
    y[:, 1] = 0  # of this class there is nothing to learn: one leaf
    path = tmp_path_factory.mktemp("model") / "trees.safetensors"
    save_trees(path, grow(measure_all(x, 100), y, 0, settings=PUBLISHED), ("A", "B"))
    return path


def test_the_number_of_measurements_is_that_of_any_recording() -> None:
    rng = np.random.default_rng(0)
    assert len(measure(rng.standard_normal((12, 700)), 100)) == number_of_measurements()


def test_trees_are_read_back(saved: Path) -> None:
    """Rounded to float32: what they say differs by no more."""
    (x, y), (new, truth) = recordings(60, 0), recordings(40, 1)
    y[:, 1] = 0
    rows = measure_all(new, 100)
    forests, classes = load_trees(saved)
    found, grown = descend(forests, rows), descend(grow(measure_all(x, 100), y, 0, settings=PUBLISHED), rows)
    assert classes == ("A", "B")
    np.testing.assert_allclose(found, grown, atol=1e-6)
    assert ((found[:, 0] > 0.5) == truth[:, 0]).mean() > 0.9


def put(name: str, at: int, value: float) -> Callable[[Arrays], Arrays]:
    def change(arrays: Arrays) -> Arrays:
        array = arrays[name].copy()
        array[at] = value
        return arrays | {name: array}

    return change


def wrapped_roots(arrays: Arrays) -> Arrays:
    """As int32, each of them is one more than the one before, or so it seems."""
    first, *_, last = arrays["roots"]
    roots = np.array([first, 2**31 - 1, -(2**31), -1, last], np.int32)
    return arrays | {"roots": roots, "trees": np.array([4, 1], np.int32)}


def many_trees(arrays: Arrays) -> Arrays:
    """Small in a file, large when all of them are asked at once."""
    number = np.arange(100_001, dtype=np.int32)
    leaves = {"feature": np.full(len(number), -1, np.int16), "value": np.zeros(len(number), np.float32)}
    return leaves | {"right": number, "roots": number, "trees": np.array([100_000, 1], np.int32)}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (put("right", 0, 0), "a child does not lie behind its parent"),  # without end
        (put("right", 0, 10**6), "a child does not lie behind its parent"),
        (put("feature", 0, 5000), "looks at a measurement that does not exist"),
        (put("feature", 0, -2), "looks at a measurement that does not exist"),
        (put("roots", 0, 10**6), "a tree begins outside of the nodes"),
        (put("roots", 0, -1), "a tree begins outside of the nodes"),
        (put("roots", 1, 0), "or where another one does"),
        (put("trees", 0, 0), "a class has no tree"),
        (put("trees", 0, 1001), "or others than there are"),
        (wrapped_roots, "a tree begins outside of the nodes"),
        (many_trees, "it has more than 100,000 trees"),
        (put("value", 0, np.nan), "a threshold is not finite"),
        (put("value", -1, 2), "a share not between 0 and 1"),  # the last node is a leaf
        (lambda arrays: arrays | {"value": arrays["value"][:-1]}, "its arrays have different lengths"),
        (lambda arrays: arrays | {"value": arrays["value"].astype(np.float64)}, "another type or shape"),
        (lambda arrays: arrays | {"trees": arrays["trees"][None]}, "another type or shape"),
    ],
)
def test_what_is_no_tree_is_refused(saved: Path, change: Callable[[Arrays], Arrays], told: str) -> None:
    arrays = load_file(saved)
    assert what_is_wrong(arrays, 2, number_of_measurements()) == ""
    assert told in what_is_wrong(change(arrays), 2, number_of_measurements())


@pytest.mark.parametrize(
    ("notes", "told"),
    [
        ({"version": OPINION + 1}, "read other measurements than this version of ecgmatch_dist makes"),
        ({"measurements": 3}, "read other measurements"),
        ({"format": FORMAT + 1}, "format 2, but this version"),
        ({"classes": ["A", 2]}, "its classes are no list of names"),
        ({"classes": ["A"]}, "it has trees of 2 classes and names of 1"),
    ],
)
def test_trees_that_are_not_for_this_version_are_refused(
    saved: Path, tmp_path: Path, notes: dict[str, Any], told: str
) -> None:
    good = {"format": FORMAT, "classes": ["A", "B"], "measurements": number_of_measurements(), "version": OPINION}
    path = tmp_path / "trees.safetensors"
    save_file(load_file(saved), path, {"notes": json.dumps(good)})
    assert load_trees(path)[1] == ("A", "B")
    save_file(load_file(saved), path, {"notes": json.dumps(good | notes)})
    with pytest.raises(UserError, match=told):
        load_trees(path)


def test_a_chain_of_nodes_is_refused() -> None:
    """Each level of it would cost as much as all trees of a class."""

    def chain(depth: int) -> Arrays:
        nodes = np.arange(2 * depth + 1)
        inner = (nodes % 2 == 0) & (nodes < 2 * depth)  # a leaf to the left, the next inner node to the right
        return {
            "feature": np.where(inner, 0, -1).astype(np.int16),
            "value": np.zeros(len(nodes), np.float32),
            "right": np.where(inner, nodes + 2, nodes).astype(np.int32),
            "roots": np.zeros(1, np.int32),
            "trees": np.ones(1, np.int32),
        }

    assert what_is_wrong(chain(199), 1, 3) == ""
    assert "deeper than 200 nodes" in what_is_wrong(chain(200), 1, 3)


def test_a_type_that_numpy_does_not_know_is_refused(saved: Path, tmp_path: Path) -> None:
    path = tmp_path / "trees.safetensors"
    header, content = saved.read_bytes(), b""
    length = int.from_bytes(header[:8], "little")
    content = header[8 + length :]
    named = json.loads(header[8 : 8 + length])
    named["feature"]["dtype"] = "BF16"  # two bytes, as int16
    text = json.dumps(named).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content)
    with pytest.raises(UserError, match="not the trees of a model"):
        load_trees(path)


def test_the_trees_of_the_included_model_fit_the_measurements() -> None:
    """After a change of the measurements: raise OPINION, and grow these trees anew by `ecgmatch export --trees`."""
    forests, classes = load_trees(INCLUDED / "chapman_ptbxl" / NAME)
    assert len(classes) == len(forests.trees) == 5


def test_public_trees_are_a_measurement_and_where_classes_are_the_same_an_opinion(saved: Path) -> None:
    (x, y), (new, _) = recordings(30, 2), recordings(10, 1)
    forests, _ = load_trees(saved)
    rows, asked = measure_all(x, 100), measure_all(new, 100)
    theirs = descend(forests, asked)
    own = grow(with_answers(rows, descend(forests, rows)), y, 0)
    says = descend(own, np.hstack([asked, theirs.astype(np.float32)]))
    both = np.stack([(says + theirs)[:, 0] / 2, says[:, 1]], 1)  # of the second class they have learnt nothing
    for same, expected in ((False, says), (True, both)):
        trees = MeasurementTrees(own, 100, PublicTrees(forests, same))
        np.testing.assert_array_equal(trees.predict(new), expected)
        assert trees.predict(new[:0]).shape == (0, 2)


def test_answers_do_not_depend_on_how_many_are_asked(saved: Path) -> None:
    forests, _ = load_trees(saved)
    rows = measure_all(recordings(10, 1)[0], 100)
    assert np.array_equal(
        descend(forests, rows), np.concatenate([descend(forests, rows[i : i + 1]) for i in range(10)])
    )


def test_a_leaf_of_published_trees_is_no_single_recording() -> None:
    """docs/predict.md promises it: the file tells nobody's measurements."""
    x, y = recordings(100, 0)
    y[:, 0] = np.random.default_rng(1).integers(0, 2, len(y))  # noise, so that trees would grow as deep as they may
    forests = grow(measure_all(x, 100), y, 0, settings=PUBLISHED)
    reached = np.zeros((len(forests.roots), len(forests.feature)), int)
    for tree, root in enumerate(forests.roots):
        for row in measure_all(x, 100):
            node = root
            while forests.left[node] != node:
                left = row[forests.feature[node]] <= forests.threshold[node]
                node = forests.left[node] if left else forests.right[node]
            reached[tree, node] += 1
    assert reached[reached > 0].min() >= 5


def test_ranks_change_nothing_with_public_trees(saved: Path) -> None:
    (x, y), (new, _) = recordings(21, 0), recordings(10, 1)
    public = PublicTrees(load_trees(saved)[0], same_classes=True)

    def fit(rank: int, world: int) -> NDArray[np.float64]:
        return fit_trees(Shards(x), np.arange(len(x)), y, 0, public).predict(new)  # type: ignore[arg-type]

    alone, *others = (*run_threads(1, fit), *run_threads(2, fit))
    assert all(np.array_equal(alone, other) for other in others)
