"""The command line of `ecgmatch train` as a configuration. `--preset` and `--method` decide defaults and options."""

import dataclasses
from collections.abc import Iterable

import tyro

from ecgmatch_dist.config import Config, methods
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.presets import PRESETS


def parse(args: list[str], description: str | None = None) -> Config:
    """The preset, changed by the given options."""
    preset, args = pop_option(args, "--preset", PRESETS, "paper")
    base = PRESETS[preset]()
    known = methods()
    name, args = pop_option(args, "--method", known, base.method.name)
    if name != base.method.name:
        base = dataclasses.replace(base, method=known[name]())
    # The field has the type MethodSettings, which has no options: replace it by the type of the chosen method.
    method = ("method", known[name], dataclasses.field(default=base.method))
    options = dataclasses.make_dataclass("Options", [method], bases=(Config,), frozen=True)
    parsed = tyro.cli(options, default=options(**vars(base)), args=args, prog="ecgmatch train", description=description)
    return Config(**vars(parsed)).settled()


def pop_option(args: list[str], option: str, known: Iterable[str], default: str) -> tuple[str, list[str]]:
    """The value of `option` and the other arguments; `option VALUE` or `option=VALUE`."""
    args = [part for arg in args for part in (arg.split("=", 1) if arg.startswith(f"{option}=") else [arg])]
    if option not in args:
        return default, args
    at = args.index(option)
    value = args[at + 1] if at + 1 < len(args) else ""
    if value not in known:
        raise UserError(f"{option} {value}: known are {', '.join(known)}")
    return value, args[:at] + args[at + 2 :]
