"""Two nodes that share a folder as over NFS: two FUSE mounts (bindfs) of it, in a mount namespace of their own.

Each mount remembers names, missing names and sizes for a while, so that it does not see what the other one did; a file that is
removed while it is open gets a hidden name, and its folder cannot be removed. There is no real NFS here: this one is harsher,
because opening a file does not ask the server about its size again."""

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

REMEMBERED = 2  # seconds
MOUNT = """
for client in a b; do
    mkdir -p "$1/$client"
    bindfs -o attr_timeout=$2,entry_timeout=$2,negative_timeout=$2,auto_cache "$1/server" "$1/$client" || exit 1
done
echo ready && exec sleep 1000
"""


class SharedDisk:
    """`a` and `b`: the folder as two nodes see it, for commands that are started `inside`. `server`: as it is."""

    def __init__(self, folder: Path) -> None:
        self.server, self.a, self.b = folder / "server", folder / "a", folder / "b"
        self.server.mkdir(parents=True)
        if os.geteuid() or not os.access("/dev/fuse", os.W_OK) or not shutil.which("bindfs"):
            pytest.skip("needs root, /dev/fuse and Debian's package bindfs")
        self.holder = subprocess.Popen(
            ["unshare", "--mount", "sh", "-c", MOUNT, "sh", str(folder), str(REMEMBERED)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert self.holder.stdout is not None
        if not self.holder.stdout.readline():
            pytest.skip(f"no FUSE mount here: {self.holder.communicate()[1].decode().strip()}")

    def __enter__(self) -> "SharedDisk":
        return self

    def __exit__(self, *error: object) -> None:
        subprocess.run(self.inside(["umount", "--lazy", str(self.a), str(self.b)]), check=False)
        self.holder.kill()
        self.holder.communicate()

    def inside(self, command: Sequence[str]) -> list[str]:
        """The command as one that sees both mounts."""
        return ["nsenter", "--target", str(self.holder.pid), "--mount", *command]
