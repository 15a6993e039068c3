"""The routes: the page, its files, and POST /predict."""

import asyncio
import time

from jinja2 import Environment, PackageLoader
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from ecgmatch_dist.serve.desk import Desk
from ecgmatch_dist.serve.upload import read_upload
from ecgmatch_dist.web.guard import Guard, Limits, Refused
from ecgmatch_dist.web.server import assets, make_app

AT_ONCE = 8  # requests whose files are in memory: worked on, or waiting for the model
TEMPLATES = Environment(loader=PackageLoader("ecgmatch_dist.serve", "."), autoescape=True, trim_blocks=True)


def make_serve_app(desk: Desk, host: str, limits: Limits) -> Guard:
    """The application of `ecgmatch serve`."""
    busy = 0
    page = TEMPLATES.get_template("drop.html.jinja").render(
        run=desk.model.name, classes=list(desk.names.values()), limit=limits.body
    )

    async def predict(request: Request) -> Response:
        nonlocal busy
        if busy >= AT_ONCE:
            raise Refused(503, f"{busy} requests are being worked on; try again in a moment")
        busy += 1
        until = time.monotonic() + limits.seconds
        try:
            upload = await read_upload(request)
            # not `run_in_threadpool`: a wait for that one cannot be given up when time is over
            found = await asyncio.to_thread(desk.answer, upload.files, upload.said, until)
        finally:
            busy -= 1
        failed = [row for row in found["recordings"] if row["error"]]
        if len(failed) == len(found["recordings"]):
            sentence = f"{failed[0]['path']}: {failed[0]['error']}" if failed else "no recording in these files"
            return JSONResponse(found | {"error": sentence}, 422)
        return JSONResponse(found)

    own = assets("ecgmatch_dist.serve", "choose.js", "drop.js", "drop.css")
    start = Route("/", lambda _: HTMLResponse(page))
    return make_app([start, Route("/predict", predict, methods=["POST"]), *own], host, limits)
