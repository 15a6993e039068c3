"""A web server on loopback for tests of remote shards."""

import http.server
import time
from pathlib import Path
from typing import Any


class Server(http.server.ThreadingHTTPServer):
    """Serves a folder, records the requests, and can delay, cut or corrupt its answers."""

    daemon_threads = True

    def __init__(self, root: Path) -> None:
        self.root, self.asked, self.corrupt, self.fail, self.delay = root, [], set(), {}, 0.0
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        name = self.path.rsplit("/", 1)[-1]
        self.server.asked.append(name)
        path = self.server.root / self.path.lstrip("/")
        if not path.is_file():
            return self.send_error(404)
        data = bytearray(path.read_bytes())
        time.sleep(self.server.delay)
        cut = 0
        if self.server.fail.get(name, 0) > 0:
            self.server.fail[name] -= 1
            cut = len(data) // 2
        if name in self.server.corrupt:
            data[len(data) // 2] ^= 1
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[: len(data) - cut])

    def log_message(self, *_: Any) -> None: ...
