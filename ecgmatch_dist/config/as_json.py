"""Settings as nested dictionaries, for files and fingerprints."""

import dataclasses
from pathlib import Path
from typing import Any

from ecgmatch_dist.config.method import MethodSettings
from ecgmatch_dist.config.roles import Role, role_of


def as_json(node: Any, without: tuple[Role, ...] = (), older: bool = False) -> dict[str, Any]:
    """`older`: without fields that were added later and have their defaults."""
    out: dict[str, Any] = {"name": node.name} if isinstance(node, MethodSettings) else {}
    for f in dataclasses.fields(node):
        value = getattr(node, f.name)
        if role_of(f.metadata, value) in without:
            continue
        if older and f.metadata.get("added") and value == f.default:
            continue
        if dataclasses.is_dataclass(value):
            out[f.name] = as_json(value, without, older)
        elif isinstance(value, Path):
            out[f.name] = str(value)
        else:  # 100 for a float is the same setting as 100.0, and must have the same fingerprint
            out[f.name] = float(value) if f.type is float else value
    return out
