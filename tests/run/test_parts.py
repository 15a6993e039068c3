"""Which recordings and labels a method sees: of the split's parts, and of an archive."""

from typing import Any

import numpy as np
import pytest
import torch

from ecgmatch_dist.config import method_settings
from ecgmatch_dist.data.archive import Archive, Tar
from ecgmatch_dist.data.labels import UNKNOWN
from ecgmatch_dist.run.parts import Parts, as_seen_by

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
