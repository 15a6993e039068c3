"""What comes from others, written down: the hash and the licence of every package of constraints.txt.

    python tools/supply_chain.py      # writes requirements-hashed.txt and docs/licences.md

Run it after a change of constraints.txt, on what CI has: Linux x86-64, Python 3.11. pip downloads the wheels; nothing is
installed. What is written already stays, as long as its version does: remove the two files to write all of it anew. Torch has
no hash: its builds for CPU and for each CUDA share a version number, and a site chooses its own."""

import email
import hashlib
import re
import subprocess
import sys
import tempfile
import zipfile
from email.message import Message
from importlib.metadata import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HASHES, LICENCES = ROOT / "requirements-hashed.txt", ROOT / "docs" / "licences.md"
UNHASHED = "torch"
HASHES_HEAD = """\
# Every package of constraints.txt but torch, with the SHA-256 of its wheel for Linux x86-64 and Python 3.11.
# Written by `python tools/supply_chain.py`; docs/security.md says how it is used. Do not edit.
"""
LICENCES_HEAD = """\
# Licences of what we install

Every package of constraints.txt, which is everything that `make test` installs but Triton (MIT), with the licence that it
declares. Written by `python tools/supply_chain.py`; a test fails when a package is missing. None of them is part of this
repository. NVIDIA's libraries, which torch's builds for GPUs bring, have licences of their own.

| package | licence |
| --- | --- |
"""
CLASSIFIER = re.compile(r"License :: (?:OSI Approved :: )?(.+)")


def pins() -> list[str]:
    """name==version, as in constraints.txt."""
    return [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]


def known() -> tuple[dict[str, str], dict[str, str]]:
    """Package with its version -> hash, and package -> licence, as they are written."""
    if not HASHES.is_file() or not LICENCES.is_file():
        return {}, {}
    hashes = re.findall(r"^(\S+) --hash=sha256:(\w+)$", HASHES.read_text(), re.M)
    return dict(hashes), dict(re.findall(r"^\| (\S+) \| (.+) \|$", LICENCES.read_text(), re.M))


def download(wanted: list[str], folder: Path) -> dict[str, Path]:
    """Package with its version -> the wheel that pip would install."""
    if not wanted:
        return {}
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    subprocess.run([*command, *wanted], check=True)
    files = {normal(path.name.split("-")[0]): path for path in folder.glob("*.whl")}
    return {pin: files[normal(pin.split("==")[0])] for pin in wanted}


def about(wheel: Path) -> Message:
    """The METADATA of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name))
        return email.message_from_bytes(archive.read(name))


def licence(fields: Message) -> str:
    """The declared licence: the new field, the old one if it is a name and not the whole text, or the classifiers."""
    old = str(fields.get("License") or "").strip()
    named = [match[1] for line in fields.get_all("Classifier") or [] if (match := CLASSIFIER.fullmatch(str(line)))]
    return str(
        fields.get("License-Expression") or (old if "\n" not in old and len(old) < 60 else "") or ", ".join(named)
    )


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def main() -> None:
    hashes, declared = known()
    wanted = [pin for pin in pins() if not pin.startswith(f"{UNHASHED}==")]
    with tempfile.TemporaryDirectory() as folder:
        wheels = download([pin for pin in wanted if pin not in hashes], Path(folder))
        hashes |= {pin: hashlib.sha256(path.read_bytes()).hexdigest() for pin, path in wheels.items()}
        declared |= {pin.split("==")[0]: licence(about(path)) for pin, path in wheels.items()}
    declared[UNHASHED] = licence(metadata(UNHASHED))
    names = sorted((pin.split("==")[0] for pin in pins()), key=str.lower)
    if missing := [name for name in names if not declared[name]]:
        sys.exit(f"no licence declared: {', '.join(missing)}; read their files, and add what they say by hand")
    HASHES.write_text(HASHES_HEAD + "".join(f"{pin} --hash=sha256:{hashes[pin]}\n" for pin in wanted))
    LICENCES.write_text(LICENCES_HEAD + "".join(f"| {name} | {declared[name]} |\n" for name in names))


if __name__ == "__main__":
    main()
