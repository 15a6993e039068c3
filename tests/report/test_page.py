"""The whole report: the page needs no other file, all links work, nothing is lost, and the same runs give the same files."""

import html
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pytest
import tyro

import tests.support.run_factory as factory
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.report import build_report, drawing, figures, main
from ecgmatch_dist.report.arrange import find_studies
from ecgmatch_dist.report.build import Workers, read_bench
from ecgmatch_dist.report.page import breakable
from ecgmatch_dist.report.runs import find_runs
from ecgmatch_dist.report.sections import study_part
from tests.support.browser import CHROMIUM, Browser

VOID = {"meta", "link", "br", "wbr", "img", "input", "hr"}


class Page(HTMLParser):
    """Checks that tags close in order, and collects what the page refers to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.ids: list[str] = []
        self.feed(text)
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name in ("href", "src", "xlink:href"):
                self.links.append(value or "")
            if name == "id":
                self.ids.append(value or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of the smallest comparison: a supervised run and ECGMatch on one split, and folders with problems."""
    root = tmp_path_factory.mktemp("demo & <co>")
    for method in ("supervised", "ecgmatch"):
        factory.write_run(root / "runs", method, sizes=600)
    shutil.copytree(root / "runs" / "within-chapman@0.05.s20.ecgmatch", root / "runs" / "<script>alert(1)</script>")
    (root / "runs" / "<script>alert(1)<" / "script>" / "result.json").write_text("{")
    (root / "runs" / "notes").mkdir()
    return build_report(root / "runs", root / "report", replicates=50)


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of three methods on two databases, with a study of K and of the augmentation."""
    root = tmp_path_factory.mktemp("sweep")
    for method in ("fixmatch", "ups", "ecgmatch"):
        for database in ("g12ec", "chapman"):
            factory.write_run(root / "runs", method, database=database, sizes=300)
        factory.write_run(root / "runs", method, sizes=300, tag="seq", change={"augment.pipeline": "sequential"})
    factory.write_run(root / "runs", sizes=300, tag="k2", change={"method.neighbours": 2})
    bench = root / "bench.json"
    bench.write_text(
        json.dumps({"bytes": [{"ranks": w, "rows": 66_000, "way": "sharded", "counted": 1000 * w} for w in (1, 2, 4)]})
    )
    return build_report(root / "runs", root / "report", bench, replicates=50, workers=1)


def test_the_page_is_well_formed_and_all_its_links_lead_somewhere(demo: Path, sweep: Path) -> None:
    for page in (demo, sweep):
        found = Page(page.read_text(encoding="utf-8"))
        assert len(found.ids) == len(set(found.ids))
        for link in found.links:
            if link.startswith("#"):
                assert link[1:] in found.ids, link
            elif link != "data:," and not link.startswith("data:image/png;base64,"):
                assert (page.parent / unquote(link)).exists(), link


class Numbers(HTMLParser):
    """Collects the links of each number in a table (of its cell, else of its row's name) and of each list of runs."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.numbers: list[tuple[str, list[str]]] = []
        self.lists: dict[str, list[str]] = {}
        self.cell, self.list = "", ""
        self.of_row: list[str] = []
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        if tag == "tr":
            self.of_row = []
        elif tag in ("td", "th"):
            self.cell, self.links = "", []
        elif tag == "a":
            self.links.append(found["href"])
            self.lists.setdefault(self.list, []).append(found["href"])
        elif "id" in found:
            self.list = found["id"]

    def handle_data(self, data: str) -> None:
        self.cell += data

    def handle_endtag(self, tag: str) -> None:
        if tag == "th":
            self.of_row = self.links
        elif tag == "p":
            self.list = ""
        elif tag == "td" and re.match(r"[<+−\s]*[\d.]+", self.cell):
            self.numbers.append((self.cell.strip(), self.links or self.of_row))
        if tag in ("td", "th"):
            self.links = []


def test_every_number_of_every_table_leads_to_its_runs(demo: Path, sweep: Path, tmp_path: Path) -> None:
    """Directly, or through the list of runs under its table. The paper's numbers link to the note that names the paper."""
    for seed in (19, 20):
        factory.write_run(tmp_path / "runs", seed=seed, sizes=9717)
    whole = build_report(tmp_path / "runs", tmp_path / "report", replicates=10)
    assert "#paper" in Page(whole.read_text(encoding="utf-8")).links
    for page, least in ((demo, 60), (sweep, 300), (whole, 60)):
        found = Numbers(page.read_text(encoding="utf-8"))
        assert len(found.numbers) > least
        for number, links in found.numbers:
            assert links, number
            for link in links:
                ends = found.lists[link[1:]] if link.startswith("#") and link != "#paper" else [link]
                for end in ends:
                    assert end == "#paper" or (page.parent / unquote(end) / "result.json").exists(), (number, link, end)


def test_the_page_loads_nothing(demo: Path, sweep: Path) -> None:
    for page in (demo, sweep):
        text = page.read_text(encoding="utf-8")
        addresses = re.findall(r"(?:\w+:)?//\w[^\s\"'<)]*", re.sub(r"base64,[^\"]*", "", text))
        assert set(addresses) <= {"http://www.w3.org/1999/xlink", "http://www.w3.org/2000/svg"}
        assert "Content-Security-Policy\" content=\"default-src 'none'" in text
        assert not re.search(r"<(?:iframe|object|embed|img|script[^>]*\ssrc)", text)


def test_hostile_names_are_escaped(demo: Path) -> None:
    text = demo.read_text(encoding="utf-8")
    assert "<script>alert" not in text
    assert text.count("<script>") == 1
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text


def test_both_runs_and_all_problems_are_on_the_demos_page(demo: Path) -> None:
    text = html.unescape(demo.read_text(encoding="utf-8"))
    runs = demo.parent.parent / "runs"
    for method in ("supervised", "ecgmatch"):
        result = json.loads((runs / f"within-chapman@0.05.s20.{method}" / "result.json").read_text())
        assert f's20.{method}/">{result["test"]["map"]:.3f}</a>' in text
    assert "ECGMatch reaches a test MAP of" in text
    assert "95 % interval over test recordings" in text
    for words in (
        "not a run folder",
        "result.json: not JSON",
        "Pseudo-labels against hidden labels",
        "Validation MAP",
    ):
        assert words in text
    assert "600 recordings of Chapman, the paper's 9,717" in text
    assert "0.775" not in text.split('id="results"')[1].split("</section>")[0]  # so its numbers are not there


def test_every_section_and_figure_is_there(sweep: Path) -> None:
    text = sweep.read_text(encoding="utf-8")
    for key in ("about", "results", "uncertainty", "studies", "classes", "details", "calibration", "cost", "runs"):
        assert f'id="{key}"' in text, key
    names = {path.name.split("-")[0] for path in (sweep.parent / "figures").glob("*.svg")}
    kinds = {
        "ranks",
        "radar",
        "curve",
        "training",
        "pseudo",
        "curves",
        "confusion",
        "correlation",
        "features",
        "reliability",
        "decision",
    }
    assert names == kinds | {"cost.svg"}
    for figure in (sweep.parent / "figures").glob("*.svg"):
        assert figure.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
        assert 'fill="white"' in figure.read_text(encoding="utf-8")  # dark ink: unreadable on a dark page without it
    for table in (sweep.parent / "tables").glob("*.csv"):
        assert table.with_suffix(".md").exists()
        assert table.with_suffix(".tex").exists()


def test_the_same_runs_give_the_same_files(demo: Path) -> None:
    again = build_report(demo.parent.parent / "runs", demo.parent.parent / "again", replicates=50)
    files = [
        {p.relative_to(d): p.read_bytes() for p in d.rglob("*") if p.is_file()} for d in (demo.parent, again.parent)
    ]
    assert sorted(files[0]) == sorted(files[1])
    assert not [name for name, content in files[0].items() if files[1][name] != content]


def test_an_old_report_is_cleared_away_and_nothing_else(tmp_path: Path) -> None:
    out = tmp_path / "report"
    (out / "tables").mkdir(parents=True)
    for name in ("tables/old.csv", "tables/mine.csv", "notes.txt"):
        (out / name).write_text("x")
    (tmp_path / "precious.txt").write_text("x")
    own = "notes.txt\n.\n..\ntables\ntables/..\n\xff\n"  # as of `ls > files.txt`
    (out / "files.txt").write_text(f"tables/old.csv\n../precious.txt\n/etc/none\n{own}", encoding="latin-1")
    factory.write_run(tmp_path / "runs", sizes=300)
    build_report(tmp_path / "runs", out, replicates=10)
    assert not (out / "tables/old.csv").exists()
    assert (out / "tables/mine.csv").exists()
    assert (out / "notes.txt").exists()
    assert (tmp_path / "precious.txt").exists()


def test_a_wrong_folder_replaces_no_report(tmp_path: Path) -> None:
    """Neither a folder without runs nor one without a finished run; the second gets a page where none is there yet."""
    (tmp_path / "data" / "shards").mkdir(parents=True)
    unfinished = factory.write_run(tmp_path / "begun", sizes=300)
    (unfinished / "result.json").unlink()
    page = build_report(tmp_path / "begun", tmp_path / "first")
    assert "No finished run could be read" in page.read_text(encoding="utf-8")
    report = tmp_path / "report"
    factory.write_run(tmp_path / "runs", sizes=300)
    build_report(tmp_path / "runs", report, replicates=10)
    before = {path: path.read_bytes() for path in report.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match="data: no run folder in it"):
        build_report(tmp_path / "data", report)
    with pytest.raises(UserError, match=r"begun: no finished run in it, and .*report holds a report"):
        build_report(tmp_path / "begun", report)
    assert before == {path: path.read_bytes() for path in report.rglob("*") if path.is_file()}


def test_a_damaged_file_loses_its_figures_not_the_report(tmp_path: Path) -> None:
    folder = factory.write_run(tmp_path / "runs", sizes=300)
    (folder / "predictions" / "test.npz").write_bytes(b"PK\x03\x04 half a file")
    np.savez(folder / "correlation.npz", R_b=np.eye(2), R_u=np.eye(2))
    (folder / "split.json").write_text("{}")
    text = build_report(tmp_path / "runs", tmp_path / "report").read_text(encoding="utf-8")
    assert "test.npz: damaged" in text
    assert "matrices of shape (2, 2)" in text
    assert "split.json: the key `" in text
    assert "Validation MAP" in text


def test_workers_keep_the_order_and_pass_errors_on() -> None:
    for number in (1, 2):
        with Workers(number) as pool:
            assert pool.map(divmod, [(7, 2), (9, 4), (8, 8)], "numbers") == [(3, 1), (2, 1), (1, 0)]
            with pytest.raises(ZeroDivisionError):
                pool.map(divmod, [(1, 1), (1, 0)], "numbers")


def test_mistakes_of_the_user_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    (tmp_path / "bench.json").write_text('{"bytes": [{"ranks": "many"}]}')
    for runs, out, words in (
        ("nowhere", "out", "no such folder"),
        ("empty", "out", "no run folder"),
        ("empty", "file", "is a file"),
    ):
        with pytest.raises(UserError, match=words):
            build_report(tmp_path / runs, tmp_path / out)
    with pytest.raises(UserError, match="not a file of `ecgmatch bench scale"):
        read_bench(tmp_path / "bench.json")
    assert not (tmp_path / "out").exists()


def test_the_command_takes_the_folder_and_out(demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = tmp_path / "runs"
    factory.write_run(runs, sizes=300)
    tyro.cli(main, args=[str(runs), "--out", str(tmp_path / "page")])
    assert capsys.readouterr().out.strip() == f"report: {tmp_path / 'page' / 'index.html'}"


def test_augmentation_draws_the_methods_that_were_asked_for(sweep: Path, tmp_path: Path) -> None:
    """Three methods are the corners of radars. Two are bars, not the supervised runs that they started from."""
    runs, _ = find_runs(sweep.parent.parent / "runs", sweep.parent)
    study = next(study for study in find_studies(runs) if study.kind == "augmentation")
    for method in ("supervised", "fixmatch", "ecgmatch"):
        factory.write_run(tmp_path, method, sizes=300)
        factory.write_run(tmp_path, method, sizes=300, tag="seq", change={"augment.pipeline": "sequential"})
    of_two = next(s for s in find_studies(find_runs(tmp_path, tmp_path / "report")[0]) if s.kind == "augmentation")
    with drawing.style():
        for shown, names in ((study, ["FixMatch", "UPS", "ECGMatch"]), (of_two, ["FixMatch", "ECGMatch"])):
            figure = figures.augmentation(shown)
            assert figure is not None
            assert [text.get_text() for text in figure.axes[0].get_xticklabels()] == names
            assert [text.get_text() for text in figure.legends[0].get_texts()] == ["ecgaugment", "sequential"]
        bars = [bar.get_height() for bar in figure.axes[0].patches]
    rows = {row.key: row for row in of_two.rows}
    order = [f"{method}/{p}" for p in ("ecgaugment", "sequential") for method in ("fixmatch", "ecgmatch")]
    assert bars == [pytest.approx(of_two.runs(rows[key], of_two.columns[0])[0].test.map) for key in order]
    (task,) = study_part(of_two, {}).figures
    assert task.caption.startswith("FixMatch, ECGMatch; mean of Chapman.")


def test_sensitivity_shows_the_mean_over_databases(tmp_path: Path) -> None:
    """Over those settings that all databases have; a database alone is a thin line."""
    for database in ("g12ec", "chapman"):
        for seed in (19, 20):
            for u in (0.4, 0.8, 1.2):
                change = {"method.lambda_u": u}
                tag = "" if u == 0.8 else f"u{u}"
                factory.write_run(tmp_path, database=database, seed=seed, sizes=300, tag=tag, change=change)
    factory.write_run(tmp_path, database="chapman", seed=19, sizes=300, tag="u0", change={"method.lambda_u": 0.0})
    study = next(s for s in find_studies(find_runs(tmp_path, tmp_path / "report")[0]) if s.kind == "weights")
    ((_, label, points),) = figures.settings_axes(study)
    assert label == "ECGMatch: λ_u (λ_f = 1.2)"
    found = figures.curve(study, points, study.columns, "map")
    assert found[:, 0].tolist() == [0.4, 0.8, 1.2]
    by_seed = [
        np.mean([run.test.map for c in study.columns for run in study.runs(points[0.4], c) if run.seed == seed])
        for seed in (19, 20)
    ]
    assert found[0, 1:] == pytest.approx([np.mean(by_seed), np.std(by_seed, ddof=1)])
    with drawing.style():
        figure = figures.sensitivity(study, points, label)
    thin = [line for line in figure.axes[0].lines if line.get_linewidth() < 1 and len(line.get_xdata()) > 1]  # type: ignore[arg-type]
    assert sorted(len(line.get_xdata()) for line in thin) == [3, 4]  # type: ignore[arg-type]
    assert figure.legends[0].get_texts()[0].get_text() == "mean of 2 databases"


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed (Debian: chromium)")
def test_in_a_browser(demo: Path, sweep: Path, tmp_path: Path) -> None:
    """On a phone and a desktop, light and dark: no console errors, no requests, nothing wider than the screen, tables sort,
    and a number of several runs links to their list."""
    sort = """(() => {
      const table = document.querySelector("#results table"), head = table.querySelectorAll("thead button")[1];
      const column = () => [...table.tBodies[0].rows].map((row) => Number(row.cells[1].dataset.value));
      head.click(); const up = column(); head.click(); return [up, column()];
    })()"""
    with Browser(tmp_path / "profile") as browser:
        for page, width, dark in ((demo, 400, False), (demo, 1400, True), (sweep, 400, True), (sweep, 1400, False)):
            browser.show(page, width, dark)
            assert browser.evaluate("innerWidth") == width
            assert browser.evaluate("matchMedia('(prefers-color-scheme: dark)').matches") == dark
            browser.evaluate("document.querySelectorAll('details').forEach((part) => (part.open = true))")
            assert browser.evaluate("document.documentElement.scrollWidth") <= width
            scrolling = (
                "[...document.querySelectorAll('figure .scroll')].filter((e) => e.scrollWidth > e.clientWidth + 1)"
            )
            assert browser.evaluate(f"{scrolling}.length") == 0  # a phone shows the panels of a figure one by one
        up, down = browser.evaluate(sort)
        assert up == sorted(up)
        assert down == up[::-1]
        browser.show(sweep, 400)
        browser.evaluate("document.querySelector('#uncertainty a[href*=\"-from-\"]').click()")
        browser.evaluate("new Promise((done) => setTimeout(done, 300))")
        assert browser.evaluate("document.querySelector(':target').closest('details').open")
        assert browser.complaints == []
        assert {url for url in browser.requests if not url.startswith("data:")} == {demo.as_uri(), sweep.as_uri()}


def test_a_narrow_screen_breaks_the_name_of_a_run_at_its_dots() -> None:
    assert breakable("mix@0.05.s20.ecgmatch.k3") == "mix@0.05.<wbr>s20.<wbr>ecgmatch.<wbr>k3"
    assert breakable("a.<b>") == "a.&lt;b&gt;"
