"""Reading a command as the real parsers do, without running it."""

import functools
import importlib
import shlex

import tyro

from ecgmatch_dist import cli
from ecgmatch_dist.arguments import parse, pop_option


def check_command(line: str) -> None:
    """Parse `ecgmatch ...`, `torchrun ... -m ecgmatch_dist...` or `python -m ecgmatch_dist...`; raises where it is wrong."""
    words = shlex.split(line, comments=True)
    if "-m" in words:
        at = words.index("-m") + 1
        module, words = words[at], words[at + 1 :]
        name = module.removeprefix("ecgmatch_dist").lstrip(".")
        words = [*name.split("."), *words] if name else words
    else:
        words = words[1:]
    if words in (["--version"], ["--help"], []) or words[-1] in ("--help", "--help-all"):
        return
    name, function, rest = cli.resolve(words)
    if name == "train":
        parse(pop_option(rest, "--ranks", None, "1")[1])
        return
    if name == "bench":
        name, function = f"bench {rest[0]}", importlib.import_module(f"ecgmatch_dist.bench.{rest[0]}").main
        rest = rest[1:]

    @functools.wraps(function)
    def nothing(*args: object, **options: object) -> None: ...

    tyro.cli(nothing, prog=f"ecgmatch {name}", args=rest)
