"""Typed reading of TOML and JSON: what is accepted, and the exact message for everything that is not."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from ecgmatch_dist.data.preprocess import Preprocess
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.files.strict import check_format, convert, describe, read_object, read_toml


@dataclass(frozen=True)
class Lead:
    name: str
    gain: float = 1.0


@dataclass(frozen=True)
class Recipe:
    """One field for every kind of type that the files of the project have."""

    database: str
    rate: int = 500
    verified: bool = False
    view: Literal["weak", "strong"] = "weak"
    threads: int | Literal["auto"] = "auto"
    raw: Path = Path("raw")
    cache: Path | None = None
    codes: tuple[int, ...] = ()
    lead: Lead = Lead("II")
    reference: Lead | None = None
    leads: tuple[Lead, ...] = ()
    spare: list[Lead] | None = None
    by_name: dict[str, Lead] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)


KNOWN = "database, rate, verified, view, threads, raw, cache, codes, lead, reference, leads, spare, by_name, counts"


def message(value: object, kind: Any = Recipe) -> str:
    with pytest.raises(UserError) as caught:
        convert(value, kind, "own.toml")
    return str(caught.value)


def test_every_kind_of_value_is_converted() -> None:
    value = {
        "database": "own",
        "rate": 100,
        "verified": True,
        "view": "strong",
        "threads": 4,
        "raw": "a/b",
        "cache": "c",
        "codes": [1, 2],
        "lead": {"name": "I", "gain": 2},
        "reference": {"name": "V1"},
        "leads": [{"name": "I"}, {"name": "V2", "gain": 0.5}],
        "spare": [{"name": "V3"}],
        "by_name": {"first": {"name": "I"}},
        "counts": {"A": 3},
    }
    assert convert(value, Recipe, "own.toml") == Recipe(
        database="own",
        rate=100,
        verified=True,
        view="strong",
        threads=4,
        raw=Path("a/b"),
        cache=Path("c"),
        codes=(1, 2),
        lead=Lead("I", 2.0),
        reference=Lead("V1"),
        leads=(Lead("I"), Lead("V2", 0.5)),
        spare=[Lead("V3")],
        by_name={"first": Lead("I")},
        counts={"A": 3},
    )
    assert convert({"database": "own", "cache": None, "reference": None}, Recipe, "own.toml") == Recipe("own")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"rates": 1}, f"unknown key `rates`; known are {KNOWN}"),
        ({"lead": {"name": "I", "gian": 2}}, "unknown key `lead.gian`; known are name, gain"),
        ({"reference": {"name": "I", "gian": 2}}, "unknown key `reference.gian`; known are name, gain"),
        ({"leads": [{"name": "I"}, {"gian": 2}]}, "unknown key `leads[1].gian`; known are name, gain"),
        ({"spare": [{"gian": 2}]}, "unknown key `spare[0].gian`; known are name, gain"),
        ({"by_name": {"first": {"gian": 2}}}, "unknown key `by_name.first.gian`; known are name, gain"),
    ],
)
def test_an_unknown_key_is_named_with_the_known_ones(change: dict[str, Any], expected: str) -> None:
    assert message({"database": "own", **change}) == f"own.toml: {expected}"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({}, "the key `database` is missing"),
        ({"database": "own", "lead": {}}, "lead: the key `name` is missing"),
        ({"database": "own", "reference": {}}, "reference: the key `name` is missing"),
        ({"database": "own", "leads": [{"name": "I"}, {"gain": 1}]}, "leads[1]: the key `name` is missing"),
        ({"database": "own", "by_name": {"first": {}}}, "by_name.first: the key `name` is missing"),
    ],
)
def test_a_missing_key_is_named(value: dict[str, Any], expected: str) -> None:
    assert message(value) == f"own.toml: {expected}"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"database": 3}, "database = 3: it takes a text"),
        ({"rate": "fast"}, "rate = 'fast': it takes a whole number"),
        ({"rate": 1.5}, "rate = 1.5: it takes a whole number"),
        ({"rate": True}, "rate = True: it takes a whole number"),
        ({"verified": 1}, "verified = 1: it takes true or false"),
        ({"view": "medium"}, "view = 'medium': it takes 'weak' or 'strong'"),
        ({"view": 3}, "view = 3: it takes 'weak' or 'strong'"),
        ({"threads": "all"}, "threads = 'all': it takes a whole number, 'auto'"),
        ({"raw": 3}, "raw = 3: it takes a path"),
        ({"cache": 3}, "cache = 3: it takes a path"),
        ({"codes": "x"}, "codes = 'x': it takes a list of a whole number"),
        ({"codes": [1, "x"]}, "codes[1] = 'x': it takes a whole number"),
        ({"lead": 3}, "lead = 3: it takes a table"),
        ({"lead": {"name": "I", "gain": "x"}}, "lead.gain = 'x': it takes a number"),
        ({"reference": 3}, "reference = 3: it takes a table"),
        ({"reference": {"name": 3}}, "reference.name = 3: it takes a text"),
        ({"leads": [{"name": "I"}, 3]}, "leads[1] = 3: it takes a table"),
        ({"leads": [{"name": 3}]}, "leads[0].name = 3: it takes a text"),
        ({"spare": [{"name": 3}]}, "spare[0].name = 3: it takes a text"),
        ({"by_name": 3}, "by_name = 3: it takes a table"),
        ({"by_name": {"first": {"name": "I"}, "second": 3}}, "by_name.second = 3: it takes a table"),
        ({"by_name": {"first": {"name": 3}}}, "by_name.first.name = 3: it takes a text"),
        ({"counts": {"A": 3, "B": "x"}}, "counts.B = 'x': it takes a whole number"),
        ({"rate": "x" * 100}, f"rate = '{'x' * 59}: it takes a whole number"),
    ],
)
def test_a_wrong_value_is_shown_with_what_the_key_takes(change: dict[str, Any], expected: str) -> None:
    assert message({"database": "own", **change}) == f"own.toml: {expected}"


def test_what_a_dataclass_says_of_itself_is_said_with_the_file(tmp_path: Path) -> None:
    assert message({"rate": 0}, Preprocess).startswith("own.toml: rate 0, length 6144, order 3: each must be")
    path = tmp_path / "own.toml"
    for content in ("a = " + "[" * 100_000, "a = " + "9" * 10_000):
        path.write_text(content)
        with pytest.raises(UserError, match="not a TOML file"):
            read_toml(path, Recipe)


def test_a_value_without_a_key() -> None:
    assert message([]) == "own.toml: [] instead of a table"
    assert message("x", int) == "own.toml: 'x' instead of a whole number"
    assert message({"A": "x"}, dict[str, int]) == "own.toml: A = 'x': it takes a whole number"


def test_types_in_words() -> None:
    assert describe(list[Lead]) == "a list of a table"
    assert describe(dict[str, int]) == "a table"
    assert describe(float | None) == "a number"
    assert describe(bytes) == "<class 'bytes'>"


def test_read_toml(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text("database = 'own'\n[[leads]]\nname = 'é'\n", encoding="utf-8")
    assert read_toml(path, Recipe) == Recipe("own", leads=(Lead("é"),))
    path.write_text("database = 'own'\n", encoding="utf-8-sig")  # saved by Notepad
    assert read_toml(path, Recipe) == Recipe("own")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "No such file or directory"),
        (b"database = ", "not a TOML file (Invalid value (at end of document))"),
        (
            b"database = '\xff'",
            "not a TOML file ('utf-8' codec can't decode byte 0xff in position 12: invalid start byte)",
        ),
        (b"rate = 3", "the key `database` is missing"),
    ],
)
def test_a_bad_toml_file_is_named(tmp_path: Path, content: bytes | None, expected: str) -> None:
    path = tmp_path / "own.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        read_toml(path, Recipe)
    assert str(caught.value) == f"{path}: {expected}"


def test_read_object(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text(json.dumps({"map": 0.5}))
    assert read_object(path, "train again") == {"map": 0.5}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "not found"),
        (b'{"map": ', "not JSON (Expecting value: line 1 column 9 (char 8))"),
        (b"\xff", "not JSON ('utf-8' codec can't decode byte 0xff in position 0: invalid start byte)"),
        (b"[1]", "a list instead of an object"),
        (b"null", "a NoneType instead of an object"),
    ],
)
def test_a_bad_json_file_is_named_with_the_remedy(tmp_path: Path, content: bytes | None, expected: str) -> None:
    path = tmp_path / "result.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        read_object(path, "train again")
    assert str(caught.value) == f"{path}: {expected}; train again"


def test_json_that_is_nested_too_deeply_and_a_folder(tmp_path: Path) -> None:
    (tmp_path / "deep.json").write_text("[" * 100_000)
    with pytest.raises(UserError, match=r"deep\.json: not JSON \(.*recursion.*\); train again"):
        read_object(tmp_path / "deep.json", "train again")
    with pytest.raises(UserError, match=r"cannot be read \(Is a directory\); train again"):
        read_object(tmp_path, "train again")


def test_the_format_number() -> None:
    check_format({"format": 2}, 2, "result.json", "train again")
    check_format({}, 1, "result.json", "train again")  # the first release wrote no number
    for value, found in (({}, "1"), ({"format": 3}, "3"), ({"format": "2"}, "'2'")):
        with pytest.raises(UserError) as caught:
            check_format(value, 2, "result.json", "train again")
        expected = f"result.json: format {found}, but this version of ecgmatch_dist reads 2; train again"
        assert str(caught.value) == expected
