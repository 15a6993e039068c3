"""`ecgmatch monitor`: TensorBoard on a folder of runs."""

import os
import sys
from pathlib import Path

from ecgmatch_dist.errors import UserError
from ecgmatch_dist.web.address import refuse_a_taken_port


def main(runs: Path = Path("runs"), port: int = 6006, host: str = "127.0.0.1") -> None:
    """Open TensorBoard on a folder of runs.

    Args:
        runs: The folder of run folders, or one run folder.
        port: Where to serve.
        host: Address to listen on; the default is this machine alone.
    """
    if not any(runs.glob("**/tb")):
        raise UserError(f"{runs}: no run with TensorBoard files here; --runs names the folder of runs")
    refuse_a_taken_port(host, port)
    options = ["--logdir", str(runs), "--port", str(port), "--host", host]
    # TensorBoard takes the place of this process: it says its address when it listens, and signals reach it alone.
    os.execv(sys.executable, [sys.executable, "-m", "tensorboard.main", *options])
