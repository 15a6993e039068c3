"""Configurations that were saved as JSON: read one back, and compare two setting by setting.

`Config.to_json` writes them. A setting has a dotted key here: `optim.lr`.
"""

import dataclasses
from collections.abc import Mapping
from functools import cache
from typing import Any, get_type_hints

from ecgmatch_dist.config.fields import Config
from ecgmatch_dist.config.method import method_settings
from ecgmatch_dist.config.roles import Role, role_of
from ecgmatch_dist.files.strict import convert


def from_json(value: dict[str, Any], where: str = "configuration") -> Config:
    """The inverse of `Config.to_json`. An unknown key is an error. `where` begins the error messages."""
    value = dict(value)
    method = dict(value.pop("method", {"name": "ecgmatch"}))
    settings = method_settings(str(method.pop("name", "")))
    config = convert(value, Config, where)
    return dataclasses.replace(config, method=convert(method, settings, f"{where}: method"))


def flatten(nested: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries as one with dotted keys: {"optim": {"lr": 1}} -> {"optim.lr": 1}."""
    out: dict[str, Any] = {}
    for key, value in nested.items():
        out |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return out


def role(key: str, value: object = None) -> Role:
    """The role of the setting with this dotted key and value. A setting that this version does not know counts as "result"."""
    return role_of(_metadata(key), value)


@cache
def _metadata(key: str) -> Mapping[str, Any]:
    section: Any = Config
    found: Mapping[str, Any] = {}
    for name in key.split("."):
        fields = {f.name: f for f in dataclasses.fields(section)} if dataclasses.is_dataclass(section) else {}
        if name not in fields:
            return found
        found = fields[name].metadata
        section = get_type_hints(section)[name]
    return found


def first_difference(old: dict[str, Any], new: dict[str, Any]) -> str:
    """The first setting that decides the result and differs between two configurations in JSON; empty if none does."""
    before, now = flatten(old), flatten(new)
    usual = flatten(Config().to_json())  # a version that did not know a setting yet behaved as its default says
    for key in dict.fromkeys([*now, *before]):
        was, is_ = (side.get(key, usual.get(key)) for side in (before, now))
        if was != is_ and any(role(key, value) != "execution" for value in (was, is_)):
            return f"{key} was {was!r}, is {is_!r}"
    return ""
