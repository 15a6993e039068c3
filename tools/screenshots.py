"""Pictures of everything that people look at, as a desktop and as a phone: `make demo`, then `make screenshots`.

`python -m tools.screenshots FOLDER TO`: FOLDER has raw/, shards/, runs/ and report/, as a demo leaves them."""

import io
import os
import pty
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.text import Text

from tests.support.browser import CHROMIUM, Browser

WIDTHS = {"desktop": 1400, "phone": 420}
COLUMNS = 110  # of the terminal
ECGMATCH = [sys.executable, "-m", "ecgmatch_dist"]


def in_a_terminal(*words: str, folder: Path) -> str:
    """What a command prints to a terminal, with its colours."""
    ours, theirs = pty.openpty()
    environment = os.environ | {"COLUMNS": str(COLUMNS), "TERM": "xterm-256color", "PYTHONPATH": str(Path.cwd())}
    process = subprocess.Popen([*ECGMATCH, *words], cwd=folder, env=environment, stdout=theirs, stderr=theirs)
    os.close(theirs)
    out = b""
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        if not piece:
            break
        out += piece
    os.close(ours)
    process.wait()
    return f"$ ecgmatch {' '.join(words)}\n" + out.decode(errors="replace").replace("\r\n", "\n")


def as_page(texts: list[str]) -> str:
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    for text in texts:
        console.print(Text.from_ansi(text))
    return console.export_html(inline_styles=True)


@contextmanager
def served(*words: str) -> Iterator[str]:
    """The address that a command prints while it serves a page; at the end it is interrupted, as by Ctrl-C."""
    with tempfile.TemporaryFile("w+") as told:
        process = subprocess.Popen([*ECGMATCH, *words], stdout=told, stderr=subprocess.STDOUT)
        try:
            while True:
                told.seek(0)
                text = told.read()
                if found := re.search(r"http://[\w.:]+/?[^\s]*", text):
                    yield found[0]
                    break
                if process.poll() is not None:
                    sys.exit(f"ecgmatch {' '.join(words)}\n{text}")
                time.sleep(0.5)
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(600)


def main(folder: Path, to: Path) -> None:
    if CHROMIUM is None:
        sys.exit("screenshots: no Chromium here; on Debian: apt-get install chromium")
    run = next(folder.glob("runs/*.ecgmatch/result.json")).parent
    recording = next(folder.glob("raw/**/*.hea"))
    to.mkdir(parents=True, exist_ok=True)
    with (
        # Processes of the browser may still write to its profile when it ends.
        tempfile.TemporaryDirectory(prefix="ecgmatch-screenshots-", ignore_cleanup_errors=True) as name,
        Browser(Path(name) / "profile") as browser,
    ):
        work = Path(name)

        def take(
            what: str, page: Path | str, ready: str = "true", devices: Iterable[str] = WIDTHS, seconds: float = 1
        ) -> None:
            for device in devices:
                browser.show(page, WIDTHS[device])
                browser.wait_for(ready, 300)
                time.sleep(seconds)  # pictures and fonts
                browser.screenshot(to / f"{what}-{device}.png")
                print(to / f"{what}-{device}.png", flush=True)

        commands = [(), ("train", "--help"), ("predict", str(run.resolve()), str(recording.resolve()))]
        (work / "terminal.html").write_text(as_page([in_a_terminal(*words, folder=folder) for words in commands]))
        take("terminal", work / "terminal.html", devices=["desktop"])
        take("report", (folder / "report" / "index.html").resolve())
        subprocess.run([*ECGMATCH, "predict", str(run), str(recording), "--pages", str(work / "pages")], check=True)
        take("prediction", next(page for page in (work / "pages").glob("*.html") if page.stem != "index"))
        shards = str(folder / "shards")
        with served("label", "--shards", shards, "--scheme", "ecgmatch5", "--to", str(work / "labels.csv")) as address:
            take("label", address, "document.querySelector('svg, canvas, img') !== null")
        with served("monitor", "--runs", str(folder / "runs"), "--port", "6117") as address:
            # Its cards load after the page, one after the other; how it looks on a phone is not up to us.
            take("tensorboard", address, "document.querySelector('tb-webapp') !== null", ["desktop"], 20)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
