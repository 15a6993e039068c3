"""`ecgmatch monitor`: TensorBoard on a folder of runs."""

import subprocess
import sys
from pathlib import Path

from ecgmatch_dist.errors import UserError


def main(runs: Path = Path("runs"), port: int = 6006, host: str = "127.0.0.1") -> None:
    """Open TensorBoard on a folder of runs.

    Args:
        runs: The folder of run folders, or one run folder.
        port: Where to serve.
        host: Address to listen on; the default is this machine alone.
    """
    if not any(runs.glob("**/tb")):
        raise UserError(f"{runs}: no run with TensorBoard files here; --runs names the folder of runs")
    print(f"TensorBoard on http://{host}:{port} for {runs} (Ctrl-C ends it)", flush=True)
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(runs), "--port", str(port), "--host", host]
    sys.exit(subprocess.call(command))
