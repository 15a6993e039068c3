"""The page: one HTML file with everything in it, made from page.html.jinja, page.css and page.js."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from ecgmatch_dist import __version__
from ecgmatch_dist.report import names
from ecgmatch_dist.report.contents import Section
from ecgmatch_dist.report.facts import Facts
from ecgmatch_dist.report.runs import Problem, Run
from ecgmatch_dist.report.studies import differences, main_settings

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Drawn:
    """A figure as SVG text, or why there is none."""

    key: str
    svg: str
    problem: str


def write_page(
    out: Path,
    runs_folder: Path,
    facts: Facts | None,
    chapters: Sequence[Section],
    drawn: dict[str, Drawn],
    runs: Sequence[Run],
    problems: Sequence[Problem],
) -> Path:
    """Write index.html."""
    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["link"] = cache(lambda folder: link(folder, out))
    environment.filters["inside"] = lambda folder: Path(os.path.relpath(folder, runs_folder)).as_posix()
    environment.filters["svg"] = lambda key: Markup(drawn[key].svg)
    main = main_settings(runs)
    text = environment.get_template("page.html.jinja").render(
        title=f"Report on {runs_folder.resolve().name or runs_folder}",
        version=__version__,
        style=Markup((HERE / "page.css").read_text(encoding="utf-8")),
        script=Markup((HERE / "page.js").read_text(encoding="utf-8")),
        facts=facts,
        chapters=chapters,
        drawn=drawn,
        runs=[(run, ", ".join(f"{k} = {v}" for k, v in differences(run, main).items())) for run in runs],
        problems=problems,
        names=names,
    )
    path = out / "index.html"
    path.write_text(text, encoding="utf-8")
    return path


def link(folder: Path, out: Path) -> str:
    """Where a run folder lies, seen from the page."""
    return quote(Path(os.path.relpath(folder.resolve(), out.resolve())).as_posix()) + "/"
