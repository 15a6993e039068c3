"""The commands in the documentation, and reading one as the real parsers do, without running it."""

import functools
import importlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import tyro

from ecgmatch_dist import cli
from ecgmatch_dist.arguments import parse, pop_option

ROOT = Path(__file__).resolve().parents[2]
OUR_COMMAND = re.compile(r"(?:^|[\s;])((?:torchrun\b[^;|]*?-m |python3? -m )ecgmatch_dist\S*.*|ecgmatch(?= [a-z]).*)")


PLACEHOLDERS = {
    "RUN": "chapman_ptbxl"
}  # what a page says for a name of the reader's own; here the model of the package
LEFT_OUT = {".venv", ".venv-lowest", "demo", "runs", "lab-demo"}


def pages() -> list[Path]:
    """The documentation, and the recipes whose comments have commands."""
    found = [path for path in sorted(ROOT.glob("**/*.md")) if not LEFT_OUT & {*path.relative_to(ROOT).parts}]
    return [*found, *sorted(ROOT.glob("launch/*.toml")), *sorted(ROOT.glob("shards/**/*.toml"))]


def blocks(text: str) -> Iterator[str]:
    """Lines of fenced and indented blocks, with continuation lines joined."""
    fenced = False
    lines = iter(text.splitlines())
    for line in lines:
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif fenced or line.startswith("    "):
            while line.endswith("\\"):
                line = f"{line[:-1].rstrip()} {next(lines).lstrip()}"
            yield line


def commands(page: Path) -> list[str]:
    """Our commands in the blocks of a page or in the comments of a recipe; one with `...` or CAPITALS is a description."""
    text = page.read_text(encoding="utf-8")
    lines = blocks(text) if page.suffix == ".md" else (line[2:] for line in text.splitlines() if line.startswith("# "))
    found = []
    for line in lines:
        if match := OUR_COMMAND.search(line):
            command = re.split(r"\s{2,}|\s(?:#|\||>|&)|;", match[1].strip())[0]
            command = " ".join(PLACEHOLDERS.get(word, word) for word in command.split(" "))
            if "..." not in command and not re.search(r"\s(?:[A-Z]{3,}\b|\[)", command):
                found.append(re.sub(r"\$\{?\w+\}?", "1", command))  # variables of a loop
    return found


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
