"""Chromium, headless, as a phone or a desktop: the DevTools protocol over a pair of pipes, without a driver.

A window is never narrower than 500 pixels, so a phone needs emulated device metrics."""

import base64
import fcntl
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
QUIET = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking")


class Browser:
    """One page. `complaints`: errors and warnings on its console; `requests`: all addresses that it requested."""

    def __init__(self, profile: Path) -> None:
        # Chromium uses file descriptors 3 and 4. Ours get high numbers, so that the child can copy them there.
        low = (*os.pipe(), *os.pipe())
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 20) for end in low]
        for end in low:  # an open copy would hide that Chromium has exited
            os.close(end)

        def connect() -> None:
            os.dup2(ends[0], 3)
            os.dup2(ends[3], 4)

        command = [str(CHROMIUM), *QUIET, "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"]
        self.process = subprocess.Popen(command, preexec_fn=connect, pass_fds=(3, 4), stderr=subprocess.DEVNULL)
        os.close(ends[0])
        os.close(ends[3])
        self.to, self.back = os.fdopen(ends[1], "wb", buffering=0), os.fdopen(ends[2], "rb")
        self.number, self.session = 0, ""
        self.complaints: list[str] = []
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()
        self.to.close()
        self.back.close()

    def receive(self) -> dict[str, Any]:
        message = bytearray()
        while (byte := self.back.read(1)) != b"\0":
            assert byte, "Chromium has exited"
            message += byte
        found: dict[str, Any] = json.loads(message)
        method, params = found.get("method"), found.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(params["entry"]["text"])
        elif method == "Runtime.exceptionThrown" or (
            method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert")
        ):
            self.complaints.append(json.dumps(params))
        return found

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        self.to.write(json.dumps(message | ({"sessionId": self.session} if self.session else {})).encode() + b"\0")
        while (found := self.receive()).get("id") != self.number:
            pass
        assert "error" not in found, found
        result: dict[str, Any] = found["result"]
        return result

    def show(self, page: Path | str, width: int, dark: bool = False) -> None:
        """Load `page`, a file or an address, on a device of this width in pixels; below 600 it is a phone."""
        phone = width < 600
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1 + phone, mobile=phone
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=page.as_uri() if isinstance(page, Path) else page)
        while self.receive().get("method") != "Page.loadEventFired":
            pass

    def evaluate(self, script: str) -> Any:
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def choose(self, element: str, *files: Path) -> None:
        """Choose files for the file input with this CSS selector, as a user does."""
        root = self.call("DOM.getDocument")["root"]["nodeId"]
        node = self.call("DOM.querySelector", nodeId=root, selector=element)["nodeId"]
        self.call("DOM.setFileInputFiles", nodeId=node, files=[str(file) for file in files])

    def wait_for(self, condition: str, seconds: float = 60) -> None:
        """Until a script's value is true."""
        end = time.monotonic() + seconds
        while not self.evaluate(condition):
            assert time.monotonic() < end, f"{condition}: not within {seconds:g} s; {self.complaints}"
            time.sleep(0.05)

    def screenshot(self, file: Path) -> None:
        """The whole page, not only its visible part."""
        picture = self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        file.write_bytes(base64.b64decode(picture))
