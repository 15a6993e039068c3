"""The picture on the first page of README.md: test MAP of each rung of the ladder, from the tables of docs/experiments.md.

python tools/ladder.py     (after a change of those tables; writes docs/ladder.svg)
"""

import re
from pathlib import Path

from matplotlib.axes import Axes

from ecgmatch_dist.report.drawing import COLOURS, INK, panels, save, style

ROOT = Path(__file__).resolve().parents[1]
DATABASES = ("Chapman", "PTB-XL")
RUNGS = {
    "the paper's\nnetwork,\nlabels alone": 0,
    "residual\nnetwork on\ncrops": 1,
    "ECGMatch,\none\nnetwork": 2,
    "and its trees\nanswer, too": 4,
    "and begun\nwith public\nlabels": 6,
}
"""Rungs, and their columns in the table of labelled sets."""
Sets = list[tuple[float, ...]]
"""Test MAP on the rungs, for each labelled set."""


def read_tables(text: str) -> dict[str, Sets]:
    """Rows `| Chapman, 19 | .695 | .714 | ...`: one per labelled set."""
    found = {}
    for name in DATABASES:
        rows = re.findall(rf"^\| {name}, \d+ \| (.+) \|$", text, re.MULTILINE)
        assert rows, f"docs/experiments.md: no row | {name}, 19 | with numbers"
        found[name] = [tuple(float(row.split(" | ")[column]) for column in RUNGS.values()) for row in rows]
    return found


def means(sets: Sets) -> tuple[float, ...]:
    return tuple(sum(rung) / len(rung) for rung in zip(*sets, strict=True))


def draw(axes: Axes, name: str, sets: Sets) -> None:
    """One line per labelled set, and their mean."""
    places = range(len(RUNGS))
    for values in sets:
        axes.plot(places, values, color=COLOURS[0], alpha=0.45, linewidth=1, marker="o", markersize=2.5)
    axes.plot(places, means(sets), color=INK, linewidth=2, marker="o", markersize=4)
    for place, mean in zip(places, means(sets), strict=True):
        ground = {"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 0.5}
        axes.annotate(f"{mean:.3f}", (place, mean), (0, 8), textcoords="offset points", ha="center", bbox=ground)
    axes.set_title(name)
    axes.set_xticks(list(places), RUNGS)
    axes.set_xlim(-0.4, len(RUNGS) - 0.6)
    axes.set_ylabel("test MAP")


def main() -> None:
    tables = read_tables((ROOT / "docs/experiments.md").read_text(encoding="utf-8"))
    with style():
        figure, all_axes = panels(len(tables), columns=2, width=4.1, height=2.7, margins=(0.55, 0.62, 0.1, 0.36))
        for axes, (name, sets) in zip(all_axes, tables.items(), strict=True):
            draw(axes, name, sets)
        low, high = (pick(value for sets in tables.values() for row in sets for value in row) for pick in (min, max))
        for axes in all_axes:
            axes.set_ylim(low - 0.01, high + 0.02)
    save(figure, ROOT / "docs" / "ladder")
    (ROOT / "docs" / "ladder.png").unlink()


if __name__ == "__main__":
    main()
