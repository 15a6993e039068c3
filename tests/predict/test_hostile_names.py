"""Names of files that a terminal, rich or a spreadsheet would obey."""

import csv
import io
import os
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from ecgmatch_dist.predict import command
from ecgmatch_dist.predict.command import on_screen
from ecgmatch_dist.predict.model import Predictor
from ecgmatch_dist.predict.table import columns, write_csv
from tests.support.prediction import ecg, write_model, write_record


def test_on_the_screen_and_in_the_table(tmp_path: Path) -> None:
    model = Predictor(write_model(tmp_path / "run"), "cpu")
    answer = replace(model.predict(ecg(), rate=500), path="=a[/x]\x1b[31m.hea")
    screen = Console(file=io.StringIO(), width=200)
    screen.print(on_screen(answer, model))
    assert "=a[/x]\\x1b[31m.hea" in screen.file.getvalue()  # type: ignore[attr-defined]
    write_csv(lambda: iter([answer.to_json()]), columns(model.classes), tmp_path / "table.csv")
    (row,) = csv.DictReader((tmp_path / "table.csv").open())
    assert row["path"] == "'=a[/x]\\x1b[31m.hea"


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_a_name_that_is_not_utf8_is_a_row_and_a_page(tmp_path: Path, suffix: str) -> None:
    """An archive of an old Windows: one such name ended the command, and the table of all others was not written."""
    model = write_model(tmp_path / "run")
    header = write_record(tmp_path / "new", "a", ecg())
    os.rename(header, os.fsencode(header.parent) + b"/M\xfcller.hea")
    write_record(tmp_path / "new", "b", ecg(seed=2))
    out, pages = tmp_path / f"table{suffix}", tmp_path / "pages"
    command.main(model, (str(tmp_path / "new"),), out=out, pages=pages)
    assert {path.name for path in pages.iterdir()} == {"M_ller.html", "b.html", "index.html"}
    if suffix == ".csv":
        assert [Path(row["path"]).name for row in csv.DictReader(out.open())] == ["M\\xdcfcller.hea", "b.hea"]


def test_names_of_pages_that_are_taken_or_too_long(tmp_path: Path) -> None:
    """The page of index.hea was written over by the list of pages; that of a long name ended the command."""
    model = write_model(tmp_path / "run")
    for name in ("index", "x" * 240):
        write_record(tmp_path / "new", "a", ecg()).rename(tmp_path / "new" / f"{name}.hea")
    command.main(model, (str(tmp_path / "new"),), pages=tmp_path / "pages")
    assert {path.name for path in (tmp_path / "pages").iterdir()} == {"index.html", "index-2.html", f"{'x' * 100}.html"}
