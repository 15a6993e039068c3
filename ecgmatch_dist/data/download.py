"""`ecgmatch download`: fetch the files of one database from its public release, in parallel, resumable, verified."""

import errno
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated

import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ecgmatch_dist.data.databases import Recipe, load_recipe
from ecgmatch_dist.data.http import Fetcher, FetchError
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.files.lock import only_one

SUMS = "SHA256SUMS.txt"
LOCK = ".download.lock"
PHYSIONET = re.compile(r"(https://physionet\.org/files/)([\w.-]+/[\w.-]+/)(.*)")
MIRROR = "https://physionet-open.s3.amazonaws.com/"  # PhysioNet's open bucket: the same bytes, much faster
GIVE_UP = 20  # files that fail one after the other: the network or the server is gone
LINE_EVERY = 20.0  # seconds between two lines where there is no terminal


@dataclass(frozen=True)
class Source:
    """Where a release is: the URLs of its root, the fastest first, and the database's folder in it."""

    roots: tuple[str, ...]
    folder: str


def find_source(recipe: Recipe, given: str | None) -> Source:
    """From the recipe's `url`; a URL that the user gives replaces the release's root."""
    match = PHYSIONET.fullmatch(recipe.url if recipe.url.endswith("/") else f"{recipe.url}/")
    folder = match[3] if match else ""
    if given is not None:
        roots: tuple[str, ...] = (given,)
    elif match:
        roots = (MIRROR + match[2], match[1] + match[2])
    else:
        roots = (recipe.url,)
    for root in roots:
        if not re.match(r"https?://[^/]", root):
            raise UserError(
                f"`{root}` is no http(s) address: give `url` in the recipe of {recipe.database}, or --from URL"
            )
    return Source(tuple(root if root.endswith("/") else f"{root}/" for root in roots), folder)


def read_sums(text: str, where: str) -> dict[str, str]:
    """Path -> checksum, from the release's list. Refuses a list in which any path leads out of its folder."""
    sums = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        match = re.fullmatch(r"([0-9a-fA-F]{64})[ \t]+\*?(\S.*)", line)
        if not match:
            raise UserError(f"{where}, line {number}: not a checksum and a path; is this the address of a release?")
        path = match[2].removeprefix("./")
        parts = path.split("/")
        if any(part in ("", ".", "..") for part in parts) or re.search(r"[\\:\x00-\x1f\x7f]", path):
            raise UserError(f"{where}, line {number}: `{path!r}` leads out of its folder; nothing has been fetched")
        sums[path] = match[1].lower()
    return sums


def choose(paths: Iterable[str], folder: str, patterns: tuple[str, ...]) -> dict[str, str]:
    """Path in the release -> path in the database's folder, of the recordings that the recipe reads and all other files."""
    chosen = {}
    for path in paths:
        relative = path.removeprefix(folder)
        if not path.startswith(folder) or relative == SUMS:
            continue
        name = PurePosixPath(relative)
        header = name.with_suffix(".hea")
        # PurePath.match() does not know `**`, which may also stand for no folder at all.
        wanted = any(header.match(pattern) or header.match(pattern.replace("**/", "")) for pattern in patterns)
        if wanted or name.suffix not in (".hea", ".mat", ".dat"):
            chosen[path] = relative
    return chosen


class Meter:
    """Progress of a download: a bar on a terminal, otherwise a line every `LINE_EVERY` seconds."""

    def __init__(self, name: str, files: int) -> None:
        self.name, self.files, self.done, self.bytes = name, files, 0, 0
        self.start = self.last = time.monotonic()
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("files"))
        console = Console(stderr=True)
        self.progress = Progress(
            *columns, TextColumn("{task.fields[rate]}"), TimeRemainingColumn(), console=console, transient=True
        )
        self.terminal = console.is_terminal
        self.task = self.progress.add_task(name, total=files, rate="")

    def received(self, size: int) -> None:
        # Called by many threads without a lock: a lost update only makes the display a little wrong.
        self.bytes += size

    def rate(self) -> str:
        seconds = max(time.monotonic() - self.start, 1e-3)
        return f"{self.bytes / 1e6:,.1f} MB, {self.bytes / 1e6 / seconds:.1f} MB/s"

    def file_done(self) -> None:
        self.done += 1
        now = time.monotonic()
        if self.terminal:
            self.progress.update(self.task, completed=self.done, rate=self.rate())
        elif now - self.last > LINE_EVERY:
            self.last = now
            left = (now - self.start) / self.done * (self.files - self.done) / 60
            print(f"{self.name}: {self.done}/{self.files} files, {self.rate()}, {left:.0f} min left", flush=True)

    @contextmanager
    def showing(self) -> Iterator[None]:
        if not self.terminal:
            yield
            return
        with self.progress:
            yield


