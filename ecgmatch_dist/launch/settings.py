"""Settings by dotted keys ("method.lambda_u" = 0.4), checked against the configuration's types as early as possible."""

import dataclasses
import types
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from ecgmatch_dist.config import Config
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.methods.configs import MethodConfig, Supervised


def change(config: Config, key: str, value: Any) -> Config:
    """The configuration with one setting changed; `method` takes a method's name and gives its defaults."""
    if key == "method":
        methods = {cls.name: cls for cls in get_args(MethodConfig)}
        if value not in methods:
            raise UserError(f"method = {value!r}: one of {', '.join(methods)}")
        if value == config.method.name:  # the preset's settings of its own method stay
            return config
        return dataclasses.replace(config, method=methods[value]())
    changed = _set(config, key.split("."), key, value)
    assert isinstance(changed, Config)
    return changed


def _set(node: Any, path: list[str], key: str, value: Any) -> Any:
    names = [field.name for field in dataclasses.fields(node)]
    if path[0] not in names:
        where = f"the method {node.name}" if isinstance(node, get_args(MethodConfig)) else "the configuration"
        raise UserError(f"setting {key}: {where} has no `{path[0]}` here; known are {', '.join(names)}")
    current = getattr(node, path[0])
    if len(path) > 1:
        if not dataclasses.is_dataclass(current):
            raise UserError(f"setting {key}: `{path[0]}` has no parts")
        return dataclasses.replace(node, **{path[0]: _set(current, path[1:], key, value)})
    if dataclasses.is_dataclass(current):
        raise UserError(f"setting {key}: name the part of it that is meant, as in {key}.{_first(current)}")
    return dataclasses.replace(node, **{path[0]: _fit(value, get_type_hints(type(node))[path[0]], key)})


def _first(node: Any) -> str:
    return str(dataclasses.fields(node)[0].name)


def _fit(value: Any, hint: Any, key: str) -> Any:
    """`value` as the type that the field has, or an error that names what it takes."""
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    for option in options:
        if get_origin(option) is Literal and value in get_args(option) and not isinstance(value, bool):
            return value
        if option is float and isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        if option is Path and isinstance(value, str):
            return Path(value)
        if option in (int, str, bool) and type(value) is option:
            return value
    raise UserError(f"setting {key} = {value!r}: it takes {_describe(hint)}")


def _describe(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return " or ".join(repr(option) for option in get_args(hint))
    if get_origin(hint) in (Union, types.UnionType):
        return ", ".join(_describe(option) for option in get_args(hint))
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", Path: "a path"}
    return names.get(hint, str(hint))


def flatten(table: dict[str, Any], where: str = "") -> dict[str, Any]:
    """Nested TOML tables as dotted keys."""
    out: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            out |= flatten(value, f"{where}{key}.")
        else:
            out[where + key] = value
    return out


def settled(config: Config) -> Config:
    """As the trainer runs it: a supervised run takes its optimiser from `pretrain`."""
    if not isinstance(config.method, Supervised):
        return config
    return dataclasses.replace(config.supervised(), tag=config.tag)
