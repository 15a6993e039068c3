"""config.json: all settings of a run, and the fingerprint of those that decide its result."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ecgmatch_dist.config import Config, first_difference, from_json
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.files.strict import check_format, read_object

FORMAT = 2
REMEDY = "finish the run with the version that started it, or give this one a --tag of its own"


@dataclass(frozen=True)
class SavedConfig:
    """The settings in a run folder. They stay a dictionary, because another version may have written them."""

    settings: dict[str, Any]
    fingerprint: str

    def is_of_today(self) -> bool:
        """Whether this version would give a run with these settings the same fingerprint. Not if it measures otherwise."""
        try:
            return from_json(self.settings).fingerprint() == self.fingerprint
        except (UserError, TypeError, ValueError):  # settings that this version does not know
            return False

    def check(self, config: Config, folder: Path) -> None:
        """Refuse a folder that holds a run with other settings."""
        if self.fingerprint != config.fingerprint():
            difference = first_difference(self.settings, config.to_json()) or "settings of another version"
            raise UserError(
                f"{folder} holds a run with another configuration ({difference}): "
                "give this one a --tag of its own, or remove the folder"
            )


def to_file(config: Config) -> dict[str, Any]:
    """The content of config.json."""
    return {"format": FORMAT, "fingerprint": config.fingerprint(), **config.to_json()}


def read_config(path: Path) -> SavedConfig:
    value = read_object(path, REMEDY)
    if value.get("format", 1) == 1:  # the fingerprint had another name
        value |= {"format": FORMAT, "fingerprint": value.pop("meaning", None)}
    check_format(value, FORMAT, path, REMEDY)
    del value["format"]
    fingerprint = value.pop("fingerprint", None)
    if not isinstance(fingerprint, str):
        raise UserError(f"{path}: the key `fingerprint` is missing; {REMEDY}")
    return SavedConfig(value, fingerprint)
