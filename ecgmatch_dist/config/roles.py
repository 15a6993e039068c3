"""The roles of fields: what a setting decides, and since when there is one."""

from collections.abc import Mapping
from dataclasses import field
from typing import Any, Literal, TypeVar

T = TypeVar("T")
Role = Literal["result", "draw", "execution"]


def execution(default: T, but: tuple[T, ...] = ()) -> T:
    """A field that says where or how a run is executed. It changes the result by rounding at most. `but`: values that do decide
    the result."""
    marked: T = field(default=default, metadata={"role": "execution", "but": but})
    return marked


def role_of(metadata: Mapping[str, Any], value: object) -> Role:
    """The role of a field with this value."""
    role: Role = metadata.get("role", "result")
    return "result" if value in metadata.get("but", ()) else role


def draw(default: T) -> T:
    """A field that decides the result only as another random draw of the same experiment: reports average over it."""
    marked: T = field(default=default, metadata={"role": "draw"})
    return marked


def added(default: T) -> T:
    """A field that decides the result and that older versions did not have. With its default, a run computes what they did, and
    the field is left out of the fingerprint."""
    marked: T = field(default=default, metadata={"added": True})
    return marked
