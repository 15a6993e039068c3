"""The `ecgmatch` command. Each subcommand is one typed function; only the one that is called is imported."""

import importlib
import os
import sys
from collections.abc import Callable
from io import TextIOWrapper
from pathlib import Path
from typing import Literal

import tyro

from ecgmatch_dist import __version__
from ecgmatch_dist.errors import UserError, ending, memory_told
from ecgmatch_dist.files.plain import plain_line, plain_lines
from ecgmatch_dist.terminal.next_step import advise

COMMANDS = {
    "doctor": ("ecgmatch_dist.doctor:main", "check this machine or all ranks of a launcher before the first run"),
    "download": ("ecgmatch_dist.data.download:main", "fetch a public database, resumable and verified"),
    "synth": ("ecgmatch_dist.data.synthetic.databases:main", "make four small synthetic databases"),
    "adopt": (
        "ecgmatch_dist.data.adopt.command:main",
        "look at your own archive, and write its recipe and label scheme",
    ),
    "shards build": ("ecgmatch_dist.launch.build_shards:main", "recordings -> preprocessed webdataset shards"),
    "shards verify": ("ecgmatch_dist.data.verify:main", "check shards and draw their card"),
    "shards index": ("ecgmatch_dist.data.index:write_index", "make the fast table of shards that were built before"),
    "split": ("ecgmatch_dist.data.splits:main", "labelled / unlabelled / validation / test, in one file"),
    "train": ("ecgmatch_dist.train:main", "train one run (the same as torchrun -m ecgmatch_dist.train)"),
    "report": ("ecgmatch_dist.report:main", "runs -> the paper's tables, statistics and figures on one page"),
    "sweep": ("ecgmatch_dist.launch.sweep:main", "submit many runs to Slurm, or run them here one after the other"),
    "status": ("ecgmatch_dist.launch.status:main", "a sweep's runs: state, node, step, best MAP, restarts, errors"),
    "logs": ("ecgmatch_dist.launch.status:logs", "the log of a run and the output of its job"),
    "cancel": ("ecgmatch_dist.launch.status:cancel", "cancel the jobs of a sweep"),
    "choose": ("ecgmatch_dist.launch.choose:choose", "rank the settings of a sweep by validation MAP"),
    "label": (
        "ecgmatch_dist.label.command:main",
        "label ECGs on a page, the most useful ones first; a model grows beside",
    ),
    "predict": ("ecgmatch_dist.predict.command:main", "new ECGs -> classes, probabilities and their reasons"),
    "serve": ("ecgmatch_dist.serve.command:main", "a page to drop ECG files on, and predictions as JSON"),
    "export": ("ecgmatch_dist.export.command:main", "a model as a folder for others, with an ONNX graph"),
    "monitor": ("ecgmatch_dist.record.monitor:main", "open TensorBoard on a folder of runs"),
    "demo": ("ecgmatch_dist.demo:main", "the whole path on synthetic ECGs"),
    "plan": ("ecgmatch_dist.capacity.command:main", "estimate memory, traffic and time on a cluster"),
    "bench": ("ecgmatch_dist.bench:main", "measure speed against the usual alternatives"),
    "completion": ("ecgmatch_dist.cli:completion", "complete commands and options in your shell"),
}
PARSE_THEMSELVES = {"train", "bench"}  # their first words decide which options there are


def usage(group: str = "") -> str:
    """All commands, or those whose name begins with the word `group`."""
    shown = {name: what for name, (_, what) in COMMANDS.items() if not group or name.startswith(f"{group} ")}
    width = max(map(len, shown))
    rows = "\n".join(f"  {name:{width}}  {what}" for name, what in shown.items())
    return f"usage: ecgmatch {f'{group} ' if group else ''}COMMAND ...   (options: ecgmatch COMMAND --help)\n\n{rows}"


def resolve(args: list[str]) -> tuple[str, Callable[..., object], list[str]]:
    """The longest command name that `args` begin with, its function, and the remaining arguments."""
    for words in (2, 1):
        name = " ".join(args[:words])
        if name in COMMANDS:
            return name, load(name), args[words:]
    group = args[0] if is_group(args[0]) else ""
    raise UserError(f"no command `{' '.join(args[:2])}`\n{usage(group)}")


def load(name: str) -> Callable[..., object]:
    module, function = COMMANDS[name][0].split(":")
    found: Callable[..., object] = getattr(importlib.import_module(module), function)
    return found


def is_group(word: str) -> bool:
    """Whether there are commands of two words that begin with this one."""
    return any(name.startswith(f"{word} ") for name in COMMANDS)


def completion(shell: tyro.conf.Positional[Literal["bash", "zsh", "fish"]], /) -> None:
    """Print a script that completes commands, options and their choices.

    Args:
        shell: bash, zsh or fish. The script says where it belongs.
    """
    from ecgmatch_dist.arguments import with_choices
    from ecgmatch_dist.terminal.completion import WHERE, script

    commands = {name: load(name) for name in COMMANDS if name not in PARSE_THEMSELVES}
    print(script(shell, {**commands, "train": with_choices()}), end="")
    print(f"ecgmatch: write this to {WHERE[shell]}, then open a new shell", file=sys.stderr)


def answer_at_once(args: list[str]) -> bool:
    """Answer what needs no command: nothing, --help, --version, or the first word of several commands."""
    asks_for_help = args[-1:] in (["-h"], ["--help"])
    if not args:
        found, *commands = map(plain_line, advise(Path()))
        print(usage(), "", f"here: {found}", "next:", *(f"  {command}" for command in commands), sep="\n")
    elif args == ["--version"]:
        print(f"ecgmatch_dist {__version__}")
    elif args in (["-h"], ["--help"]):
        print(usage())
    elif is_group(args[0]) and (len(args) == 1 or (len(args) == 2 and asks_for_help)):
        print(usage(args[0]))
    else:
        return False
    return True


def answer(args: list[str]) -> None:
    """Do what is asked for. What was printed is written out here: errors of that belong to the command."""
    try:
        if not answer_at_once(args):
            name, function, rest = resolve(args)
            with memory_told(
                "end other programs, or take a larger machine; the same command continues where it stopped"
            ):
                if name in PARSE_THEMSELVES:
                    function(rest)
                else:
                    tyro.cli(function, prog=f"ecgmatch {name}", args=rest)
    finally:
        if sys.stdout:
            sys.stdout.flush()


def main() -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a sign that a terminal cannot show is no reason to stop
            stream.reconfigure(errors="backslashreplace")
    try:
        answer(sys.argv[1:])
    except (Exception, KeyboardInterrupt) as error:
        if (end := ending(error)) is None:
            raise
        if isinstance(error, BrokenPipeError):  # or Python would try to write out the rest, and tell of it
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if end.code == 1:
            sys.exit(plain_lines(end.line))  # printed by Python
        if end.line:
            print(plain_lines(end.line), file=sys.stderr)
        sys.exit(end.code)
