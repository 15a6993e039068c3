"""Names of files that a terminal, rich or a spreadsheet would obey."""

import csv
import io
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from ecgmatch_dist.predict.command import on_screen
from ecgmatch_dist.predict.model import Predictor
from ecgmatch_dist.predict.table import columns, write_csv
from tests.support.prediction import ecg, write_model


def test_on_the_screen_and_in_the_table(tmp_path: Path) -> None:
    model = Predictor(write_model(tmp_path / "run"), "cpu")
    answer = replace(model.predict(ecg(), rate=500), path="=a[/x]\x1b[31m.hea")
    screen = Console(file=io.StringIO(), width=200)
    screen.print(on_screen(answer, model))
    assert "=a[/x]\\x1b[31m.hea" in screen.file.getvalue()  # type: ignore[attr-defined]
    write_csv(lambda: iter([answer.to_json()]), columns(model.classes), tmp_path / "table.csv")
    (row,) = csv.DictReader((tmp_path / "table.csv").open())
    assert row["path"] == "'=a[/x]\\x1b[31m.hea"
