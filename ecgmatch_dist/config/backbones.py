"""The names of the backbones, without importing them."""

from pathlib import Path

BACKBONES = Path(__file__).parents[1] / "network" / "backbones"


def backbones() -> list[str]:
    """The names of all backbones: one file each in network/backbones/."""
    return sorted(path.stem for path in BACKBONES.glob("*.py") if path.stem not in ("__init__", "base"))
