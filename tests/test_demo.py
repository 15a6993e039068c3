"""`make demo`: its stages are commands that exist, and the README shows some of them. What they do is tested elsewhere."""

import re
import shlex
from pathlib import Path

import pytest

from ecgmatch_dist import demo
from tests.support.commands import ROOT, check_command


def stages(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the demo would run, as it prints it."""
    told: list[str] = []
    monkeypatch.setattr(demo, "ecgmatch", lambda *words: told.append(shlex.join(["ecgmatch", *map(str, words)])))
    demo.main(folder)
    return told


def test_every_stage_is_a_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    told = stages(tmp_path, monkeypatch)
    assert len(told) == 11
    for command in told:
        check_command(command)


def test_the_readme_shows_its_stages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    shown = re.findall(r"^\$ (ecgmatch .*)$", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(shown) == 5
    assert {*shown} <= {*stages(Path("demo"), monkeypatch)}


def test_finished_stages_are_skipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("raw/synthetic.json", "shards/ptbxl/dataset.json", "splits/mix@0.05.s20.json"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    told = stages(tmp_path, monkeypatch)
    assert [line.split()[1] for line in told] == ["shards"] * 3 + ["split"] + ["train"] * 3 + ["report"]
    assert not [line for line in told if "ptbxl" in line]
