"""Routes -> an application -> a server that says its address, and ends at Ctrl-C or SIGTERM with what is under way finished."""

import mimetypes
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.resources import files
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ecgmatch_dist.errors import UserError
from ecgmatch_dist.web.address import listen, url_of
from ecgmatch_dist.web.guard import Guard, Limits, Refused, sentence_body

GRACE = 5  # seconds for requests under way when the server is asked to end
CONNECTIONS = 100  # at once; more are told to come back


def make_app(routes: Sequence[Route], host: str, limits: Limits | None = None) -> Guard:
    """An application in which errors are sentences: Refused with its status, UserError as 400, anything else as 500."""
    handlers: dict[Any, Callable[..., Response]] = {
        Refused: lambda request, error: answer(request, error.status, error.sentence),
        UserError: lambda request, error: answer(request, 400, str(error)),
        HTTPException: lambda request, error: answer(request, error.status_code, f"{request.url.path}: {error.detail}"),
        Exception: lambda request, _: answer(request, 500, "an error of the program; its terminal says more"),
    }
    return Guard(Starlette(routes=routes, exception_handlers=handlers), host, limits or Limits())


def answer(request: Request, status: int, sentence: str) -> Response:
    kind, body = sentence_body(sentence, request.headers.get("accept", ""))
    return Response(body, status, media_type=kind)


def assets(package: str, *names: str) -> list[Route]:
    """Files of a package, each under its name: /page.js."""

    def route(name: str) -> Route:
        content = (files(package) / name).read_bytes()
        kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
        return Route(f"/{name}", lambda _: Response(content, media_type=kind))

    return [route(name) for name in names]


@contextmanager
def running(app: Guard, host: str, port: int) -> Iterator[tuple[str, threading.Thread, Any]]:
    """A server in a thread of its own: its address, the thread, and uvicorn's object, whose `should_exit` ends it."""
    with listen(host, port) as bound:
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            server_header=False,
            lifespan="off",
            ws="none",
            limit_concurrency=CONNECTIONS,
            timeout_graceful_shutdown=GRACE,
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([bound],), name="web")
        thread.start()
        try:
            while thread.is_alive() and not server.started:
                time.sleep(0.01)
            yield url_of(bound), thread, server
        finally:
            server.should_exit = True
            thread.join()


def serve(app: Guard, host: str, port: int, what: str) -> None:
    """Serve until Ctrl-C or SIGTERM. `what` stands before the address that is printed."""
    with running(app, host, port) as (address, thread, server):

        def end(*_: object) -> None:
            server.force_exit = server.should_exit  # the second time: at once
            server.should_exit = True

        before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
        print(f"{what}: {address}   (Ctrl-C ends it)", flush=True)
        if host not in ("127.0.0.1", "::1", "localhost"):
            print("Anybody who can reach this machine can use it: there is no password, and nothing is encrypted.")
        while thread.is_alive():  # a wait without an end would miss a signal that the system hands to the other thread
            thread.join(0.2)
        for number, handler in before.items():
            signal.signal(number, handler)
    print("stopped", flush=True)
