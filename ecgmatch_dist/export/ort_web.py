"""ONNX Runtime for browsers: two files of the npm package `onnxruntime-web`, one pinned version, checked by their hashes.

They are needed when a page is written, never when it is used. npm fetches the package; where there is no npm or no network,
the user names a copy.
"""

import hashlib
import shutil
import subprocess
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ecgmatch_dist.errors import UserError

VERSION = "1.30.0"
PACKAGE = f"onnxruntime-web@{VERSION}"
SCRIPT, WASM = "ort.wasm.bundle.min.mjs", "ort-wasm-simd-threaded.wasm"
HASHES = {
    SCRIPT: "11e64bd8ffe11bd1a2a2f0d6275fdfbbba7262f0b76b99b53d228a8a22ef3d90",
    WASM: "3398c10d07d229bd91b364548e130e0e51a8e5704b88c7c083ebbeb78842dee2",
}
LARGEST = 64 * 2**20  # bytes of one of the files
REMEDY = f"get it where there is npm (npm pack {PACKAGE}) and give --onnxruntime-web FILE.tgz"


@dataclass(frozen=True)
class OrtWeb:
    """The runtime."""

    script: str
    """An ES module that exports the interface."""
    wasm: bytes


def find_ort_web(place: Path | None) -> OrtWeb:
    """From a package (.tgz) or a folder that the user names (unpacked, or node_modules/onnxruntime-web), or from npm."""
    if place is not None:
        return _checked(place)
    npm = shutil.which("npm")
    if npm is None:
        raise UserError(f"--html needs the npm package {PACKAGE}, and there is no npm here; {REMEDY}")
    with tempfile.TemporaryDirectory(prefix="ecgmatch-npm-") as folder:
        print(f"npm fetches {PACKAGE} ...", flush=True)
        done = subprocess.run(
            [npm, "pack", PACKAGE, "--silent"], cwd=folder, capture_output=True, text=True, check=False, timeout=600
        )
        found = [*Path(folder).glob("*.tgz")]
        if done.returncode or not found:
            said = " ".join((done.stderr or done.stdout).split())[:200] or f"exit code {done.returncode}"
            raise UserError(f"npm could not fetch {PACKAGE} ({said}); {REMEDY}")
        return _checked(found[0])


def _checked(place: Path) -> OrtWeb:
    files = {name: _read(place, name) for name in HASHES}
    for name, content in files.items():
        if hashlib.sha256(content).hexdigest() != HASHES[name]:
            raise UserError(f"{place}: its {name} is not that of {PACKAGE}; {REMEDY}")
    return OrtWeb(files[SCRIPT].decode("utf-8"), files[WASM])


def _read(place: Path, name: str) -> bytes:
    try:
        if place.is_dir():
            inside = next((path for path in (place / "dist" / name, place / name) if path.is_file()), None)
            content = inside.read_bytes() if inside and inside.stat().st_size <= LARGEST else None
        else:
            with tarfile.open(place) as package:
                member = package.getmember(f"package/dist/{name}")
                opened = package.extractfile(member) if member.size <= LARGEST else None
                content = opened.read() if opened else None
    except (OSError, tarfile.TarError, KeyError, EOFError) as error:
        raise UserError(f"{place}: not the npm package {PACKAGE} ({error}); {REMEDY}") from None
    if content is None:
        raise UserError(f"{place}: no {name} in it; {REMEDY}")
    return content
