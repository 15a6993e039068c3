"""environment.json: where and with which versions a run was computed."""

import datetime
import importlib.metadata
import platform
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from ecgmatch_dist import __version__
from ecgmatch_dist.files.strict import check_format, convert, read_object

FORMAT = 1
REMEDY = "the run must be trained again"
PACKAGES = (
    "torch",
    "numpy",
    "scipy",
    "scikit-learn",
    "pandas",
    "webdataset",
    "wfdb",
    "faiss-cpu",
    "faiss-gpu",
    "submitit",
)


@dataclass(frozen=True)
class Environment:
    """The environment of the latest start of a run."""

    version: str = ""
    git: str | None = None
    python: str = ""
    torch: str = ""
    packages: dict[str, str] = field(default_factory=dict)
    host: str = ""
    command: list[str] = field(default_factory=list)
    world_size: int = 0
    devices: list[str] = field(default_factory=list)
    started: str = ""
    format: int = FORMAT


def describe_environment(world_size: int) -> Environment:
    """The environment of this process."""
    import torch  # slow to import, and `read_environment` needs nothing of it

    packages = {}
    for name in PACKAGES:
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    here = Path(__file__).parent
    describe = ["git", "-C", str(here), "describe", "--always", "--dirty"]
    git = subprocess.run(describe, capture_output=True, text=True, check=False)
    return Environment(
        version=__version__,
        git=git.stdout.strip() or None,
        python=platform.python_version(),
        torch=torch.__version__,
        packages=packages,
        host=socket.gethostname(),
        command=sys.argv,
        world_size=world_size,
        devices=[torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] or [platform.machine()],
        started=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )


def read_environment(path: Path) -> Environment:
    value = read_object(path, REMEDY)
    check_format(value, FORMAT, path, REMEDY)
    return convert(value, Environment, str(path))
