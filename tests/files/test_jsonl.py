"""JSON lines: cut and damaged lines are skipped, whole ones are kept."""

import json
from pathlib import Path
from typing import Any

import pytest

from ecgmatch_dist.files import jsonl
from ecgmatch_dist.files.jsonl import parse_lines, read_lines, read_tail, to_line

RECORDS: list[dict[str, Any]] = [{"step": 1, "loss": 0.5}, {"step": 2, "name": "é\n"}, {}]


def test_records_survive(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(map(to_line, RECORDS)))
    assert len(path.read_text().splitlines()) == len(RECORDS)  # a line break in a value does not break the line
    assert list(read_lines(path)) == read_tail(path) == RECORDS


def test_a_missing_file_has_no_records(tmp_path: Path) -> None:
    assert list(read_lines(tmp_path / "metrics.jsonl")) == []
    assert read_tail(tmp_path / "metrics.jsonl") == []
    assert list(read_lines(tmp_path)) == []  # a folder
    assert read_tail(tmp_path) == []


@pytest.mark.parametrize("cut", range(1, 12))
def test_a_cut_last_line_costs_only_itself(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(to_line({"step": 1}) + to_line({"step": 2})[:-cut])
    expected = [{"step": 1}, {"step": 2}] if cut == 1 else [{"step": 1}]  # 1: only the line break is lost
    assert list(read_lines(path)) == read_tail(path) == expected


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"null",
        b"[1, 2]",
        b"3",
        b'"text"',
        b"{step: 2}",
        b"\x00\x00\x00",
        b"\xff\xfe",
        b'{"step": 2}{"step": 2}',
        b"[" * 100_000,
    ],
)
def test_a_damaged_line_is_skipped(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + damage + b'\n{"step": 3}\n')
    assert list(read_lines(path)) == [{"step": 1}, {"step": 3}]


def test_a_broken_character_damages_only_its_value(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"name": "a\xffb"}\n{"step": 2}\n')
    assert list(read_lines(path)) == read_tail(path) == [{"name": "a\ufffdb"}, {"step": 2}]


def test_the_tail_starts_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    records = [{"step": step, "name": "é"} for step in range(100, 200)]
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")
    size = path.stat().st_size // len(records)
    for tail in range(1, 3 * size + 1):  # also in the middle of a line and of a character
        monkeypatch.setattr(jsonl, "TAIL", tail)
        assert read_tail(path) == records[len(records) - tail // size :]
    monkeypatch.setattr(jsonl, "TAIL", 10**6)
    assert read_tail(path) == records


def test_parse_lines_takes_any_lines() -> None:
    assert list(parse_lines(iter(['{"step": 1}\n', "{", '{"step": 2}']))) == [{"step": 1}, {"step": 2}]
