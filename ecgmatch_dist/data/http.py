"""Fetching a file over HTTP: resumed, retried, verified. It gets its name only when its checksum is right."""

import hashlib
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from urllib.parse import quote, urlsplit

import requests

ATTEMPTS = 5  # per source, in a row without a new byte
PAUSE = 0.5  # seconds before the second attempt; twice as long before each further one
LONGEST_PAUSE = 60.0
TIMEOUT = (15, 60)  # seconds: to connect, and between two bytes
LARGEST_FILE = 1 << 36  # bytes
LARGEST_TEXT = 1 << 28  # bytes; a list of 250,000 files has 30 MB, but a server may never end
CHUNK = 1 << 13  # bytes that a broken connection or a kill may lose: urllib3 drops a chunk that it could not fill


class FetchError(Exception):
    """A file cannot be fetched; the reason in a few words."""


class Interrupted(Exception):
    """The download was ended by the user or by the failure of another file."""


class TryAgain(Exception):
    """A failure that may pass; `after`: seconds that the server asks to wait."""

    def __init__(self, reason: str, after: float = 0.0) -> None:
        super().__init__(reason)
        self.after = after


@dataclass
class Fetcher:
    """Fetches files from `sources` (URLs ending in /) that all have the same files; the first one with the right bytes is used.

    Threads may share it; each keeps its own connections.
    """

    sources: tuple[str, ...]
    received: Callable[[int], None] = lambda size: None
    stop: threading.Event = field(default_factory=threading.Event)
    local: threading.local = field(default_factory=threading.local)

    def fetch(self, path: str, sha256: str, target: Path) -> str:
        """Fetch `path` to `target`. Returns "kept" if it was there, "fetched", or "replaced" if another file had its name."""
        if target.is_file() and digest_of(target).hexdigest() == sha256:
            return "kept"
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f"{target.name}.part")
        reasons = []
        for source in self.sources:
            try:
                self._until_right(source + quote(path), sha256, part)
                break
            except FetchError as error:
                reasons.append(f"{urlsplit(source).netloc}: {error}")
        else:
            raise FetchError(", ".join(reasons))
        replaced = target.exists()
        if replaced:
            set_aside(target)
        part.replace(target)
        return "replaced" if replaced else "fetched"

    def text(self, path: str) -> str:
        """A small text file of the first source that has it."""
        reasons = []
        for source in self.sources:
            try:
                return self._persist(partial(self._text, source + quote(path)), lambda: 0)
            except FetchError as error:
                reasons.append(f"{source}{path}: {error}")
        raise FetchError(", ".join(reasons))

    def _until_right(self, url: str, sha256: str, part: Path) -> None:
        """Complete `part`, starting from the bytes that are there, until its checksum is right."""
        for _ in range(2):
            # The part is complete if a process was killed just before it renamed it.
            if part.is_file() and digest_of(part).hexdigest() == sha256:
                return
            if self._persist(partial(self._receive, url, part), partial(size_of, part)) == sha256:
                return
            part.unlink()  # the first failure may come from an old or damaged part: try once more from the start
        raise FetchError("the checksum is wrong")

    def _persist(self, attempt: Callable[[], str], progress: Callable[[], int]) -> str:
        """The result of `attempt`, repeated after failures that may pass. New bytes reset the count of failures."""
        failures, most = 0, progress()
        while True:
            if self.stop.is_set():
                raise Interrupted
            try:
                return attempt()
            except (requests.RequestException, TryAgain) as error:
                size = progress()
                failures, most = (0 if size > most else failures + 1), max(size, most)
                if failures == ATTEMPTS:
                    raise FetchError(reason(error)) from error
                pause = PAUSE * 2**failures * random.uniform(0.5, 1.0)
                asked = error.after if isinstance(error, TryAgain) else 0.0
                self.stop.wait(min(max(pause, asked), LONGEST_PAUSE))

    def _get(self, url: str, headers: dict[str, str]) -> requests.Response:
        if not hasattr(self.local, "session"):
            self.local.session = requests.Session()
        # A compressed answer could not be resumed by offset.
        all_headers = {"Accept-Encoding": "identity", "User-Agent": "ecgmatch-dist", **headers}
        response: requests.Response = self.local.session.get(url, headers=all_headers, stream=True, timeout=TIMEOUT)
        if response.status_code in (200, 206):
            return response
        response.close()
        if response.status_code in (408, 416, 429) or response.status_code >= 500:
            after = response.headers.get("Retry-After", "")
            raise TryAgain(f"HTTP {response.status_code}", float(after) if after.isdecimal() else 0.0)
        raise FetchError(f"HTTP {response.status_code}")

    def _text(self, url: str) -> str:
        with self._get(url, {}) as response:
            content = bytearray()
            for chunk in response.iter_content(CHUNK):
                content += chunk
                if len(content) > LARGEST_TEXT:
                    raise FetchError(f"more than {LARGEST_TEXT:,} bytes of text")
            return content.decode("utf-8", errors="replace")

    def _receive(self, url: str, part: Path) -> str:
        """Append the missing bytes to `part`. Returns the checksum of the whole."""
        offset = size_of(part)
        try:
            response = self._get(url, {"Range": f"bytes={offset}-"} if offset else {})
        except TryAgain as error:
            if str(error) == "HTTP 416":  # the part is longer than the file
                part.unlink(missing_ok=True)
            raise
        with response:
            resumed = response.status_code == 206
            if resumed and not response.headers.get("Content-Range", "").startswith(f"bytes {offset}-"):
                part.unlink(missing_ok=True)
                raise TryAgain("another range than asked for")
            digest = digest_of(part) if resumed else hashlib.sha256()
            with part.open("ab" if resumed else "wb", buffering=CHUNK) as file:
                for chunk in response.iter_content(CHUNK):
                    if self.stop.is_set():
                        raise Interrupted
                    file.write(chunk)
                    if file.tell() > LARGEST_FILE:
                        raise FetchError(f"more than {LARGEST_FILE:,} bytes")
                    digest.update(chunk)
                    self.received(len(chunk))
        return digest.hexdigest()


def digest_of(path: Path) -> "hashlib._Hash":
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256")


def size_of(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def set_aside(path: Path) -> None:
    """Rename a file to `<name>.before`, or `.before2`, ...: a user's file is never overwritten."""
    number, old = 1, path.with_name(f"{path.name}.before")
    while old.exists():
        number += 1
        old = path.with_name(f"{path.name}.before{number}")
    path.rename(old)


def reason(error: Exception) -> str:
    """A network error in a few words."""
    if isinstance(error, TryAgain):
        return str(error)
    if isinstance(error, requests.exceptions.SSLError):
        return "no trustworthy certificate"
    if isinstance(error, requests.Timeout):
        return "no answer"
    if isinstance(error, requests.exceptions.ChunkedEncodingError):
        return "the connection breaks off"
    if isinstance(error, requests.ConnectionError):
        return "no connection"
    return type(error).__name__
