"""`ecgmatch serve`: a page to drop ECG files on."""

from pathlib import Path
from typing import Literal

import tyro

from ecgmatch_dist.errors import UserError
from ecgmatch_dist.terminal.waiting import waiting
from ecgmatch_dist.web import need_web


def main(
    run: tyro.conf.Positional[Path],
    /,
    port: int = 8000,
    host: str = "127.0.0.1",
    nearest: int = 3,
    only: bool = True,
    trees: bool = False,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    shards: str = "",
    megabytes: float = 32,
    seconds: float = 60,
) -> None:
    """Serve a page to drop ECG files on, and POST /predict for programs. For research; not a medical device.

    Args:
        run: The run's folder, one that `ecgmatch export` wrote, chapman_ptbxl (comes with the package), or a name on the hub.
        port: Where to listen; 0: any port that is free.
        host: Address to listen on; the default is this machine alone. There is no password.
        nearest: Number of known cases to show.
        only: Normal is not predicted beside another class; --no-only: each class by its threshold alone.
        trees: The trees that the run has asked answer, too.
        device: Where the network runs.
        shards: Folder of the shards with the nearest known cases, if it has moved since the training.
        megabytes: Largest request, MiB.
        seconds: Longest time for a request.
    """
    need_web("ecgmatch serve")
    from ecgmatch_dist.web.address import refuse_a_taken_port

    if not megabytes > 0 or not seconds > 0:
        raise UserError(f"--megabytes {megabytes:g} --seconds {seconds:g}: both must be above 0")
    refuse_a_taken_port(host, port)  # loading the model takes longer than finding this out
    with waiting("loading the model"):
        from ecgmatch_dist.predict.model import Predictor  # torch alone takes seconds
        from ecgmatch_dist.serve.app import make_serve_app
        from ecgmatch_dist.serve.desk import Desk
        from ecgmatch_dist.web.guard import Limits
        from ecgmatch_dist.web.server import serve

        desk = Desk(Predictor(run, device, nearest=nearest, only=only, trees=trees), shards)
        limits = Limits(round(megabytes * 2**20), seconds)
        app = make_serve_app(desk, host, limits)
    serve(app, host, port, "drop ECG files here")
