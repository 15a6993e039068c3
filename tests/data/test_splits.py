"""The protocols: sizes, strata, patients, one file with a hash, and what is refused."""

import csv
import hashlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ecgmatch_dist.data import make_split as make_split_module
from ecgmatch_dist.data.assign import assign_parts, draw
from ecgmatch_dist.data.labels import load_scheme
from ecgmatch_dist.data.make_split import make_split
from ecgmatch_dist.data.split_file import PARTS, Split, digest
from ecgmatch_dist.data.splits import check_options, main, scheme_of_all
from ecgmatch_dist.data.store import ShardStore
from ecgmatch_dist.errors import UserError
from tests.support.commands import check_command
from tests.support.shard_factory import make_shards, random_codes

DATABASES = ("chapman", "g12ec", "ningbo")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three databases; chapman has recordings without a class, g12ec has patients with up to six recordings."""
    root: Path = tmp_path_factory.mktemp("shards")
    codes = random_codes(400, 1)
    codes[10:40] = ["270492004X"] * 30
    make_shards(root, "chapman", 400, 4, codes, per_shard=500)
    patients = [f"p{i}" for i in np.sort(np.random.default_rng(0).integers(0, 120, 300))]
    make_shards(root, "g12ec", 300, 4, random_codes(300, 2), patients=patients, per_shard=500)
    make_shards(root, "ningbo", 250, 4, random_codes(250, 3), per_shard=500)
    return root


@pytest.fixture(scope="module")
def store(root: Path) -> ShardStore:
    return ShardStore(root, DATABASES)


def one(root: Path, database: str) -> ShardStore:
    return ShardStore(root, [database])


def sizes(split: Split) -> list[int]:
    return [len(split.parts[part]) for part in PARTS]


def test_within_sizes_and_dropped_recordings(root: Path) -> None:
    split = make_split(one(root, "chapman"), "within", 0.1, 20, "ecgmatch5")
    assert split.name == "within-chapman@0.1.s20"
    assert sum(sizes(split)) == 370  # 30 have no class
    assert np.abs(np.array(sizes(split)) - [29.6, 266.4, 37, 37]).max() <= 6  # labels go before sizes
    assert split.manifests.keys() == {"chapman"}


def test_mix_pools_and_cross_holds_one_out(store: ShardStore) -> None:
    mix = make_split(store, "mix", 0.05, 19, "ecgmatch5")
    assert (mix.name, mix.databases, mix.test_database) == ("mix@0.05.s19", DATABASES, None)
    assert all({name.split("/")[0] for name in ids} == set(DATABASES) for ids in mix.parts.values())
    cross = make_split(store, "cross", 0.05, 20, "ecgmatch5", "ningbo")
    assert (cross.name, cross.test_database) == ("cross-ningbo@0.05.s20", "ningbo")
    assert cross.parts["test"] == [f"ningbo/ningbo{i:05d}" for i in range(250)]
    others = [name for part in PARTS[:3] for name in cross.parts[part]]
    assert not any(name.startswith("ningbo") for name in others)
    assert len(others) == 670
    assert abs(len(cross.parts["validation"]) - 67) <= 5


@given(ratio=st.sampled_from([0.05, 0.1, 0.5, 1.0]), seed=st.integers(0, 1000), stratified=st.booleans())
@settings(deadline=None, max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_disjoint_complete_and_patients_stay_together(
    store: ShardStore, ratio: float, seed: int, stratified: bool
) -> None:
    split = make_split(store, "mix", ratio, seed, "ecgmatch5", stratified=stratified)
    everyone = [name for part in PARTS for name in split.parts[part]]
    assert len(everyone) == len(set(everyone)) == 920
    assert all(ids == sorted(ids) for ids in split.parts.values())
    patient = dict(zip(store.manifest["id"], store.manifest["database"] + store.manifest["patient"], strict=True))
    seen: dict[str, str] = {}
    for part in PARTS:
        for name in split.parts[part]:
            if name.startswith("g12ec"):
                assert seen.setdefault(patient[name], part) == part
    assert len(seen) > 100


def test_classes_are_alike_in_all_parts(root: Path) -> None:
    split = make_split(one(root, "ningbo"), "within", 0.2, 20, "ecgmatch5")
    n = split.counts["unlabelled"]["recordings"]
    for part in PARTS:
        k = split.counts[part]["recordings"]
        for name in ("CD", "Rhythm", "STT", "Other", "Normal"):
            share = split.counts["unlabelled"][name] / n
            assert abs(split.counts[part][name] - share * k) <= 2, (part, name)


def test_random_split_is_another_and_says_so(root: Path) -> None:
    store = one(root, "ningbo")
    plain = make_split(store, "within", 0.1, 20, "ecgmatch5", stratified=False)
    assert plain.name == "within-ningbo-random@0.1.s20"
    assert sizes(plain) == [20, 180, 25, 25]
    assert plain.parts != make_split(store, "within", 0.1, 20, "ecgmatch5").parts


def test_seeds_differ_and_bytes_are_reproduced_in_any_order_of_databases(root: Path, tmp_path: Path) -> None:
    for i, order in enumerate((DATABASES, DATABASES[::-1])):
        split = make_split(ShardStore(root, order), "mix", 0.1, 20, "ecgmatch5")
        split.save(tmp_path / f"{i}.json")
    assert (tmp_path / "0.json").read_bytes() == (tmp_path / "1.json").read_bytes()
    other = make_split(ShardStore(root, DATABASES), "mix", 0.1, 21, "ecgmatch5")
    shared = set(split.parts["test"]) & set(other.parts["test"])
    assert 0 < len(shared) < len(split.parts["test"]) / 2


def test_counts_and_labels(store: ShardStore) -> None:
    split = make_split(store, "mix", 0.1, 20, "ecgmatch5")
    for part in PARTS:
        y = split.labels(store, part)
        assert y.dtype == np.uint8
        assert {"recordings": len(y), **dict(zip(load_scheme("ecgmatch5").short, y.sum(0).tolist(), strict=True))} == (
            split.counts[part]
        )
    name = split.parts["test"][7]
    codes = store.manifest["codes"].iloc[int(store.rows([name])[0])]
    assert np.array_equal(split.labels(store, "test")[7], load_scheme("ecgmatch5").encode(codes.split()))


def test_recordings_without_a_class_are_kept_where_the_scheme_keeps_them(root: Path, monkeypatch: Any) -> None:
    keeping = replace(load_scheme("ecgmatch5"), drop_unlabelled=False)
    monkeypatch.setattr(make_split_module, "load_scheme", lambda _: keeping)
    assert sum(sizes(make_split(one(root, "chapman"), "within", 0.1, 20, "ecgmatch5"))) == 400


def test_saved_and_loaded(store: ShardStore, tmp_path: Path) -> None:
    split = make_split(store, "cross", 0.1, 20, "ecgmatch5", "g12ec")
    path = tmp_path / "new" / "splits" / "x.json"
    split.save(path)
    assert Split.load(path) == split
    split.save(path)  # the same again is no error
    other = make_split(store, "cross", 0.1, 21, "ecgmatch5", "g12ec")
    with pytest.raises(UserError, match="another split of this name"):
        other.save(path)
    assert Split.load(path) == split


def test_the_hash_is_that_of_canonical_json() -> None:
    """Whatever the order of the fields; those who check it in another language need these bytes."""
    value = {"seed": 20, "parts": {"test": ["b/1"], "labelled": []}, "sha256": "x", "format": 1}
    canonical = b'{"parts":{"labelled":[],"test":["b/1"]},"seed":20}'
    assert digest(value) == hashlib.sha256(canonical).hexdigest()


def test_a_changed_file_is_refused(store: ShardStore, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    make_split(store, "mix", 0.1, 20, "ecgmatch5").save(path)
    text = path.read_text()
    value = json.loads(text)
    moved = json.loads(text)
    moved["parts"]["labelled"].append(moved["parts"]["test"].pop())
    twice = json.loads(text)
    twice["parts"]["labelled"].append(twice["parts"]["test"][0])
    twice["sha256"] = digest(twice)
    fewer = {**value, "parts": {k: v for k, v in value["parts"].items() if k != "test"}}
    fewer["sha256"] = digest(fewer)
    for content, message in [
        (json.dumps(moved), "hash"),
        (json.dumps(twice), "is in labelled and in test"),
        (json.dumps(fewer), "parts"),
        (json.dumps({**value, "extra": 1}), "unknown key `extra`"),
        (json.dumps([1]), "a list instead of an object; make it with `ecgmatch split`"),
        (text[:100], "not JSON"),
        (json.dumps({**value, "format": 4}), "format 4, but this version"),
    ]:
        path.write_text(content)
        with pytest.raises(UserError, match=message):
            Split.load(path)
    with pytest.raises(UserError, match=r"none\.json: not found"):
        Split.load(tmp_path / "none.json")


def test_other_shards_are_noticed(root: Path, store: ShardStore, tmp_path: Path) -> None:
    split = make_split(one(root, "ningbo"), "within", 0.1, 20, "ecgmatch5")
    split.check(store)
    with pytest.raises(UserError, match="ningbo"):
        split.check(one(root, "chapman"))
    make_shards(tmp_path, "ningbo", 250, 4, random_codes(250, 3), seed=9)
    with pytest.raises(UserError, match="not those"):
        split.check(one(tmp_path, "ningbo"))


@pytest.mark.parametrize("ratio", [0.0, -0.1, 1.5])
def test_impossible_ratios(root: Path, ratio: float) -> None:
    with pytest.raises(UserError, match="ratio"):
        make_split(one(root, "ningbo"), "within", ratio, 20, "ecgmatch5")


def test_too_few_recordings_say_so(tmp_path: Path) -> None:
    make_shards(tmp_path, "tiny", 12, 4)
    with pytest.raises(
        UserError, match=r"labelled part is empty: 12 recordings with a label are too few at ratio 0\.01"
    ):
        make_split(one(tmp_path, "tiny"), "within", 0.01, 20, "ecgmatch5")
    make_shards(tmp_path, "none", 5, 4, ["1"] * 5)
    with pytest.raises(UserError, match="empty"):
        make_split(one(tmp_path, "none"), "within", 0.5, 20, "ecgmatch5")


def test_one_class_can_be_stratified() -> None:
    y = (np.arange(100) % 10 == 0).astype(np.uint8)[:, None]
    drawn = draw(y, 0.2, np.random.RandomState(0), True)
    assert (drawn.sum(), y[drawn].sum()) == (20, 2)


def test_sizes_of_the_paper_on_real_labels(shared_data: Path) -> None:
    """N_B of the within protocol on the real codes of three databases."""
    scheme, y = load_scheme("ecgmatch5"), {}
    for name in ("georgia", "ptbxl", "chapman"):
        with (shared_data / "labels" / f"{name}.csv").open() as file:
            rows = list(csv.reader(file))[1:]
        table = scheme.encode_all(" ".join(row[1:]).replace(",", " ").replace(";", " ") for row in rows)
        y[name] = table[table.any(1)]
    for name, expected in (("georgia", 396), ("ptbxl", 785), ("chapman", 389)):
        part = assign_parts(y[name], "within", 0.05, np.random.RandomState(20), True)
        assert abs((part == 0).sum() - expected) <= 0.03 * expected  # labels go before sizes
        assert np.abs(y[name][part == 0].mean(0) - y[name].mean(0)).max() < 0.015


def test_the_command(root: Path, tmp_path: Path, capsys: Any) -> None:
    main("within", shards=str(root), database="chapman", seeds=(19, 20, 21), to=tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [f"within-chapman@0.05.s{seed}.json" for seed in (19, 20, 21)]
    out = capsys.readouterr().out
    assert "labelled" in out
    assert "Rhythm" in out
    command = out.splitlines()[-1].removeprefix("next        ")
    assert command == f"ecgmatch train --split {tmp_path}/within-chapman@0.05.s19.json --shards {root}", "of no preset"
    check_command(command)
    main("mix", shards=str(root), databases=("chapman", "ningbo"), to=tmp_path)
    assert Split.load(tmp_path / "mix@0.01.s20.json").databases == ("chapman", "ningbo")
    main("cross", shards=str(root), test="g12ec", ratio=0.02, seed=3, random=True, to=tmp_path)
    assert Split.load(tmp_path / "cross-g12ec-random@0.02.s3.json").ratio == 0.02


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"protocol": "within"}, "--database"),
        ({"protocol": "within", "database": "chapman", "test": "g12ec"}, "no --test"),
        ({"protocol": "mix", "test": "g12ec"}, "no --test"),
        ({"protocol": "cross"}, "--test NAME"),
        ({"protocol": "cross", "test": "nobody"}, "nobody"),
        ({"protocol": "mix", "databases": ("chapman",)}, "two databases"),
        ({"protocol": "mix", "scheme": "nothing"}, "nothing"),
        ({"protocol": "mix", "shards": "nowhere"}, "no folder of shards"),
        ({"protocol": "mix", "shards": "pipe:ls"}, "pipe"),
        ({"protocol": "mix", "shards": "http://127.0.0.1:9/x"}, "--databases"),
    ],
)
def test_the_command_refuses(root: Path, tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    arguments = {"shards": str(root), "to": tmp_path, **arguments}
    with pytest.raises(UserError, match=message):
        main(arguments.pop("protocol"), **arguments)
    assert not list(tmp_path.iterdir())


def test_a_mistake_is_one_line_and_a_non_zero_exit(root: Path) -> None:
    command = [sys.executable, "-m", "ecgmatch_dist", "split", "within", "--database", "nobody", "--shards", str(root)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stderr.startswith("ecgmatch: ")
    assert result.stderr.count("\n") == 1


def test_folds_are_kept_as_published(tmp_path: Path) -> None:
    folds = [str(1 + i % 10) for i in range(200)]
    make_shards(tmp_path, "ptbxl", 200, folds=folds, patients=[f"p{i % 100}" for i in range(200)])
    store = ShardStore(tmp_path, ["ptbxl"])
    splits = [make_split(store, "folds", 0.2, seed, "ecgmatch5") for seed in (19, 20)]
    assert splits[0].name == "folds-ptbxl@0.2.s19"
    for split in splits:
        fold = {f"ptbxl/ptbxl{i:05d}": f for i, f in enumerate(folds)}
        assert {fold[i] for i in split.parts["validation"]} == {"9"}
        assert {fold[i] for i in split.parts["test"]} == {"10"}
        assert len(split.parts["labelled"]) == pytest.approx(0.2 * 160, abs=6)
    assert splits[0].parts["test"] == splits[1].parts["test"]
    assert splits[0].parts["labelled"] != splits[1].parts["labelled"]


def test_folds_need_folds(tmp_path: Path) -> None:
    make_shards(tmp_path, "chapman", 50)
    with pytest.raises(UserError, match="has no fold"):
        make_split(ShardStore(tmp_path, ["chapman"]), "folds", 0.2, 19, "ecgmatch5")


LIST = Path("list.csv")


@pytest.mark.parametrize(
    "options",
    [
        ("within", None, None, "mine", 1, 0),
        ("within", None, None, "", 3, 0),
        ("within", None, None, "", 1, 2),
        ("given", LIST, LIST, "mine", 1, 0),
    ],
)
def test_options_that_go_together(options: Any) -> None:
    check_options(*options)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("within", LIST, None, "", 1, 0), "--labelled LIST belongs to the protocol given"),
        (("given", None, None, "", 1, 0), "--labelled LIST belongs to the protocol given"),
        (("within", None, LIST, "", 1, 0), "--labelled LIST belongs to the protocol given"),
        (("within", None, None, "mine", 2, 0), "2 splits would share one name"),
        (("within", None, None, "mine", 1, 3), "3 splits would share one name"),
        (("within", None, None, "", 1, 1), "at least 2"),
        (("within", None, None, "", 2, 3), "one --seed"),
        (("folds", None, None, "", 1, 3), "no published"),
        (("given", LIST, LIST, "", 1, 3), "or listed validation part"),
    ],
)
def test_options_that_exclude_each_other(options: Any, told: str) -> None:
    with pytest.raises(UserError, match=told):
        check_options(*options)


def test_databases_of_two_schemes_need_one_to_be_chosen() -> None:
    def store(*schemes: str) -> Any:
        return SimpleNamespace(datasets={f"d{i}": SimpleNamespace(scheme=name) for i, name in enumerate(schemes)})

    assert scheme_of_all(store("ecgmatch5", "ecgmatch5")) == "ecgmatch5"
    with pytest.raises(UserError, match="choose one with --scheme"):
        scheme_of_all(store("ecgmatch5", "cinc25"))
