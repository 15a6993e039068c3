"""The command line of `ecgmatch train` as a configuration. `--preset` and `--method` decide defaults and options."""

import dataclasses
import inspect
import os
import re
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

import tyro

from ecgmatch_dist.config import Config, Optim, methods
from ecgmatch_dist.errors import UserError, require
from ecgmatch_dist.presets import PRESETS

EXAMPLES = """
  ecgmatch train --preset few_labels --split splits/within-chapman@0.05.s20.json
  ecgmatch train --ranks 8 --split splits/mix@0.01.s20.json --shards data/shards
  ecgmatch train --method fixmatch --tag slow --optim.lr 0.001
"""
MAIN = ("split", "shards", "runs", "tag", "seed", "init", "weights")
"""What the short help shows; the rest is in --help-all."""
HELP_WIDTH = 78
OTHER_OPTIM = ("pretrain", "contrast")
"""Sections with the fields of `optim`."""


def parse(args: list[str]) -> Config:
    """The preset, changed by the given options."""
    preset, args = pop_option(args, "--preset", PRESETS, "paper")
    base = PRESETS[preset]()
    known = methods()
    name, args = pop_option(args, "--method", known, base.method.name)
    if name != base.method.name:
        base = dataclasses.replace(base, method=known[name]())
    if {"-h", "--help"} & {*args}:
        hidden = [f.name for f in dataclasses.fields(Config) if f.name not in MAIN]
        read(base, ["--help"], short_help(preset, name), hidden)
    if "--help-all" in args:
        read(base, ["--help"], long_help(base), OTHER_OPTIM)
    config = Config(**vars(read(base, args)))
    refuse_unused_optim(config, base)
    return config.settled()


def refuse_unused_optim(config: Config, base: Config) -> None:
    """A run that others start from has the optimiser of its own section, so that it is the same for all of them."""
    if not config.method.is_start:
        return
    section = "pretrain" if config.method.needs_labels else "contrast"
    for key, value in vars(config.optim).items():
        remedy = f"{config.method.name} has the optimiser of `{section}`; give --{section}.{key.replace('_', '-')}"
        require(value == getattr(base.optim, key), f"optim.{key}", value, remedy)


def read(base: Config, args: list[str], description: str = "", hidden: Sequence[str] = ()) -> Any:
    """`base`, changed by the options `args`. Those of the sections `hidden` are not shown by --help."""
    # The field has the type MethodSettings, which has no options: replace it by the type of the chosen method.
    hints: dict[str, Any] = {f.name: f.type for f in dataclasses.fields(Config) if f.name in hidden}
    hints["method"] = type(base.method)
    hints |= {name: Annotated[hints[name], tyro.conf.Suppress] for name in hidden}
    fields = [(name, hint, dataclasses.field(default=getattr(base, name))) for name, hint in hints.items()]
    options = dataclasses.make_dataclass("Options", fields, bases=(Config,), frozen=True)
    first = os.environ.get("RANK", "0") == "0"  # all ranks make the same mistake
    default = options(**vars(base))
    return tyro.cli(
        options, default=default, args=args, prog="ecgmatch train", description=description, console_outputs=first
    )


def short_help(preset: str, method: str) -> str:
    presets = "\n".join(f"  {name:18} {first_sentence(make)}" for name, make in PRESETS.items())
    known = "\n".join(f"  {name:18} {first_sentence(settings)}" for name, settings in methods().items())
    return (
        f"Train one run. A finished one is not trained again, an interrupted one is resumed.\n{EXAMPLES}\n"
        f"--preset NAME: the settings to start from (here {preset})\n{presets}\n\n"
        f"--method NAME: what to train with (here {method})\n{known}\n\n"
        "--ranks N: processes on this machine, one per GPU; several machines: torchrun\n"
        "--help-all: every setting of the method, network, views, banks, optimiser, validation and execution"
    )


def long_help(base: Config) -> str:
    """The sections of OTHER_OPTIM are not repeated: only where their defaults differ."""
    other = {"pretrain": base.optim} | ({"contrast": base.pretrain} if base.contrast != Optim() else {})
    lines = [
        f"  --{section}.{key.replace('_', '-')} {value}"
        for section, like in other.items()
        for key, value in vars(getattr(base, section)).items()
        if value != getattr(like, key)
    ]
    return (
        "Train one run: every setting.\n\npretrain.* and contrast.* have the options of optim.*, for the supervised run and "
        "the run without labels that this one starts from" + (". Other defaults:\n" if lines else "") + "\n".join(lines)
    )


def first_sentence(thing: object) -> str:
    """Of its docstring, on one line; of a long one, its beginning up to a colon, a comma or a bracket."""
    sentence = " ".join((inspect.getdoc(thing) or "").split()).partition(". ")[0].rstrip(".")
    ends = [found.start() for found in re.finditer(r"[:;,]| \(", sentence) if found.start() <= HELP_WIDTH]
    return sentence if len(sentence) <= HELP_WIDTH or not ends else sentence[: ends[-1]]


def with_choices() -> type:
    """All options of `ecgmatch train`, with --preset and --method, for the completion of a shell."""
    method = Config().method
    names: Any = Literal[tuple(methods())]
    fields: list[tuple[str, Any, Any]] = [
        ("ranks", int, dataclasses.field(default=1)),
        ("preset", Literal[tuple(PRESETS)], dataclasses.field(default="paper")),
        ("method_name", Annotated[names, tyro.conf.arg(name="method")], dataclasses.field(default=method.name)),
        ("method", type(method), dataclasses.field(default=method)),
    ]
    return dataclasses.make_dataclass("Options", fields, bases=(Config,), frozen=True)


def pop_option(args: list[str], option: str, known: Iterable[str] | None, default: str) -> tuple[str, list[str]]:
    """The value of `option` and the other arguments; `option VALUE` or `option=VALUE`. `known`: None for any value."""
    args = [part for arg in args for part in (arg.split("=", 1) if arg.startswith(f"{option}=") else [arg])]
    if option not in args:
        return default, args
    at = args.index(option)
    value = args[at + 1] if at + 1 < len(args) else ""
    if known is not None and value not in known:
        raise UserError(f"{option} {value}: known are {', '.join(known)}")
    return value, args[:at] + args[at + 2 :]
