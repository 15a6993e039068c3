"""Style, colours and saving of figures. The same data gives the same SVG, byte for byte."""

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from weakref import WeakKeyDictionary

import matplotlib
import matplotlib.axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from ecgmatch_dist.config import methods
from ecgmatch_dist.report import display

INK = "#23272e"
RULE = "#c9ced6"
"""On the page these two become the colours of text and rules, so that figures follow light and dark mode."""
COLOURS = ("#3a7bd5", "#e0813a", "#3f9e63", "#c9486a", "#8a66cc", "#9a7648", "#2ba3a8", "#b58f1d", "#7d8794", "#d268b4")
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "ecgmatch",
    "text.parse_math": False,
    "font.size": 9,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "axes.titlesize": 10,
    "axes.titley": 1.03,
    "axes.labelsize": 9,
    "legend.fontsize": 8,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.linewidth": 0.6,
    "grid.color": RULE,
    "lines.linewidth": 1.6,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
}
ACCENTS = {display.CONTROL: COLOURS[3], "supervised": COLOURS[8], "fully_supervised": INK}

LEGEND_WIDTH = 4.6
"""Inches; a legend under all panels begins at the left and is not wider."""
BOXES: WeakKeyDictionary[Figure, list[tuple[float, float, float, float]]] = WeakKeyDictionary()
"""Panels and legend of each figure as (left, top, width, height) in inches: a phone shows them one below the other."""


@contextmanager
def style() -> Iterator[None]:
    with matplotlib.rc_context(STYLE):  # type: ignore[arg-type]
        yield


def colour(i: int) -> str:
    return COLOURS[i % len(COLOURS)]


def method_colour(key: str) -> str:
    others = [name for name in methods() if name not in ACCENTS]
    free = [c for c in COLOURS if c not in ACCENTS.values()]
    return ACCENTS.get(key) or free[(others.index(key) if key in others else len(key)) % len(free)]


def panels(
    n: int,
    columns: int,
    width: float,
    height: float,
    margins: tuple[float, float, float, float] = (0.5, 0.5, 0.15, 0.36),
    below: float = 0,
    polar: bool = False,
) -> tuple[Figure, list[matplotlib.axes.Axes]]:
    """A figure of n equal panels of `width` x `height` inches, at most `columns` in a row.

    In inches: `margins` (left, bottom, right, top) of each panel, and `below` for a legend under all panels. Positions
    are fixed, because an automatic layout would take most of the drawing time.
    """
    columns = min(n, columns)
    rows = -(-n // columns)
    left, bottom, right, top = margins
    all_width, all_height = width * columns, height * rows + below
    figure = Figure(figsize=(all_width, all_height))
    inner = ((width - left - right) / all_width, (height - bottom - top) / all_height)
    axes = []
    boxes = [(column * width, row * height, width, height) for row, column in (divmod(i, columns) for i in range(n))]
    if below:
        boxes.append((0.0, height * rows, min(all_width, max(width, LEGEND_WIDTH)), below))
    BOXES[figure] = boxes
    for i in range(n):
        row, column = divmod(i, columns)
        corner = ((column * width + left) / all_width, (all_height - (row + 1) * height + bottom) / all_height)
        axes.append(figure.add_axes((*corner, *inner), projection="polar" if polar else None))
        if not polar:
            axes[-1].locator_params(nbins=5)  # ticks take most of the drawing time
    return figure, axes


def save(figure: Figure, path: Path) -> str:
    """Write path.svg and path.png; return the SVG for the page."""
    text = io.StringIO()
    with style():  # savefig would draw everything twice
        FigureCanvasSVG(figure).print_svg(text, metadata={"Date": None, "Creator": "ecgmatch report"})  # type: ignore[no-untyped-call]
        figure.set_facecolor("white")
        figure.set_dpi(130)
        FigureCanvasAgg(figure).print_png(path.with_name(f"{path.name}.png"), metadata={"Software": None})  # type: ignore[no-untyped-call]
    path.with_name(f"{path.name}.svg").write_text(on_white(text.getvalue()), encoding="utf-8")
    return inline(text.getvalue(), path.name, BOXES.get(figure, []))


def on_white(svg: str) -> str:
    """The SVG as a file of its own: its ink is dark, and whoever shows it may have a dark background."""
    return re.sub(r"(<svg [^>]*>)", r'\1<rect width="100%" height="100%" fill="white"/>', svg, count=1)


def inline(svg: str, key: str, boxes: Sequence[tuple[float, float, float, float]] = ()) -> str:
    """The SVG for use inside the page: unique ids, no prologue, the page's colours. Where it has several `boxes`, each of them
    once more as a window on the same drawing, which the page stacks where the whole is too wide."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    prefix = re.sub(r"[^a-zA-Z0-9]", "-", key)
    svg = re.sub(r'\bid="([^"]*)"', rf'id="{prefix}-\1"', svg)
    svg = re.sub(r"url\(#([^)]*)\)", rf"url(#{prefix}-\1)", svg)
    svg = re.sub(r'xlink:href="#([^"]*)"', rf'href="#{prefix}-\1"', svg)
    svg = re.sub(r'\b(?:d|x|y|transform)="[^"]*"', lambda found: re.sub(r"(\.\d\d)\d+", r"\1", found.group()), svg)
    svg = re.sub(r'<svg ([^>]*?)width="([\d.]+pt)" height="[\d.]+pt"', r'<svg \1style="width: \2"', svg, count=1)
    svg = svg.replace(INK, "currentColor").replace(RULE, "var(--rule)")
    if len(boxes) < 2:
        return svg
    windows = [
        f'<svg viewBox="{" ".join(f"{72 * x:.2f}" for x in box)}" style="width: {72 * box[2]:.2f}pt">'
        f'<use href="#{prefix}-figure_1"/></svg>'
        for box in boxes
    ]
    return f'<div class="whole">{svg}</div><div class="windows" aria-hidden="true">{"".join(windows)}</div>'
