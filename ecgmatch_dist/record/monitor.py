"""`ecgmatch monitor`: TensorBoard on a folder of runs."""

import os
import socket
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
    refuse_a_taken_port(host, port)
    options = ["--logdir", str(runs), "--port", str(port), "--host", host]
    # TensorBoard takes the place of this process: it says its address when it listens, and signals reach it alone.
    os.execv(sys.executable, [sys.executable, "-m", "tensorboard.main", *options])


def refuse_a_taken_port(host: str, port: int) -> None:
    """Refuse an address that another program listens on, with a port that is free."""
    if reason := refusal(host, port):
        free = next((n for n in range(port + 1, port + 100) if not refusal(host, n)), None)
        remedy = f"give --port {free}, which is free" if free else "give another --host or --port"
        raise UserError(f"{host}:{port}: {reason}; {remedy}")


def refusal(host: str, port: int) -> str:
    """Why nobody can listen there; empty: it is free."""
    try:
        with socket.create_server((host, port)):
            return ""
    except OSError as error:
        return (error.strerror or str(error)).split(" (while")[0]
    except OverflowError:
        return "no such port"
