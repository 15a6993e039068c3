"""From TOML or JSON to a typed value. Unknown keys, missing keys and wrong types are errors that name file, key and remedy.

msgspec does the conversion. It ignores unknown keys of dataclasses, so they are checked here.
"""

import dataclasses
import json
import re
import tomllib
import types
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from ecgmatch_dist.errors import UserError

T = TypeVar("T")
NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", Path: "a path"}


def read_toml(path: Path, kind: type[T]) -> T:
    """Read a TOML file as a `kind`."""
    try:
        value = tomllib.loads(path.read_text(encoding="utf-8-sig"))  # some editors begin a file with a mark
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except (
        ValueError,
        RecursionError,
    ) as error:  # broken TOML, broken UTF-8, numbers of thousands of digits, deep nesting
        raise UserError(f"{path}: not a TOML file ({error})") from None
    return convert(value, kind, str(path))


def read_object(path: Path, remedy: str) -> dict[str, Any]:
    """Read the JSON object in a file. `remedy` ends the error messages."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: not found; {remedy}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); {remedy}") from None
    except (ValueError, RecursionError) as error:  # broken JSON and broken UTF-8 are both ValueErrors
        raise UserError(f"{path}: not JSON ({error}); {remedy}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: a {type(value).__name__} instead of an object; {remedy}")
    return value


def check_format(value: dict[str, Any], expected: int, where: object, remedy: str, oldest: int | None = None) -> None:
    """Refuse a file of another format; `oldest`: the first one that can still be read. A file without the number has format 1:
    the first release did not write it."""
    found = value.get("format", 1)
    if found not in range(expected if oldest is None else oldest, expected + 1):
        raise UserError(f"{where}: format {found!r}, but this version of ecgmatch_dist reads {expected}; {remedy}")


def convert(value: object, kind: type[T], where: str) -> T:
    """Convert what a JSON or TOML parser returns to a `kind`. `where` begins the error messages."""
    refuse_unknown(value, kind, where)
    try:
        return msgspec.convert(value, kind, dec_hook=_convert_path)
    except UserError as error:  # of a dataclass that checks itself
        raise UserError(f"{where}: {error}") from None
    except msgspec.ValidationError as error:
        raise UserError(f"{where}: {_explain(str(error), value, kind)}") from None


def refuse_unknown(value: object, kind: Any, where: str, inside: str = "") -> None:
    """Refuse the first key that is not a field of the dataclass `kind`, or of a dataclass inside it."""
    kind = _narrow(kind, value)
    if not isinstance(value, dict) or not (fields := _fields(kind)):
        return
    hints, names = fields
    for key, entry in value.items():
        if key not in names:
            raise UserError(f"{where}: unknown key `{inside}{key}`; known are {', '.join(names)}")
        hint = _narrow(hints[key], entry)
        if get_origin(hint) in (list, tuple) and isinstance(entry, list):
            for number, item in enumerate(entry):
                refuse_unknown(item, get_args(hint)[0], where, f"{inside}{key}[{number}].")
        elif get_origin(hint) is dict and isinstance(entry, dict):
            for name, item in entry.items():
                refuse_unknown(item, get_args(hint)[1], where, f"{inside}{key}.{name}.")
        else:
            refuse_unknown(entry, hint, where, f"{inside}{key}.")


@cache  # a report reads thousands of files of the same kind
def _fields(kind: Any) -> tuple[dict[str, Any], list[str]] | None:
    """The types and the names of a dataclass' fields; None for other types."""
    if not dataclasses.is_dataclass(kind):
        return None
    return get_type_hints(kind), [field.name for field in dataclasses.fields(kind)]


def describe(hint: Any) -> str:
    """The values of a type in words."""
    if get_origin(hint) is Literal:
        return " or ".join(repr(option) for option in get_args(hint))
    if get_origin(hint) in (Union, types.UnionType):
        return ", ".join(describe(option) for option in get_args(hint) if option is not type(None))
    if get_origin(hint) is tuple and get_args(hint)[-1] is not Ellipsis:
        return f"[{', '.join(describe(item) for item in get_args(hint))}]"
    if get_origin(hint) in (list, tuple):
        return f"a list of {describe(get_args(hint)[0])}"
    if dataclasses.is_dataclass(hint) or get_origin(hint) is dict:
        return "a table"
    return NAMES.get(hint, str(hint))


def _convert_path(kind: type, value: object) -> object:
    if kind is Path and isinstance(value, str):
        return Path(value)
    raise TypeError(f"Expected a path, got {value!r}")


def _narrow(kind: Any, value: object) -> Any:
    """The member of a union that takes tables or lists, if `value` is one; other types as they are."""
    if get_origin(kind) in (Union, types.UnionType):
        for option in get_args(kind):
            if isinstance(value, dict) and (dataclasses.is_dataclass(option) or get_origin(option) is dict):
                return option
            if isinstance(value, list) and get_origin(option) in (list, tuple):
                return option
    return kind


def _explain(message: str, value: Any, kind: Any) -> str:
    """Rephrase msgspec's message: the key, its value, and which values are allowed."""
    message, _, path = message.partition(" - at `$")
    name = ""
    for key, index in re.findall(r"\.(\w+)|\[(\d+|\.\.\.)\]", path):
        kind = _narrow(kind, value)
        if key:
            value, kind, name = value[key], get_type_hints(kind)[key], f"{name}.{key}"
        elif index == "...":  # msgspec does not say which value of a dictionary
            kind = get_args(kind)[1]
            key = _first_invalid(value, kind)
            value, name = value[key], f"{name}.{key}"
        else:
            value, kind, name = value[int(index)], get_args(kind)[0], f"{name}[{index}]"
    name = name.removeprefix(".")
    if missing := re.search(r"missing required field `(\w+)`", message):
        return f"{name}: the key `{missing[1]}` is missing" if name else f"the key `{missing[1]}` is missing"
    if not name:
        return f"{value!r:.60} instead of {describe(kind)}"
    return f"{name} = {value!r:.60}: it takes {describe(kind)}"


def _first_invalid(values: dict[str, Any], kind: Any) -> str:
    for key, value in values.items():
        try:
            msgspec.convert(value, kind, dec_hook=_convert_path)
        except msgspec.ValidationError:
            return key
    raise AssertionError(f"every value is valid: {values}")
