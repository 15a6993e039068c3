"""From the paper's printed tables, through the report's own path: its statistics, and its numbers only where they belong."""

from pathlib import Path

import pytest

from ecgmatch_dist.errors import UserError
from ecgmatch_dist.report import build_report, paper
from ecgmatch_dist.report.arrange import find_studies
from ecgmatch_dist.report.formats import to_markdown
from ecgmatch_dist.report.header import make_header
from ecgmatch_dist.report.run_files import split_sizes
from ecgmatch_dist.report.runs import find_runs
from ecgmatch_dist.report.sections import make_sections
from ecgmatch_dist.report.tables import Table
from tests.support.paper_runs import write_paper_runs

BOUNDS = ("supervised", "fully_supervised")
WITHOUT_TIES = {
    ("within", "Ranking loss"): "5.4706",
    ("within", "Coverage"): "5.1290",
    ("cross", "Hamming loss"): "5.0640",
    ("cross", "Coverage"): "22.8462",
}
"""Where rounding to three decimals left no ties, the printed F_F follows to the last digit."""


def tables(runs: Path, also: tuple[str, ...] = ()) -> dict[str, Table]:
    """All tables of a report on these runs: its own path, without the drawing."""
    found, problems = find_runs(runs, runs / "report")
    sections = make_sections(find_studies(found), split_sizes(found, problems), {}, 100, {}, also)
    return {table.key: table for section in sections for part in section.parts for table in part.tables}


def texts(table: Table) -> dict[tuple[str, str], str]:
    """(row, column) -> text."""
    (block,) = table.blocks
    return {(row[0].text, name): cell.text for row in block.rows for name, cell in zip(block.header, row, strict=True)}


@pytest.mark.parametrize(("protocol", "ratio"), [("within", 0.05), ("cross", 0.01)])
def test_the_printed_tables_give_the_papers_statistics(protocol: str, ratio: float, tmp_path: Path) -> None:
    """Also with a supervised start and an upper bound beside the eight methods, which the paper does not rank."""
    write_paper_runs(tmp_path, protocol, (*paper.METHODS, *BOUNDS))
    table = tables(tmp_path / "runs")[f"friedman-main-{protocol}-{ratio}"]
    cells, note = texts(table), table.note
    assert {text for (_, column), text in cells.items() if column == "critical value"} == {"2.4876"}
    assert "k = 8 methods, N = 4 databases" in note
    assert "4.6594 from the control (Bonferroni-Dunn)" in note
    assert "not among the paper's methods (ecgmatch report --rank): Supervised, Fully supervised" in note
    for (of_protocol, metric), f in WITHOUT_TIES.items():
        if of_protocol == protocol:
            assert cells[metric, "F_F"] == cells[metric, "paper prints"] == f


def test_bounds_are_ranked_only_on_request_and_then_it_is_said(tmp_path: Path) -> None:
    write_paper_runs(tmp_path, "within", (*paper.METHODS, *BOUNDS))
    table = tables(tmp_path / "runs", ("supervised",))["friedman-main-within-0.05"]
    note = table.note
    assert texts(table)["MAP", "critical value"] == "2.3551"  # F(8, 24)
    assert "k = 9" in note
    assert "Ranked on request, not among the paper's methods: Supervised" in note
    assert "3.2590" not in note  # these are not the paper's eight any more
    with pytest.raises(UserError, match="--rank majority: known methods are"):
        build_report(tmp_path / "runs", tmp_path / "report", also_rank=("majority",))


@pytest.mark.parametrize(
    ("methods", "leave_out"),
    [(("fixmatch", "ups", "ecgmatch"), ("g12ec", "ningbo")), (paper.METHODS, ("g12ec",)), (paper.METHODS[1:], ())],
    ids=["3 methods on 2 databases", "three databases", "seven methods"],
)
def test_the_papers_f_stands_only_beside_the_same_comparison(
    methods: tuple[str, ...], leave_out: tuple[str, ...], tmp_path: Path
) -> None:
    write_paper_runs(tmp_path, "within", methods, leave_out)
    text = to_markdown(tables(tmp_path / "runs")["friedman-main-within-0.05"])
    assert "paper prints" not in text
    assert "17.16" not in text
    assert "3.2590" not in text


def test_the_upper_bound_does_not_compete_in_the_headline(tmp_path: Path) -> None:
    """The paper's ECGMatch beats every rival on every database; a run with all labels is no rival."""
    write_paper_runs(tmp_path, "within", (*paper.METHODS, "fully_supervised"))
    for path in (tmp_path / "runs").glob("*.fully_supervised/result.json"):
        path.write_text(path.read_text().replace('"map": 0.', '"map": 0.9'))
    runs, problems = find_runs(tmp_path / "runs", tmp_path / "report")
    header = make_header(runs, find_studies(runs), split_sizes(runs, problems), {})
    ((sentence, _),) = header.headlines
    assert "ECGMatch has the highest test MAP on 4 of 4 databases. Seed 20." in sentence
    assert "No method is called better here: one seed" in sentence


def test_a_probe_of_a_start_without_labels_is_ranked_nowhere(tmp_path: Path) -> None:
    """Even if its features were the best of all: not in the headline, not in bold, not in any test, not on request."""
    write_paper_runs(tmp_path, "within", (*paper.METHODS, "contrastive"))
    for path in (tmp_path / "runs").glob("*.contrastive/result.json"):
        path.write_text(path.read_text().replace('"map": 0.', '"map": 0.9'))
    runs, problems = find_runs(tmp_path / "runs", tmp_path / "report")
    header = make_header(runs, find_studies(runs), split_sizes(runs, problems), {})
    ((sentence, _),) = header.headlines
    assert "ECGMatch has the highest test MAP on 4 of 4 databases." in sentence
    found = tables(tmp_path / "runs", ("contrastive",))
    (row,) = [row for row in found["main-within-0.05"].blocks[0].rows if row[0].text == "Contrastive, linear probe"]
    assert {cell.value > 0.9 for cell in row[1:] if cell.kind == "value" and cell.value is not None} == {True}
    assert not any(cell.bold for cell in row)
    statistics = [table for key, table in found.items() if key.startswith(("friedman-", "ranks-", "nemenyi-"))]
    assert len(statistics) == 3
    assert all("Contrastive" not in to_markdown(table) for table in statistics)
    with pytest.raises(UserError, match=r"--rank contrastive: .* not a rival"):
        build_report(tmp_path / "runs", tmp_path / "report", also_rank=("contrastive",))
