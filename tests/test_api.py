"""The Python API: names without torch, functions that do what the commands do."""

import importlib
import subprocess
import sys
from importlib.metadata import files
from pathlib import Path

import pytest

import ecgmatch_dist as em
from ecgmatch_dist.errors import UserError


def test_the_names_are_there_without_torch() -> None:
    code = "import sys; from ecgmatch_dist import Config, build_report, build_shards, load, make_split, train; "
    code += "assert callable(train) and callable(load); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_train_is_a_function_before_and_after_its_first_call(tmp_path: Path) -> None:
    """The module ecgmatch_dist.train takes the name of the function once it is imported: it can be called, too."""
    code = f"import ecgmatch_dist as em; c = em.Config(split='{tmp_path}/none.json'); "
    for _ in range(2):
        code += "\ntry: em.train(c)\nexcept Exception as error: print(type(error).__name__, error)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.count("UserError") == 2, done.stdout
    assert done.stdout.count("none.json: not found") == 2


def test_train_is_a_function_after_its_module_was_imported(tmp_path: Path) -> None:
    importlib.import_module("ecgmatch_dist.train")
    with pytest.raises(UserError, match=r"none\.json: not found"):
        em.train(em.Config(split=tmp_path / "none.json"))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'trian'"):
        em.trian  # noqa: B018
    assert {"Config", "train", "load"} <= set(dir(em))


def test_it_is_typed() -> None:
    assert (Path(em.__file__).parent / "py.typed").is_file()
    assert files("ecgmatch-dist") is not None
