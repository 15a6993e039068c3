"""`ecgmatch` alone: each state of a folder has its next command, and the parsers accept it."""

import json
import re
import shlex
from pathlib import Path

import pytest

from ecgmatch_dist.presets import PRESETS, fitting
from ecgmatch_dist.terminal.next_step import PRESET, advise
from tests.support.commands import check_command


def touch(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"rate": 100, "length": 1024}) if path.name == "dataset.json" else "{}"
        path.write_text(text)


STATES = {
    "nothing": ((), "no recordings", "ecgmatch demo"),
    "recordings": (("data/raw/JS/a.hea",), "recordings in data/raw", "shards build chapman --raw data/raw"),
    "own folder": ((), "no recordings", "ecgmatch adopt YOUR_FOLDER"),
    "adopted": (
        ("mine.toml", "mine_classes.toml", "mine_preview.html"),
        "a recipe, mine.toml, and no shards",
        "ecgmatch shards build mine.toml",
    ),
    "shards": (("data/shards/own/dataset.json",), "shards of own", "ecgmatch split within --database own"),
    "split": (
        ("data/shards/own/dataset.json", "splits/within-own@0.05.s20.json"),
        "1 split, no run",
        "ecgmatch train --preset few_labels --split splits/within-own@0.05.s20.json --shards data/shards",
    ),
    "unfinished": (("runs/a.ecgmatch/config.json",), "1 unfinished (a.ecgmatch)", "ecgmatch monitor"),
    "finished": (
        (
            "runs/a.supervised/config.json",
            "runs/a.supervised/result.json",
            "runs/a.ups/config.json",
            "runs/a.ups/result.json",
        ),
        "2 finished runs",
        "ecgmatch predict runs/a.ups",
    ),
}


@pytest.mark.parametrize("state", STATES)
def test_each_state_has_its_next_command(tmp_path: Path, state: str) -> None:
    files, found, command = STATES[state]
    touch(tmp_path, *files)
    told, *commands = advise(tmp_path)
    assert found in told
    assert any(command in line for line in commands)
    for line in commands:
        check_command(line)


@pytest.mark.parametrize("state", ["adopted", "shards", "split", "finished"])
def test_a_name_in_a_suggested_command_is_one_word_of_a_shell(tmp_path: Path, state: str) -> None:
    """People copy the line: a folder of a colleague must not run a command."""
    strange = "x y$(touch z)`w`;'"
    touch(tmp_path, *(re.sub(r"\b(mine|own|a)(?=[./_@])", lambda _: strange, name) for name in STATES[state][0]))
    _, *commands = advise(tmp_path)
    words = [word for line in commands for word in shlex.split(line, comments=True)]
    assert any(strange in word for word in words)


def test_the_suggested_presets_are_meant_for_such_shards() -> None:
    for (rate, length), name in PRESET.items():
        assert name in fitting(rate, length)
    assert {*PRESET} == {(make().data.rate, make().data.length) for make in PRESETS.values()}
