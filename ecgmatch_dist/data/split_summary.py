"""What `ecgmatch split` and `ecgmatch train` tell about a split: counts, where every recording went, and what is doubtful."""

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from ecgmatch_dist.data.labels import UNKNOWN, known, load_scheme
from ecgmatch_dist.data.split_file import PARTS, Split
from ecgmatch_dist.data.store import ShardStore

FEW = 10
"""Fewer positives of a class than this make its numbers hardly more than a guess."""


def show(split: Split, store: ShardStore, path: Path, console: Console) -> None:
    """Print the counts as a table, where every recording went, and the check before training."""
    table = Table(title=f"{split.name}   {split.sha256[:12]}", title_justify="left")
    for name in ("class", *PARTS):
        table.add_column(name, justify="left" if name == "class" else "right")
    for name in split.counts["test"]:
        share = name != "recordings"
        cells = []
        for part in PARTS:
            of_part = split.counts[part]
            n = of_part["recordings"] - split.unannotated.get(part, {}).get(name, 0)  # shares are of those looked at
            known_share = f"{of_part[name]:,} {of_part[name] / n:6.1%}" if n else "unknown"
            cells.append(known_share if share else f"{of_part[name]:,}       ")
        table.add_row(name, *cells)
    console.print(table)
    labels = split.all_labels(store)
    for line in (*accounting(split, len(store)), *readiness(split, labels, f"{store.rate:g} Hz, 12 x {store.length}")):
        style = "[yellow]warning[/]: " if line.startswith("warning: ") else ""
        console.print(style + line.removeprefix("warning: "), highlight=False, soft_wrap=True)
    console.print(f"written to {path}", highlight=False, soft_wrap=True)


def accounting(split: Split, kept: int) -> list[str]:
    """kept = labelled + unlabelled + validation + test + left out, and why."""
    sizes = [split.size(part) for part in PARTS]
    out = kept - sum(sizes)
    parts = " + ".join(f"{n:,} {part}" for part, n in zip(PARTS, sizes, strict=True))
    lines = [f"{kept:,} recordings in the shards = {parts} + {out:,} left out"]
    reasons = split.left_out or ({"no class of the scheme": out} if out else {})
    return lines + [f"  left out: {n:,} {reason}" for reason, n in reasons.items()]


def readiness(split: Split, labels: Mapping[str, NDArray[np.uint8]], signals: str) -> list[str]:
    """Five lines to read before training, from the labels [n, C] of each part; then warnings."""
    short = load_scheme(split.scheme).short
    looked_at = known(labels["unlabelled"])
    hidden, never = int(looked_at.sum()), int((~looked_at).sum())
    few = {part: few_positives(labels[part], short) for part in ("validation", "test")}
    lines = [
        f"labelled    {len(labels['labelled']):,} recordings: {_classes(labels['labelled'], short)}",
        f"unlabelled  {len(looked_at):,} recordings: {never:,} without any label, {hidden:,} whose labels the split hides",
        f"unknown     {_unknown(split, labels)}",
        f"few         {'; '.join(f'{part}: {names}' for part, names in few.items() if names) or 'none'} "
        f"(classes with fewer than {FEW} positives)",
        f"signals     {signals}",
    ]
    for part in ("labelled", "validation", "test"):
        if lacking := [name for c, name in enumerate(short) if not (labels[part][:, c] == 1).any()]:
            lines.append(f"warning: no recording of {', '.join(lacking)} in the {part} part")
    for part in ("validation", "test"):
        if (n := len(labels[part])) < 50:
            low, high = wilson(0.8, n)
            lines.append(
                f"warning: {n} recordings in the {part} part: a share of 80 % on them may in truth be {low:.0%} to {high:.0%}"
                + (
                    " (see `--validation-folds`)"
                    if part == "validation" and n < FEW and "fold@" not in split.name
                    else ""
                )
            )
    return lines


def few_positives(y: NDArray[np.uint8], short: tuple[str, ...]) -> str:
    counts = (y == 1).sum(0)
    return ", ".join(f"{name} {k}" for name, k in zip(short, counts, strict=True) if k < FEW)


def _classes(y: NDArray[np.uint8], short: tuple[str, ...]) -> str:
    return ", ".join(f"{name} {k:,}" for name, k in zip(short, (y == 1).sum(0), strict=True))


def _unknown(split: Split, labels: Mapping[str, NDArray[np.uint8]]) -> str:
    """Classes that nobody has looked for in some recordings with labels."""
    short, found = load_scheme(split.scheme).short, []
    for part in ("labelled", "validation", "test"):
        counts = (labels[part] == UNKNOWN).sum(0)
        found += [
            f"{name} in {k:,} of {len(labels[part]):,} {part}" for name, k in zip(short, counts, strict=True) if k
        ]
    return ", ".join(found) or "none: each class is annotated in the labelled, validation and test parts"


def wilson(share: float, n: int, z: float = 1.96) -> tuple[float, float]:
    """95 % interval of a share that was measured on n recordings (Wilson)."""
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    reach = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return middle - reach, middle + reach
