"""Change settings by dotted keys ("method.lambda_u" = 0.4). Unknown keys and wrong types are refused at once."""

import dataclasses
from typing import Any, get_type_hints

from ecgmatch_dist.config import Config, MethodSettings, method_settings
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.files.strict import convert, describe


def change(config: Config, key: str, value: Any) -> Config:
    """The configuration with one setting changed; the key `method` takes a method's name and sets its defaults."""
    if key == "method":
        if value == config.method.name:  # keep what the preset has set for its method
            return config
        return dataclasses.replace(config, method=method_settings(value)())
    changed = _set(config, key.split("."), key, value)
    assert isinstance(changed, Config)
    return changed


def _set(node: Any, path: list[str], key: str, value: Any) -> Any:
    names = [field.name for field in dataclasses.fields(node)]
    if path[0] not in names:
        where = f"the method {node.name}" if isinstance(node, MethodSettings) else "the configuration"
        raise UserError(f"setting {key}: {where} has no `{path[0]}` here; known are {', '.join(names)}")
    current = getattr(node, path[0])
    if len(path) > 1:
        if not dataclasses.is_dataclass(current):
            raise UserError(f"setting {key}: `{path[0]}` has no parts")
        return dataclasses.replace(node, **{path[0]: _set(current, path[1:], key, value)})
    if dataclasses.is_dataclass(current):
        raise UserError(f"setting {key}: name one of its parts, as in {key}.{_first(current)}")
    hint = get_type_hints(type(node))[path[0]]
    try:
        converted = convert(value, hint, key)
    except UserError:
        raise UserError(f"setting {key} = {value!r}: it takes {describe(hint)}") from None
    return dataclasses.replace(node, **{path[0]: converted})


def _first(node: Any) -> str:
    return str(dataclasses.fields(node)[0].name)
