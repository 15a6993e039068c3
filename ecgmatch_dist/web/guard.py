"""What every request passes before a page's own code sees it, and what every answer carries.

A browser lets any web page send requests to 127.0.0.1. Two checks keep such pages out: the Host header must be an address or a
name of this machine (a name that an attacker points at 127.0.0.1 is none), and a request that changes or computes something
must come from our own pages. Programs like curl send no Origin and pass.
"""

import asyncio
import ipaddress
import json
import socket
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass
from html import escape
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

CONTENT = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
"""No script but our own files, nothing from elsewhere, nothing sent elsewhere."""
HEADERS = {
    "content-security-policy": CONTENT,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
SAFE = ("GET", "HEAD", "OPTIONS")
DRAIN = 2.0
"""Seconds in which the rest of a refused body is read, so that the sender gets the answer, not a broken line."""


class Refused(Exception):
    """A request that gets a sentence instead of what it asked for."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status, self.sentence = status, sentence


@dataclass(frozen=True)
class Limits:
    """Of one request."""

    body: int = 64 * 2**20
    """Bytes."""
    seconds: float = 60
    """From the head of the request to the end of the answer."""


class Guard:
    """An ASGI application around another one. `host`: the one that was given to listen on, which may be a name."""

    def __init__(self, app: App, host: str, limits: Limits) -> None:
        self.app, self.limits = app, limits
        self.names = {"localhost", host.lower(), socket.gethostname().lower()}  # getfqdn may wait for a name server

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # lifespan; websockets are switched off in the server
            return await self.app(scope, receive, send)
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        started = False

        async def answer(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                own = {name for name, _ in message["headers"]}
                more = [(k.encode(), v.encode()) for k, v in HEADERS.items() if k.encode() not in own]
                message["headers"] = [*message["headers"], *more]
            await send(message)

        body = Body(receive, self.limits.body)
        try:
            self.check(scope["method"], scope["scheme"], headers)
            async with asyncio.timeout(self.limits.seconds):
                await self.app(scope, body.receive, answer)
        except Refused as refused:
            if not started:
                await refuse(refused, headers, answer)
            await body.drain()
        except TimeoutError:
            if started:
                raise
            sentence = f"this took longer than {self.limits.seconds:g} s, and was given up"
            await refuse(Refused(503, sentence), headers, answer)

    def check(self, method: str, scheme: str, headers: Mapping[str, str]) -> None:
        """Raise Refused for what a stranger's web page may have sent, or what is too large already by its own words."""
        host = headers.get("host", "")
        if not self.is_ours(host):
            raise Refused(421, f"the host {host!r} is not a name of this server; use the address that it printed")
        if method not in SAFE:
            origin, site = headers.get("origin"), headers.get("sec-fetch-site", "none")
            if origin not in (None, f"{scheme}://{host}") or site not in ("same-origin", "none"):
                raise Refused(403, "this request comes from another web page, which has no business here")
        length = headers.get("content-length", "0")
        if length.isdigit() and int(length) > self.limits.body:
            raise too_large(self.limits.body)

    def is_ours(self, host: str) -> bool:
        """Whether a Host header is an IP address or a name of this machine, with any port."""
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
        if name.lower() in self.names:
            return True
        try:
            ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
        except ValueError:
            return False
        return True


class Body:
    """The body of a request, counted while it arrives."""

    def __init__(self, receive: Receive, limit: int) -> None:
        self._receive, self.limit, self.seen, self.more = receive, limit, 0, True

    async def receive(self) -> Message:
        message = await self._receive()
        self.seen += len(message.get("body", b""))
        self.more = bool(message.get("more_body")) and message["type"] == "http.request"
        if self.seen > self.limit:
            raise too_large(self.limit)
        return message

    async def drain(self) -> None:
        try:
            async with asyncio.timeout(DRAIN):
                while self.more:
                    message = await self._receive()
                    self.more = bool(message.get("more_body"))
        except TimeoutError:
            return


def too_large(limit: int) -> Refused:
    return Refused(413, f"more than {limit / 2**20:g} MiB, the limit of this server")


async def refuse(refused: Refused, headers: Mapping[str, str], send: Send) -> None:
    """The sentence as a page for browsers that navigate, as JSON for programs."""
    kind, body = sentence_body(refused.sentence, headers.get("accept", ""))
    lines = [(b"content-type", kind.encode()), (b"content-length", str(len(body)).encode()), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": refused.status, "headers": lines})
    await send({"type": "http.response.body", "body": body})


def sentence_body(sentence: str, accept: str) -> tuple[str, bytes]:
    """Content type and text of an error."""
    if "text/html" not in accept:
        return "application/json", json.dumps({"error": sentence}).encode()
    head = "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content=width=device-width><title>"
    style = "<style>body{font:1.1rem system-ui,sans-serif;margin:3rem auto;max-width:40rem;padding:0 1rem}</style>"
    return "text/html; charset=utf-8", f"{head}Error</title>{style}<p>{escape(sentence)}</p>".encode()
