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
Values = tuple[float, ...]
"""Test MAP on the rungs."""


def read_tables(text: str) -> dict[str, tuple[list[Values], Values]]:
    """Rows `| Chapman, 19 | .7186 | .7139 | ...`, one per labelled set, and `| **Chapman, mean** | **.709 / .875** | ...`."""
    found = {}
    for name in DATABASES:
        rows = re.findall(rf"^\| (?:\*\*)?{name}, (\d+|mean)(?:\*\*)? \| (.+) \|$", text, re.MULTILINE)
        values = {which: on_rungs(row) for which, row in rows}
        mean = values.pop("mean")
        found[name] = list(values.values()), mean
    return found


def on_rungs(row: str) -> Values:
    """Of cells `.7186` or `**.709 / .875**`."""
    cells = row.split(" | ")
    return tuple(float(cells[column].strip("*").split(" / ")[0]) for column in RUNGS.values())


def draw(axes: Axes, name: str, sets: list[Values], mean: Values) -> None:
    """One line per labelled set, and their mean."""
    places = range(len(RUNGS))
    for values in sets:
        axes.plot(places, values, color=COLOURS[0], alpha=0.45, linewidth=1, marker="o", markersize=2.5)
    axes.plot(places, mean, color=INK, linewidth=2, marker="o", markersize=4)
    for place, value in zip(places, mean, strict=True):
        ground = {"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 0.5}
        axes.annotate(f"{value:.3f}", (place, value), (0, 8), textcoords="offset points", ha="center", bbox=ground)
    axes.set_title(name)
    axes.set_xticks(list(places), RUNGS)
    axes.set_xlim(-0.4, len(RUNGS) - 0.6)
    axes.set_ylabel("test MAP")


def main() -> None:
    tables = read_tables((ROOT / "docs/experiments.md").read_text(encoding="utf-8"))
    with style():
        figure, all_axes = panels(len(tables), columns=2, width=4.1, height=2.7, margins=(0.55, 0.62, 0.1, 0.36))
        for axes, (name, (sets, mean)) in zip(all_axes, tables.items(), strict=True):
            draw(axes, name, sets, mean)
        low, high = (pick(value for sets, _ in tables.values() for row in sets for value in row) for pick in (min, max))
        for axes in all_axes:
            axes.set_ylim(low - 0.01, high + 0.02)
    save(figure, ROOT / "docs" / "ladder")
    (ROOT / "docs" / "ladder.png").unlink()


if __name__ == "__main__":
    main()
