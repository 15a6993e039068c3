"""Commands that are killed, or meet a failing disk, at a chosen moment: just before their n-th change of a folder.

`python -m tests.support.moments` imports everything once, then reads one JSON line per trial and answers with one. Each
trial runs in a fork of its own, inside its own working folder. Python tells an audit hook about every file that it opens for
writing, renames, links or removes; the hook can raise an error there, or end the process with SIGKILL."""

import errno
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate"}
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
FAULTS = {name: getattr(errno, name) for name in ("ENOSPC", "EDQUOT", "EROFS", "EIO", "ESTALE")}


class Moments:
    """Counts the changes under `folder`. At number `moment` (from 1) does what `fault` says: "kill", or an errno's name."""

    def __init__(self, folder: Path, moment: int, fault: str) -> None:
        self.folder, self.moment, self.fault, self.count = str(folder), moment, fault, 0

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            if not isinstance(path, str) or not ((flags or 0) & WRITES):
                return
        elif event in CHANGES:
            path = os.fspath(arguments[0])
        else:
            return
        if not os.path.join(os.getcwd(), os.fsdecode(path)).startswith(self.folder):
            return
        self.count += 1
        if self.count == self.moment:
            if self.fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(FAULTS[self.fault], os.strerror(FAULTS[self.fault]), path)


def attempt(command: list[str], folder: Path, moment: int, fault: str, answer: int) -> None:
    """Run an `ecgmatch` command in `folder`; write what it says at the end to the file descriptor `answer`."""
    from ecgmatch_dist.cli import main

    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    moments = Moments(folder, moment, fault)
    sys.addaudithook(moments)
    sys.argv = ["ecgmatch", *command]
    said: object
    try:
        main()
        said = ""
    except SystemExit as end:
        said = end.code
    except BaseException:
        said = traceback.format_exc()
    os.write(answer, json.dumps({"said": str(said or ""), "changes": moments.count}).encode())
    os._exit(0)


def serve() -> None:
    import matplotlib
    import torch

    import ecgmatch_dist.cli as cli

    matplotlib.use("agg")
    torch.set_num_threads(1)
    for name in cli.COMMANDS:
        cli.load(name)
    for line in sys.stdin:
        trial = json.loads(line)
        back, answer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(back)
            attempt(trial["command"], Path(trial["folder"]), trial["moment"], trial["fault"], answer)
        os.close(answer)
        with os.fdopen(back) as file:
            text = file.read()
        status = os.waitpid(child, 0)[1]
        print(
            json.dumps(json.loads(text) if text else {"said": f"signal {os.WTERMSIG(status)}", "changes": 0}),
            flush=True,
        )


class Trials:
    """The process that tries commands."""

    def __init__(self, inside: Callable[[list[str]], list[str]] = lambda command: command) -> None:
        """`inside`: the command that starts another one somewhere else (disk.py)."""
        root = Path(__file__).resolve().parents[2]
        self.process = subprocess.Popen(
            inside([sys.executable, "-m", "tests.support.moments"]), cwd=root, text=True, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"},
        )  # fmt: skip

    def run(self, command: list[str], folder: Path, moment: int = 0, fault: str = "") -> dict[str, Any]:
        """What the command said at its end ("" if all went well), and how many changes it made."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        trial = {"command": command, "folder": str(folder), "moment": moment, "fault": fault}
        print(json.dumps(trial), file=self.process.stdin, flush=True)
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


if __name__ == "__main__":
    serve()
