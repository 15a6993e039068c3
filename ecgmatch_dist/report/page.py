"""The page: one HTML file that needs no other, made from page.html.jinja, page.css and page.js."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from ecgmatch_dist import __version__
from ecgmatch_dist.files.atomic import write_text
from ecgmatch_dist.report import display
from ecgmatch_dist.report.arrange import differences, main_settings
from ecgmatch_dist.report.header import PageHeader
from ecgmatch_dist.report.runs import FinishedRun, Problem
from ecgmatch_dist.report.sections import Section

HERE = Path(__file__).parent


@dataclass(frozen=True)
class DrawnFigure:
    """A figure as SVG text, or why there is none."""

    key: str
    svg: str
    problem: str


def write_page(
    out: Path,
    runs_folder: Path,
    header: PageHeader | None,
    sections: Sequence[Section],
    drawn: dict[str, DrawnFigure],
    runs: Sequence[FinishedRun],
    problems: Sequence[Problem],
) -> Path:
    """Write index.html. `header`: None where there is no run."""
    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["link"] = cache(lambda folder: link(folder, out))
    environment.filters["below_runs"] = lambda folder: Path(os.path.relpath(folder, runs_folder)).as_posix()
    environment.filters["svg"] = lambda key: Markup(drawn[key].svg)
    environment.filters["interval"] = with_interval_below
    environment.filters["breakable"] = breakable
    main = main_settings(runs)
    text = environment.get_template("page.html.jinja").render(
        title=f"Report on {runs_folder.resolve().name or runs_folder}",
        version=__version__,
        style=Markup((HERE / "page.css").read_text(encoding="utf-8")),
        script=Markup((HERE / "page.js").read_text(encoding="utf-8")),
        header=header,
        sections=sections,
        drawn=drawn,
        runs=[(run, ", ".join(f"{k} = {v}" for k, v in differences(run, main).items())) for run in runs],
        problems=problems,
        display=display,
    )
    path = out / "index.html"
    write_text(path, text)
    return path


def with_interval_below(text: str) -> Markup:
    """ "0.616 [0.579, 0.673]" in two lines: six of them side by side fit a narrow screen."""
    number, bracket, rest = text.partition(" [")
    return Markup('{}<span class="interval"> [{}</span>').format(number, rest) if bracket else Markup("{}").format(text)


def breakable(name: str) -> Markup:
    """The name of a run, which a narrow screen may break after a dot: mix@0.05.s20. supervised, never in mid-word."""
    return Markup("<wbr>").join(re.split(r"(?<=[a-z0-9]\.)(?=[a-z])", name))


def link(folder: Path, out: Path) -> str:
    """The path of a run folder, relative to the page."""
    return quote(Path(os.path.relpath(folder.resolve(), out.resolve())).as_posix()) + "/"
