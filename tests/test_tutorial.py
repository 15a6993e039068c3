"""The notebook runs from its first cell to its last, in small, and shows what it printed in full size."""

import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pytest

NOTEBOOK = Path(__file__).parents[1] / "examples" / "tutorial.ipynb"
SIZES = 'Path("tutorial"), 500, 150'


def code_cells() -> list[dict[str, Any]]:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


@pytest.mark.slow
def test_every_cell_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    code = "\n".join("".join(cell["source"]) for cell in code_cells())
    assert SIZES in code
    with mpl.rc_context({"backend": "agg"}):
        exec(compile(code.replace(SIZES, 'Path("tutorial"), 160, 4'), NOTEBOOK.name, "exec"), {})
    assert "predicted:" in capsys.readouterr().out
    assert (tmp_path / "tutorial" / "report" / "index.html").is_file()


def test_the_outputs_are_there_and_none_is_an_error() -> None:
    outputs = [output for cell in code_cells() for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error"]
    shown = {kind for output in outputs for kind in output.get("data", {})}
    assert {"image/png", "image/svg+xml"} <= shown
    assert all(cell["outputs"] for cell in code_cells() if "print(" in "".join(cell["source"]))
