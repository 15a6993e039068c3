"""Folders that may not be read are told, not passed over."""

import os
from pathlib import Path
from typing import Any

import pytest

from ecgmatch_dist.cli import main
from ecgmatch_dist.data.adopt.survey import list_files
from ecgmatch_dist.data.databases import load_recipe
from ecgmatch_dist.data.formats.read import find
from ecgmatch_dist.data.recordings import find_records
from ecgmatch_dist.files.walk import files_below


@pytest.fixture
def archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two recordings, one of them in a folder that this user may not list. (Root may list all: chmod is not enough.)"""
    folder, scandir = tmp_path / "chapman", os.scandir
    for name in ("JS1", "closed/JS2"):
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / f"{name}.hea").write_text("JS 12 500 5000\n")

    def refusing(path: Any) -> Any:
        if Path(path).name == "closed":
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    return folder


def test_a_closed_folder_is_told(archive: Path) -> None:
    for look in (
        lambda: list(find(archive)),
        lambda: list_files(archive),
        lambda: find_records(load_recipe("chapman"), archive.parent),
    ):
        with pytest.raises(PermissionError, match="closed"):
            look()


def test_as_a_sentence_with_the_remedy(archive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["ecgmatch", "adopt", str(archive), "--name", "own", "--to", str(archive.parent)])
    with pytest.raises(SystemExit, match=r"closed: Permission denied; .*ask its owner"):
        main()


def test_files_of_all_folders_sorted_and_nothing_else(tmp_path: Path) -> None:
    for name in ("b/2.hea", "a.hea", "b/c/1.hea"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).touch()
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "nowhere").symlink_to(tmp_path / "missing")
    os.mkfifo(tmp_path / "pipe")
    assert files_below(tmp_path) == [tmp_path / name for name in ("a.hea", "b/2.hea", "b/c/1.hea")]
