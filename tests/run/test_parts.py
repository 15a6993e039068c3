"""Which recordings and labels a method sees: of the split's parts, and of an archive."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ecgmatch_dist.config import method_settings
from ecgmatch_dist.data.archive import Archive, Tar
from ecgmatch_dist.data.labels import UNKNOWN
from ecgmatch_dist.data.split_file import Split
from ecgmatch_dist.data.store import ShardStore
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.methods.ecgmatch import ECGMatchSettings
from ecgmatch_dist.run.parts import Parts, as_seen_by, parts_of
from tests.support.training import final_state, run, tiny

NOBODY = [UNKNOWN, UNKNOWN]


def parts(archive: Archive) -> Parts:
    labels = {"labelled": [[1, 0]], "unlabelled": [[0, 1], NOBODY, [0, 0]], "validation": [[1, 1]], "test": [[0, 1]]}
    rows = {"labelled": [7], "unlabelled": [3, 4, 5], "validation": [8], "test": [9]}
    store: Any = None  # nothing is read
    return Parts(
        store,
        archive,
        {part: np.array(values, np.uint8) for part, values in labels.items()},
        {part: np.array(values) for part, values in rows.items()},
    )


@pytest.mark.parametrize(
    ("method", "labelled", "unlabelled"),
    [
        ("ecgmatch", [7], [3, 4, 5]),
        ("supervised", [7], [3, 4, 5]),
        ("fully_supervised", [7, 3, 5], [3, 4, 5]),  # of row 4 nobody knows the label
        ("contrastive", [7], [7, 3, 4, 5]),  # the signals of the whole training part
    ],
)
def test_what_each_method_sees(method: str, labelled: list[int], unlabelled: list[int]) -> None:
    given = parts(Archive())
    seen = as_seen_by(method_settings(method)(), given)
    assert seen.rows["labelled"].tolist() == labelled
    assert seen.rows["unlabelled"].tolist() == unlabelled
    assert [len(seen.labels[part]) for part in ("labelled", "unlabelled")] == [len(labelled), len(unlabelled)]
    for part in ("validation", "test"):
        assert seen.rows[part] is given.rows[part]
        assert seen.labels[part] is given.labels[part]
    assert given.rows["labelled"].tolist() == [7], "the split's own parts stay as they are"


def test_an_archive_follows_the_unlabelled_part_and_has_no_labels() -> None:
    archive = Archive((Tar("a.tar", ("x", "y")),))
    seen = as_seen_by(method_settings("ecgmatch")(), parts(archive))
    assert seen.rows["unlabelled"].tolist() == [3, 4, 5], "it has no rows in the store"
    assert seen.labels["unlabelled"].tolist() == [[0, 1], NOBODY, [0, 0], NOBODY, NOBODY]


def test_an_unknown_label_is_not_a_number() -> None:
    given = parts(Archive())
    given.labels["labelled"][0, 1] = UNKNOWN
    targets = given.targets(torch.device("cpu"), torch.float64)
    assert targets[0, 0] == 1
    assert bool(targets[0, 1].isnan())
    assert targets.dtype == torch.float64


def test_fewer_unlabelled_recordings_are_a_draw_that_grows(data: Path) -> None:
    """1,000 and 2,000 recordings are compared: the 2,000 hold the 1,000. Every label stays with its recording."""
    split = Split.load(data / "split.json")
    store = ShardStore(str(data / "shards"), split.databases)
    every = parts_of(split, store, Archive())
    labels = dict(zip(every.ids("unlabelled"), every.labels["unlabelled"].tolist(), strict=True))
    few, more = (parts_of(split, store, Archive(), unlabelled=n) for n in (8, 16))
    assert len(few.ids("unlabelled")) == 8
    assert set(few.ids("unlabelled")) < set(more.ids("unlabelled")) < set(labels)
    assert few.ids("unlabelled") != every.ids("unlabelled")[:8], "a draw, not the first names"
    for found in (few, more):
        assert found.labels["unlabelled"].tolist() == [labels[name] for name in found.ids("unlabelled")]
        assert found.ids("test") == every.ids("test")
    assert parts_of(split, store, Archive(), unlabelled=10**6).ids("unlabelled") == every.ids("unlabelled")


def test_fewer_unlabelled_recordings_share_the_supervised_start(data: Path, tmp_path: Path) -> None:
    every = tiny(data, tmp_path)
    fewer = replace(every, data=replace(every.data, unlabelled=20))
    assert fewer.fingerprint() != every.fingerprint()
    assert fewer.start().fingerprint() == every.start().fingerprint()
    chain = replace(fewer, selfsupervised="contrastive")
    assert chain.start().data.unlabelled == 20, "it starts from a run that sees unlabelled recordings"
    assert len(final_state(run(fewer))["bank.p"]) == 20


@pytest.mark.parametrize(("neighbours", "field"), [(9, "method.neighbours = 9"), (3, "optim.unlabelled_batch = 16")])
def test_too_few_recordings_for_the_bank_are_refused(data: Path, tmp_path: Path, neighbours: int, field: str) -> None:
    config = tiny(data, tmp_path, ECGMatchSettings(neighbours=neighbours))
    with pytest.raises(UserError, match=f"{field}: at most the 8 unlabelled recordings"):
        run(replace(config, data=replace(config.data, unlabelled=8)))
    assert not list(tmp_path.iterdir()), "before the supervised run"
