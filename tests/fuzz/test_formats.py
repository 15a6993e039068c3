"""Every format that `predict` and `shards build` read beside WFDB."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecgmatch_dist.data.formats.read import find, read
from ecgmatch_dist.data.formats.recording import Rejected
from ecgmatch_dist.errors import UserError
from tests.support.formats import ALL, OTHER, WRITERS, related
from tests.support.mutate import bounded_memory, fuzz, mutated, refused_at_most


@pytest.fixture(autouse=True)
def bounded() -> Iterator[None]:
    with bounded_memory():
        yield


@pytest.mark.parametrize("name", [*WRITERS, *OTHER])
@fuzz
@given(data=st.data())
def test_recordings(tmp_path: Path, name: str, data: st.DataObject) -> None:
    good, path = tmp_path / "good" / name, tmp_path / name
    if not good.exists():
        good.parent.mkdir(exist_ok=True)
        (OTHER[name] if name in OTHER else WRITERS[name][0])(good, related(250))
    path.write_bytes(data.draw(mutated(good.read_bytes())))
    with np.errstate(all="ignore"):
        for ref in find(path):
            with refused_at_most(Rejected, UserError):
                assert read(ref, **ALL).signal.shape[0] == 12  # type: ignore[arg-type]
