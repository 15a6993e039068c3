"""`ecgmatch completion SHELL`: a script that completes commands, options and their choices."""

import re
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout, suppress
from io import StringIO
from typing import Annotated, Any, Literal, Union

import tyro

Shell = Literal["bash", "zsh", "fish"]
WHERE = {
    "bash": "~/.local/share/bash-completion/completions/ecgmatch",
    "zsh": "a folder of $fpath, as _ecgmatch",
    "fish": "~/.config/fish/completions/ecgmatch.fish",
}


def script(shell: Shell, commands: Mapping[str, Callable[..., object]]) -> str:
    """tyro's script for all commands. A name of two words, "shards build", is a command of its first word."""
    tree: dict[str, Any] = {}
    for name, function in commands.items():
        group, _, inner = name.rpartition(" ")
        tree.setdefault(group, {})[inner] = function if group else _command(inner, function)
    top = tree.pop("")
    for group, inner in tree.items():
        top[group] = _command(group, _group([_command(name, function) for name, function in inner.items()]))
    out = StringIO()
    with redirect_stdout(out), suppress(SystemExit):
        plain_names = (tyro.conf.OmitSubcommandPrefixes,)
        args = ["--tyro-print-completion", shell]
        tyro.cli(_any_of(list(top.values())), prog="ecgmatch", args=args, config=plain_names)
    # Each line of a description would be offered as a word.
    text = re.sub(r"(?m)^COMPLETION_SPEC = .*$", lambda spec: spec[0].replace("\\n", " "), out.getvalue())
    # What tyro has no answer for, the names of files among it, is left to bash.
    return text + ("\ncomplete -o default -F _tyro_ecgmatch ecgmatch\n" if shell == "bash" else "")


def _command(name: str, function: Callable[..., object]) -> Any:
    return Annotated[Any, tyro.conf.subcommand(name, constructor=function)]


def _group(commands: list[Any]) -> Callable[..., object]:
    def group(command: Any) -> None: ...

    group.__annotations__["command"] = _any_of(commands)
    return group


def _any_of(commands: list[Any]) -> Any:
    return Union[tuple(commands)]  # noqa: UP007  (made at run time)
