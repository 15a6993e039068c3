"""Mutation testing of one module by the tests that should notice: mutmut changes a line at a time, and a test must fail.

    pip install mutmut
    python tools/mutants.py ecgmatch_dist/losses.py tests/test_losses.py tests/methods/test_unknown_labels.py
    MUTANTS='*__mutmut_*3' python tools/mutants.py ecgmatch_dist/data/labels.py tests/data/test_labels.py     # a sample of them

It works in a copy of the last commit, under the temporary folder, and prints what survived. `mutmut show NAME` in that copy
prints the change."""

import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = """
[tool.mutmut]
source_paths = ["ecgmatch_dist"]
only_mutate = [{module!r}]
pytest_add_cli_args_test_selection = {tests!r}
pytest_add_cli_args = ["-p", "no:cacheprovider", "-p", "no:xdist"]
also_copy = ["launch", "shards", "slurm", "examples", "docs", "README.md", "CONTRIBUTING.md", "CHANGELOG.md"]
timeout_constant = 30.0
track_dependencies = false
"""


def main(module: str, tests: list[str]) -> None:
    copy = Path(tempfile.mkdtemp(prefix="mutants-"))
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(copy)], check=True)
    with (copy / "pyproject.toml").open("a") as file:
        file.write(SETTINGS.format(module=module, tests=tests))
    command, own = [sys.executable, "-m", "mutmut"], {**os.environ, "OMP_NUM_THREADS": "1"}
    sample = os.environ.get("MUTANTS", "").split()
    subprocess.run([*command, "run", "--max-children", "1", *sample], cwd=copy, env=own, check=False)
    done = subprocess.run(
        [*command, "results", "--all", "true"], cwd=copy, env=own, check=True, capture_output=True, text=True
    )
    lines = [line.strip() for line in done.stdout.splitlines() if "__mutmut_" in line]
    lines = [line for line in lines if not line.endswith(": not checked")]  # not in the sample
    print(*(line for line in lines if not line.endswith(": killed")), sep="\n")
    print(f"{copy}: {dict(Counter(line.rpartition(': ')[2] for line in lines))}")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2:])
