"""Print the lowest versions that pyproject.toml allows, as constraints for pip: `python tools/lowest.py cpu,web > lowest.txt`.

Torch stays at the tested version: an older one is a download of gigabytes. Tools of developers stay, too."""

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KEPT = ("torch",)


def lower_bounds(extras: list[str]) -> dict[str, str]:
    """Package -> the version after `>=`, of the package itself and of its extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(one for extra in extras for one in project["optional-dependencies"][extra])]
    found = (re.match(r"([\w.-]+)(?:\[\w+\])?>=([\w.]+)$", one) for one in wanted)
    return {match[1]: match[2] for match in found if match}


def pinned() -> dict[str, str]:
    """Package -> version of constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


if __name__ == "__main__":
    tested = pinned()
    for name, version in lower_bounds(sys.argv[1].split(",")).items():
        print(f"{name}=={tested[name] if name in KEPT else version}")