def fetch_all(
    fetcher: Fetcher, files: dict[str, str], sums: dict[str, str], folder: Path, connections: int, meter: Meter
) -> tuple[Counter[str], dict[str, str]]:
    """Fetch `files` (path in the release -> path in `folder`). Returns counts by outcome, and path -> failure."""
    outcomes: Counter[str] = Counter()
    failed: dict[str, str] = {}
    in_a_row = 0
    with ThreadPoolExecutor(connections) as pool:
        futures = {pool.submit(fetcher.fetch, path, sums[path], folder / files[path]): path for path in files}
        try:
            for future in as_completed(futures):
                try:
                    outcomes[future.result()] += 1
                    in_a_row = 0
                except FetchError as error:
                    failed[futures[future]] = str(error)
                    in_a_row += 1
                    if in_a_row == GIVE_UP:
                        raise UserError(
                            f"{GIVE_UP} files failed one after the other (the last: {futures[future]}: {error}); "
                            "check the network and the address; the same command continues"
                        ) from None
                meter.file_done()
        except BaseException:
            fetcher.stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return outcomes, failed


def download(name: str, to: Path, given: str | None = None, connections: int = 8) -> str:
    """Fetch a recipe's database into `to`, where `ecgmatch shards build NAME --raw TO` finds it. Returns a summary."""
    if not 1 <= connections <= 64:
        raise UserError(f"--connections {connections}: give 1 to 64 (servers refuse many more than 8)")
    recipe = load_recipe(name)
    source = find_source(recipe, given)
    folder = to / recipe.folders[0] if recipe.folders else to
    try:
        with only_one(folder / LOCK, f"{folder}: another download into this folder is running; wait for it"):
            # The list of checksums comes from PhysioNet itself if possible: a mirror should not vouch for its own bytes.
            listing = Fetcher(source.roots[::-1])
            sums = read_sums(listing.text(SUMS), SUMS)
            files = choose(sums, source.folder, recipe.files)
            if not files:
                raise UserError(f"{source.roots[0]}{SUMS} lists no file of {source.folder or recipe.database}")
            meter = Meter(recipe.database, len(files))
            with meter.showing():
                fetcher = Fetcher(source.roots, meter.received)
                outcomes, failed = fetch_all(fetcher, files, sums, folder, connections, meter)
    except FetchError as error:
        raise UserError(f"cannot fetch the list of files: {error}; give another address with --from") from None
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(f"{folder}: no space left; make room, and the same command continues") from None
        raise UserError(f"{error.filename or folder}: {error.strerror or error}") from None
    for path, why in sorted(failed.items()):
        print(f"{path}: {why}", file=sys.stderr)
    if failed:
        path, why = min(failed.items())
        raise UserError(
            f"{len(failed)} of {len(files)} files of {recipe.database} could not be fetched, first {path}: {why}; "
            "the others are complete, the same command tries again"
        )
    return summary(recipe, folder, files, outcomes, meter)


def summary(recipe: Recipe, folder: Path, files: dict[str, str], outcomes: Counter[str], meter: Meter) -> str:
    headers = sum(path.endswith(".hea") for path in files)
    lines = [
        f"{recipe.database}: {len(files)} files ({headers} recordings) in {folder}, all checksums right; "
        f"{outcomes['kept']} were there, {meter.rate()} received"
    ]
    if outcomes["replaced"]:
        lines.append(f"{outcomes['replaced']} files differed from the release: the old ones are kept as *.before")
    if recipe.expected.recordings not in (None, headers):
        lines.append(f"the recipe expects {recipe.expected.recordings} recordings, the release lists {headers}")
    return "\n".join(lines)


def main(
    name: Annotated[str, tyro.conf.Positional],
    to: Path,
    from_: Annotated[str | None, tyro.conf.arg(name="from")] = None,
    connections: int = 8,
) -> None:
    """Fetch a public database. Files that are already there are verified and kept; the same command continues after a stop.

    Args:
        name: a recipe of `shards/` (g12ec, ptbxl, ningbo, chapman, cpsc2018, ptbxl_release) or the path of a .toml file.
        to: folder for the files; `ecgmatch shards build NAME --raw TO` reads it.
        from_: address of the release's root, which holds SHA256SUMS.txt (default: PhysioNet's mirror, then PhysioNet).
        connections: files fetched at a time.
    """
    print(download(name, to, from_, connections))
