"""A split of a large archive holds one letter per recording. It means what the lists of names mean."""

import json
from pathlib import Path

import numpy as np
import pytest

from ecgmatch_dist.data import split_file
from ecgmatch_dist.data.make_split import make_split
from ecgmatch_dist.data.split_file import PARTS, Split, digest
from ecgmatch_dist.data.store import ShardStore
from ecgmatch_dist.errors import UserError
from tests.support.shard_factory import make_shards, random_codes


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> ShardStore:
    root = tmp_path_factory.mktemp("shards")
    for database, n in (("b", 150), ("a_b", 100), ("a", 120)):
        codes = [c if i % 5 else "" for i, c in enumerate(random_codes(n))]
        make_shards(
            root, database, n, length=16, codes=codes, patients=[f"p{i // 2}" if i % 7 else "" for i in range(n)]
        )
    return ShardStore(root, ["b", "a_b", "a"])


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_file, "MOST_NAMES", 0)


@pytest.mark.parametrize("protocol", ["mix", "cross"])
def test_letters_mean_what_names_mean(
    store: ShardStore, tmp_path: Path, protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    test = "a" if protocol == "cross" else None
    names = make_split(store, protocol, 0.2, 20, "ecgmatch5", test)  # type: ignore[arg-type]
    monkeypatch.setattr(split_file, "MOST_NAMES", 0)
    made = make_split(store, protocol, 0.2, 20, "ecgmatch5", test)  # type: ignore[arg-type]
    made.save(tmp_path / "split.json")
    split = Split.load(tmp_path / "split.json")
    assert (names.format, split.format, split.parts) == (2, 3, {})
    assert split.sha256 == made.sha256 != names.sha256
    rows, expected = split.rows(store), names.rows(store)
    for part in PARTS:
        assert np.array_equal(rows[part], expected[part]), "also in the same order: a bank has its rows in it"
        assert store.ids(rows[part]) == names.parts[part] == sorted(names.parts[part])
        assert np.array_equal(split.labels(store, part), names.labels(store, part))
        assert split.size(part) == names.size(part) == len(rows[part])
    assert split.counts == names.counts
    assert split.left_out == names.left_out
    counted = {
        database: {part: sum(name.startswith(f"{database}/") for name in names.parts[part]) for part in PARTS}
        for database in store.databases
    }
    assert split.count_by_database() == names.count_by_database() == counted
    shuffled = ShardStore(store.source.root, ["a", "b", "a_b"])  # type: ignore[union-attr]
    assert make_split(shuffled, protocol, 0.2, 20, "ecgmatch5", test).sha256 == split.sha256  # type: ignore[arg-type]
    assert shuffled.ids(split.rows(shuffled)["test"]) == names.parts["test"]


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: v["letters"].update(a="x" * 120), "letters.a holds 'x', not one of luvt-"),
        (lambda v: v["letters"].update(a=v["letters"]["a"].replace("u", "l", 1)), "counts say another number"),
        (lambda v: v["letters"].pop("a"), "letters for each of its databases"),
        (lambda v: v["parts"].update(labelled=["a/a00000"]), "no names"),
        (lambda v: v.update(format=2), "its parts are"),
        (lambda v: v.update(format=4), "format 4"),
    ],
)
def test_letters_that_make_no_sense_are_refused(
    store: ShardStore, tmp_path: Path, change: object, message: str
) -> None:
    value = make_split(store, "mix", 0.2, 20, "ecgmatch5").to_json()
    assert callable(change)
    change(value)
    value["sha256"] = digest(value)
    (tmp_path / "split.json").write_text(json.dumps(value))
    with pytest.raises(UserError, match=message):
        Split.load(tmp_path / "split.json")


@pytest.mark.usefixtures("large")
def test_changed_letters_and_other_shards_are_refused(store: ShardStore, tmp_path: Path) -> None:
    split = make_split(store, "mix", 0.2, 20, "ecgmatch5")
    text = json.dumps(split.to_json())
    (tmp_path / "split.json").write_text(
        text.replace("uul", "ulu", 1) if "uul" in text else text.replace("ul", "lu", 1)
    )
    with pytest.raises(UserError, match="does not match its hash"):
        Split.load(tmp_path / "split.json")
    longer = {**split.letters, "a": split.letters["a"] + "-"}
    with pytest.raises(UserError, match="121 recordings of a, but there are 120"):
        Split(**{**split.__dict__, "letters": longer}).rows(store)
