"""The small web server, over real sockets: who may ask, how much, how long, and how it ends."""

import asyncio
import http.client
import json
import signal
import socket
import time
from collections.abc import Iterator

import pytest

from ecgmatch_dist import web
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.web.address import listen, url_of
from tests.support.serving import served

pytest.importorskip("starlette", reason="needs the extra `web`")
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from ecgmatch_dist.web.guard import HEADERS, Limits, Refused
from ecgmatch_dist.web.server import assets, make_app, running


async def echo(request: Request) -> Response:
    return PlainTextResponse(str(len(await request.body())))


async def slow(_: Request) -> Response:
    await asyncio.to_thread(time.sleep, 1.5)
    return PlainTextResponse("late")


def wrong(_: Request) -> Response:
    raise UserError("<b>a.csv</b>: no ECG")


def refused(_: Request) -> Response:
    raise Refused(422, "no")


def broken(_: Request) -> Response:
    raise ZeroDivisionError("a secret")


ROUTES = [
    *assets("ecgmatch_dist.predict", "page.css"),
    Route("/echo", echo, methods=["GET", "POST"]),
    *(Route(f"/{f.__name__}", f) for f in (slow, wrong, refused, broken)),
]


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    app = make_app(ROUTES, "127.0.0.1", Limits(body=1000, seconds=0.5))
    with running(app, "127.0.0.1", 0) as (address, *_):
        yield int(address.rpartition(":")[2])


def ask(
    port: int, path: str, method: str = "GET", body: bytes | None = None, **headers: str
) -> tuple[int, str, dict[str, str]]:
    """Status, text and headers of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
    answer = connection.getresponse()
    found = answer.status, answer.read().decode(), {name.lower(): value for name, value in answer.getheaders()}
    connection.close()
    return found


def test_every_answer_carries_the_headers(port: int) -> None:
    for path in ("/page.css", "/echo", "/nothing", "/broken"):
        _, _, headers = ask(port, path)
        assert {name: headers.get(name) for name in HEADERS} == HEADERS, path
        assert "server" not in headers
    assert "script-src 'self';" in HEADERS["content-security-policy"]


def test_a_name_that_is_not_this_machine_is_refused(port: int) -> None:
    """DNS rebinding: a stranger's page under a name that points to 127.0.0.1."""
    for host in ("evil.example", f"evil.example:{port}", f"127.0.0.1.evil.example:{port}", "", "127.0.0.1:80:80"):
        status, text, _ = ask(port, "/echo", Host=host)
        assert status == 421, host
        assert "use the address that it printed" in text
    for host in ("localhost", f"LOCALHOST:{port}", "127.0.0.1", f"[::1]:{port}", "192.168.1.5:99"):
        assert ask(port, "/echo", Host=host)[0] == 200, host


def test_a_post_from_another_page_is_refused(port: int) -> None:
    own = f"http://127.0.0.1:{port}"
    for headers in (
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": f"https://127.0.0.1:{port}"},
        {"Origin": "http://127.0.0.1:1"},
        {"Sec_Fetch_Site": "cross-site"},
        {"Origin": own, "Sec_Fetch_Site": "same-site"},
    ):
        status, text, _ = ask(port, "/echo", "POST", b"x", **headers)
        assert status == 403, headers
        assert "another web page" in text
    assert ask(port, "/echo", "POST", b"x", Origin=own, Sec_Fetch_Site="same-origin")[:2] == (200, "1")
    assert ask(port, "/echo", "POST", b"x")[:2] == (200, "1")  # curl


def test_a_body_has_a_limit_by_its_words_and_while_it_arrives(port: int) -> None:
    assert ask(port, "/echo", "POST", b"x" * 1000)[1] == "1000"
    assert ask(port, "/echo", "POST", b"x" * 1001)[0] == 413
    with socket.create_connection(("127.0.0.1", port), timeout=20) as line:
        line.sendall(b"POST /echo HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(20):
            line.sendall(b"64\r\n" + b"x" * 100 + b"\r\n")
        line.sendall(b"0\r\n\r\n")
        assert b"413" in line.makefile("rb").readline()


def test_a_request_has_a_time_limit(port: int) -> None:
    status, text, _ = ask(port, "/slow")
    assert status == 503
    assert json.loads(text)["error"] == "this took longer than 0.5 s, and was given up"
    with socket.create_connection(("127.0.0.1", port), timeout=20) as line:  # a body that never ends
        line.sendall(b"POST /echo HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n\r\nx")
        assert b"503" in line.makefile("rb").readline()


def test_errors_are_sentences(port: int) -> None:
    assert ask(port, "/wrong")[:2] == (400, '{"error": "<b>a.csv</b>: no ECG"}')
    status, text, headers = ask(port, "/wrong", Accept="text/html,*/*")
    assert (status, headers["content-type"]) == (400, "text/html; charset=utf-8")
    assert "<p>&lt;b&gt;a.csv&lt;/b&gt;: no ECG</p>" in text
    assert ask(port, "/refused")[:2] == (422, '{"error": "no"}')
    assert ask(port, "/nothing")[:2] == (404, '{"error": "/nothing: Not Found"}')
    status, text, _ = ask(port, "/broken")
    assert status == 500
    assert "secret" not in text


def test_what_is_no_http_gets_no_answer_and_harms_nobody(port: int) -> None:
    for data in (b"\0\1\2\r\n\r\n", b"GET " + b"x" * 200_000 + b" HTTP/1.1\r\n\r\n", b"POST /echo HTTP/9\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", port), timeout=20) as line:
            line.sendall(data)
    assert ask(port, "/echo")[0] == 200


def test_addresses() -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        assert url_of(taken) == f"http://127.0.0.1:{port}"
        with pytest.raises(UserError, match=rf"^127\.0\.0\.1:{port}: Address already in use; give --port \d+, which"):
            listen("127.0.0.1", port)
    with listen("0.0.0.0", 0) as everywhere:
        assert url_of(everywhere).startswith("http://127.0.0.1:")


def test_a_host_that_nobody_knows_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name server that does not answer takes ten seconds each time."""
    asked = []

    def ask(address: tuple[str, int], **_: object) -> None:
        asked.append(address)
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "create_server", ask)
    with pytest.raises(
        UserError, match=r"^nobody\.invalid:8000: Name or service not known; give another --host or --port$"
    ):
        listen("nobody.invalid", 8000)
    assert len(asked) == 1


def test_a_missing_library_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "find_spec", lambda name: None if name == "uvicorn" else object())
    with pytest.raises(UserError, match=r"^serve: uvicorn not installed; pip install 'ecgmatch-dist\[web\]'$"):
        web.need_web("serve")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_after_what_is_under_way(number: signal.Signals) -> None:
    code = "\n".join(
        [
            "from ecgmatch_dist.web.server import make_app, serve",
            "from tests.web import test_server",
            "serve(make_app(test_server.ROUTES, '127.0.0.1'), '127.0.0.1', 0, 'here')",
        ]
    )
    with served("-c", code) as (process, line):
        assert line.startswith("here: http://127.0.0.1:"), line
        port = int(line.split()[1].rpartition(":")[2])
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        connection.request("GET", "/slow")
        time.sleep(0.5)
        process.send_signal(number)
        assert connection.getresponse().read() == b"late"
        assert process.communicate(timeout=30) == ("stopped\n", "")
        assert process.returncode == 0
    listen("127.0.0.1", port).close()
