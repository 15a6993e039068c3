"""The generated entry, called as the runner of the Challenge of 2021 calls it, in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import ecgmatch_dist as em
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.export import challenge, command
from tests.support.prediction import CLASSES, write_model

RUNNER = """
import json, sys
from pathlib import Path
from scipy.io import loadmat
from team_code import load_model, run_model, training_code
import ecgmatch_dist
training_code(None, "trained")
training_code(None, "model")  # as in `python train_model.py training_data model`
out = {"package": ecgmatch_dist.__file__}
for header in map(Path, sys.argv[1:]):
    text = header.read_text()
    lines = text.splitlines()
    leads = tuple(line.split()[-1] for line in lines[1:1 + int(lines[0].split()[1])])
    model = load_model("trained", leads)
    classes, labels, probabilities = run_model(model, text, loadmat(header.with_suffix(".mat"))["val"])
    out[header.stem] = [list(classes), [int(label) for label in labels], [float(p) for p in probabilities]]
print(json.dumps(out))
"""


def test_the_entry(tmp_path: Path, shared_data: Path) -> None:
    run = write_model(tmp_path / "run")
    command.main(run, to=tmp_path / "model", onnx=False, challenge=tmp_path / "entry")
    entry = tmp_path / "entry"
    assert {path.name for path in entry.iterdir()} == {
        "Dockerfile", "ecgmatch_dist", "model", "requirements.txt", "team_code.py",
    }  # fmt: skip
    needs = (entry / "requirements.txt").read_text().split()
    assert all("==" in line for line in needs)
    assert {"torch", "wfdb"} <= {line.partition("==")[0] for line in needs}
    assert (
        (entry / "Dockerfile").read_text().startswith(f"FROM python:{sys.version_info[0]}.{sys.version_info[1]}-slim\n")
    )
    headers = [next((shared_data / "wfdb500" / name / "g1").glob("*.hea")) for name in ("georgia", "chapman_shaoxing")]
    headers.append(shared_data / "wfdb500/odd/S0001.hea")
    done = subprocess.run(
        [sys.executable, "-c", RUNNER, *map(str, headers)], cwd=entry, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert Path(found["package"]).is_relative_to(entry)
    model = em.load(run, "cpu", nearest=0)
    for answer, header in zip(model.predict_files(headers), headers, strict=True):
        classes, labels, probabilities = found[header.stem]
        assert len(classes) == 5
        assert classes[4] == "426783006"
        assert "164889003" in classes[1].split("|")
        assert probabilities == pytest.approx(list(answer.probabilities.values()), abs=1e-5)  # type: ignore[union-attr]
        assert labels == [int(name in answer.predicted) for name in CLASSES]  # type: ignore[union-attr]
    with pytest.raises(UserError, match="entry: not empty; remove it, or give another --challenge"):
        command.main(run, to=tmp_path / "other", onnx=False, challenge=entry)


def test_physical_values() -> None:
    header = "x 2 500/1000 3\nx.mat 16+24 1000(10)/mV 16 0 5 0 0 I\nx.mat 16 2/uV 16 4 0 0 0 II\n#Dx: 1\n"
    rate, leads, signal = challenge.physical(header, np.array([[1010, 10, -32768], [2004, 4, 4]], np.int16))
    assert rate == 500
    assert leads == ["I", "II"]
    np.testing.assert_allclose(signal, [[1, 0, np.nan], [1, 0, 0]], rtol=1e-6)
    for bad in ("", "x 1 500 3\nx.mat 16 1000/mV 16 0 0 0 0 I\n", header.replace("2/uV", "?")):
        with pytest.raises(UserError):
            challenge.physical(bad, np.zeros((2, 3), np.int16))
