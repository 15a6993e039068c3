"""Libraries of the extra `formats`."""

import importlib
from typing import Any

from ecgmatch_dist.errors import UserError


def library(name: str) -> Any:
    """Import a reader, or say how to get it."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise UserError(
            f"this format is read by {name}, which is not installed: pip install 'ecgmatch-dist[formats]'"
        ) from None
