"""A real file system of a few megabytes in a mount namespace of its own: it runs full, becomes read-only, and nobody else sees
it. Needs root, or user namespaces; tests skip where neither is allowed."""

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

UNSHARE = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--mount"]


class SmallDisk:
    """A tmpfs at `folder`, for commands that `run` starts. `seen` finds its files from outside."""

    def __init__(self, folder: Path, kib: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        mount = 'mount -t tmpfs -o size="$1"k disk "$2" && echo ready && exec sleep 1000'
        if not shutil.which("unshare") or not shutil.which("nsenter"):
            pytest.skip("util-linux (unshare, nsenter) is not installed")
        self.holder = subprocess.Popen(
            [*UNSHARE, "sh", "-c", mount, "sh", str(kib), str(folder)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert self.holder.stdout is not None
        if not self.holder.stdout.readline():
            pytest.skip(f"no mount namespace here: {self.holder.communicate()[1].decode().strip()}")

    def __enter__(self) -> "SmallDisk":
        return self

    def __exit__(self, *error: object) -> None:
        self.holder.kill()
        self.holder.communicate()

    def inside(self, command: Sequence[str]) -> list[str]:
        """The command as one that sees the disk."""
        user = ["--user"] if os.geteuid() else []
        return ["nsenter", "--target", str(self.holder.pid), *user, "--mount", *command]

    def run(self, command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.run(self.inside(command), capture_output=True, text=True, check=False, **options)

    def mount(self, options: str) -> None:
        """Change the mount: `size=9m` makes room, `ro` makes it read-only."""
        done = self.run(["mount", "-o", f"remount,{options}", str(self.folder)])
        assert done.returncode == 0, done.stderr

    def seen(self, path: Path) -> Path:
        """A path of the disk as this process can read it."""
        return Path(f"/proc/{self.holder.pid}/root{path}")
