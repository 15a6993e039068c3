"""How `Config.weights` names the model that a chain begins with: `NAME`, and once a run has begun `NAME#CHECKSUM`, or
`NAME#CHECKSUM+CHECKSUM` with that of the trees beside the weights, if the run asks them."""

import re

PIN, WITH_TREES = "#", "+"
DIGITS = 16
"""Of a SHA-256: a checksum."""
_CHECKSUM = f"[0-9a-f]{{{DIGITS}}}"
_PINNED = re.compile(rf"(.+){PIN}({_CHECKSUM})({re.escape(WITH_TREES)}{_CHECKSUM})?", re.DOTALL)


def parted(weights: str) -> tuple[str, str]:
    """Name and checksum of `Config.weights`; without one, an empty text."""
    match = _PINNED.fullmatch(weights)
    return (match[1], match[2] + (match[3] or "")) if match else (weights, "")


def without_trees(weights: str) -> str:
    """`Config.weights` of a run that asks no trees."""
    match = _PINNED.fullmatch(weights)
    return f"{match[1]}{PIN}{match[2]}" if match else weights
