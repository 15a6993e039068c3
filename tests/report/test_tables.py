"""Tables: each value recomputed from the saved predictions, the best bold, the paper beside ours, three formats."""

import csv
import io
import json
import shutil
import subprocess
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

import tests.support.run_factory as factory
from ecgmatch_dist.report import display, formats, paper, tables
from ecgmatch_dist.report.arrange import find_studies
from ecgmatch_dist.report.run_files import SplitSizes, split_sizes
from ecgmatch_dist.report.runs import FinishedRun, find_runs
from ecgmatch_dist.report.studies import Study

CHAPMAN = factory.PAPER_SIZES["chapman"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[FinishedRun]:
    """Two methods, two databases, two seeds (one lacking), and variants of ECGMatch."""
    root = tmp_path_factory.mktemp("runs")
    sizes = {"g12ec": 300, "chapman": CHAPMAN}
    for method in ("fixmatch", "ecgmatch"):
        for seed in (19, 20):
            factory.write_run(root, method, database="chapman", seed=seed, sizes=sizes)
            if (method, seed) != ("fixmatch", 20):
                factory.write_run(root, method, database="g12ec", seed=seed, sizes=sizes)
    variants: dict[str, dict[str, Any]] = {
        "u0": {"method.lambda_u": 0.0},
        "u4": {"method.lambda_u": 0.4},
        "unrefined": {"method.refine": False},
        "pearson": {"method.similarity": "pearson"},
        "k10": {"method.neighbours": 10},
        "sequence": {"augment.pipeline": "sequential"},
        "slow": {"optim.lr": 0.001},
    }
    for tag, change in variants.items():
        factory.write_run(root, database="g12ec", seed=19, sizes=sizes, tag=tag, change=change)
    factory.write_run(root, database="g12ec", ratio=0.1, seed=19, sizes=sizes)
    found, problems = find_runs(root, root / "report")
    assert not problems
    return found


@pytest.fixture(scope="module")
def studies(runs: list[FinishedRun]) -> dict[str, Study]:
    return {study.key: study for study in find_studies(runs)}


@pytest.fixture(scope="module")
def sizes(runs: list[FinishedRun]) -> SplitSizes:
    return split_sizes(runs, [])


@pytest.fixture(scope="module")
def main_table(studies: dict[str, Study], sizes: SplitSizes) -> tables.Table:
    return tables.results_table(studies["main-within-0.05"], sizes)


def cells(table: tables.Table, block: str) -> dict[tuple[str, str], list[tables.Cell]]:
    """{(row, column): [ours, paper, difference]}."""
    found = next(b for b in table.blocks if b.title == block)
    out: dict[tuple[str, str], list[tables.Cell]] = {}
    for row in found.rows:
        column = ""
        for header, cell in zip(found.header[1:], row[1:], strict=True):
            column = column if header in ("paper", "Δ") else header
            out.setdefault((row[0].text, column), []).append(cell)
    return out


@cache
def by_scikit_learn(run: FinishedRun) -> dict[str, Any]:
    with np.load(run.folder / "predictions" / "test.npz") as file:
        return factory.measure(file["labels"], file["probabilities"], np.array(run.thresholds))


@pytest.mark.parametrize("metric", display.METRICS, ids=lambda metric: metric.key)
def test_each_value_is_scikit_learns_of_the_saved_predictions(main_table: tables.Table, metric: display.Metric) -> None:
    for (row, column), (ours, *_) in cells(main_table, metric.title).items():
        if not ours.runs:
            continue
        values = []
        for run in ours.runs:
            assert (display.method(run.method), display.database(run.databases[0])) == (row, column)
            values.append(by_scikit_learn(run)[metric.key])
        assert ours.value == pytest.approx(np.mean(values))
        deviation = f"±{np.std(values, ddof=1):.3f}" if len(values) > 1 else ""
        assert ours.text == f"{np.mean(values):.3f}{deviation}"


def test_the_best_is_bold_in_the_metrics_direction(main_table: tables.Table) -> None:
    for metric in display.METRICS:
        found = cells(main_table, metric.title)
        for column in ("G12EC", "Chapman"):
            values = {key: ours for key, (ours, *_) in found.items() if key[1] == column and ours.value is not None}
            pick = max if metric.greater_is_better else min
            best = pick(values, key=lambda key: round(values[key].value or 0, 3))
            assert values[best].bold
            assert [key for key, cell in values.items() if cell.bold] == [best]


def test_missing_runs_are_shown_as_missing(main_table: tables.Table, studies: dict[str, Study]) -> None:
    found = cells(main_table, "MAP ↑")
    assert found["FixMatch", "G12EC"][0].missing_seeds == (20,)
    assert [run.seed for run in found["FixMatch", "G12EC"][0].runs] == [19]
    assert (found["UPS", "Chapman"][0].text, found["UPS", "Chapman"][0].kind) == ("–", "missing")
    gaps = [(row.key, column.label, seeds) for row, column, seeds in studies["main-within-0.05"].missing()]
    assert gaps == [("fixmatch", "G12EC", (20,))]


def test_the_papers_values_are_shown_only_where_the_setting_is_the_papers(main_table: tables.Table) -> None:
    found = cells(main_table, "MAP ↑")
    ours, paper, difference = found["ECGMatch", "Chapman"]
    assert paper.text == "0.775±0.014"
    assert difference.value == pytest.approx((ours.value or 0) - 0.775)
    assert found["UPS", "Chapman"][1].text == "0.737±0.012"
    assert found["MSDNN", "Chapman"][1].text == "0.744"  # the supplement prints no deviation
    assert len(found["ECGMatch", "G12EC"]) == 1  # 300 recordings are not the paper's database


def test_reasons_for_not_showing_the_papers_values(studies: dict[str, Study], sizes: SplitSizes) -> None:
    study = studies["main-within-0.05"]
    small, whole = study.columns
    assert "300 recordings of G12EC, the paper's 9,906" in paper.mismatch(study, small, sizes)
    assert paper.mismatch(study, whole, sizes) == ""
    assert paper.mismatch(studies["main-within-0.1"], small, {}) == "the paper labels 5 %"
    assert "no such table" in paper.mismatch(studies["neighbours-within-0.05"], small, {})


def test_every_variant_is_in_its_study(studies: dict[str, Study], runs: list[FinishedRun]) -> None:
    rows = {key: [row.label for row in study.rows] for key, study in studies.items()}
    assert rows["main-within-0.05"] == ["FixMatch", "ECGMatch"]
    assert rows["ablation-within-0.05"] == [
        "without pseudo-label generation",
        "without pseudo-label refinement",
        "ECGMatch",
    ]
    assert rows["similarity-within-0.05"] == ["cosine", "pearson"]
    assert rows["neighbours-within-0.05"] == ["ECGMatch, K = 5", "ECGMatch, K = 10"]
    assert rows["augmentation-within-0.05"] == ["ECGMatch, ecgaugment", "ECGMatch, sequential"]
    assert [row.values for row in studies["weights-within-0.05"].rows] == [(0.0, 1.2), (0.4, 1.2), (0.8, 1.2)]
    assert rows["ratio-within"] == ["ECGMatch, 5 %", "ECGMatch, 10 %"]
    assert rows["other-within-0.05"] == ["ECGMatch", "ECGMatch (slow: optim.lr = 0.001)"]
    shown = {run for study in studies.values() for found in study.cells.values() for run in found}
    assert shown == set(runs)


def test_per_class_values_are_the_results(studies: dict[str, Study]) -> None:
    study = studies["main-within-0.05"]
    table = tables.per_class_table(study, study.columns[0])
    for title, key in (("Average precision ↑", "ap"), ("G-beta ↑", "gbeta")):
        for (_, short), (cell,) in cells(table, title).items():
            values = [
                json.loads((run.folder / "result.json").read_text())["test"]["per_class"][short][key]
                for run in cell.runs
            ]
            assert cell.value == pytest.approx(np.mean(values))


def test_an_absent_class_has_no_value(tmp_path: Path) -> None:
    folder = factory.write_run(tmp_path)
    result = json.loads((folder / "result.json").read_text())
    result["test"]["per_class"]["CD"] |= {"ap": None, "gbeta": None}
    (folder / "result.json").write_text(json.dumps(result))
    runs, _ = find_runs(tmp_path, tmp_path / "report")
    study = find_studies(runs)[0]
    assert (
        cells(tables.per_class_table(study, study.columns[0]), "Average precision ↑")["ECGMatch", "CD"][0].text == "–"
    )


def test_equal_after_rounding_is_equally_bold() -> None:
    cells = [tables.Cell("", value=v) for v in (0.70001, 0.69999, 0.6)]
    assert [c.bold for c in tables.mark_best(cells, True)] == [True, True, False]
    assert not tables.mark_best(cells[:1], True)[0].bold


def test_the_upper_bound_is_never_bold(runs: list[FinishedRun]) -> None:
    bound = tables.Cell("", value=0.9, runs=(replace(runs[0], method="fully_supervised"),))
    cells = [bound, *(tables.Cell("", value=v, runs=(runs[0],)) for v in (0.7, 0.6))]
    assert [c.bold for c in tables.mark_best(cells, True)] == [False, True, False]
    assert [c.bold for c in tables.mark_best(cells[:2], True)] == [False, False]


def test_signs() -> None:
    assert [tables.signed(x) for x in (0.0123, -0.0123, 0.0001, -0.0001)] == ["+0.012", "−0.012", "0.000", "0.000"]


def test_the_papers_files_agree_with_each_other() -> None:
    main, ablation, similarity = (paper.table(kind) for kind in ("main", "ablation", "similarity"))
    assert (len(main), len(ablation), len(similarity)) == (450, 216, 162)
    for protocol, database, row, metric in main:
        if row == "ecgmatch":
            same = main[protocol, database, row, metric]
            assert (
                same == ablation[protocol, database, "full", metric] == similarity[protocol, database, "cosine", metric]
            )
    assert main["cross", "ptbxl", "percentmatch", "map"] == paper.Value(0.558, 0.004)
    assert main["mix", "all", "dst", "macro_auc"] == paper.Value(0.836, 0.006)


def test_markdown_and_csv_hold_the_same_numbers(main_table: tables.Table) -> None:
    lines = list(csv.DictReader(io.StringIO(formats.to_csv(main_table))))
    ours = {(x["block"], x["row"], x["column"]): x for x in lines if x["kind"] == "value"}
    paper = {(x["block"], x["row"], x["column"]): x for x in lines if x["kind"] == "paper"}
    value = ours["MAP ↑", "ECGMatch", "Chapman"]
    assert value["text"] == f"{float(value['mean']):.3f}±{float(value['std']):.3f}"
    assert value["runs"].split() == ["within-chapman@0.05.s19.ecgmatch", "within-chapman@0.05.s20.ecgmatch"]
    assert paper["MAP ↑", "UPS", "Chapman"]["mean"] == "0.737"
    text = formats.to_markdown(main_table)
    assert f"**{value['text']}** | 0.775±0.014" in text
    for block in text.split("### ")[1:]:
        widths = {line.count("|") for line in block.splitlines() if line.startswith("|")}
        assert len(widths) == 1


@given(some.text(alphabet=some.characters(codec="utf-8"), max_size=30))
def test_latex_text_has_no_bare_special_sign(text: str) -> None:
    out = formats.escape_latex(text)
    for command in sorted(set(formats.LATEX.values()), key=len, reverse=True):
        out = out.replace(command, "")
    assert not set(out) & set("&%$#_{}\\~^")
    assert all(ord(c) < 0x180 for c in out)


@pytest.mark.skipif(
    shutil.which("pdflatex") is None, reason="pdflatex is not installed (Debian: texlive-latex-recommended)"
)
def test_latex_compiles(main_table: tables.Table, studies: dict[str, Study], sizes: SplitSizes, tmp_path: Path) -> None:
    odd = tables.text_table(
        "odd & _", "100 % of #1 {a} \\b ~^", "<note> λ_u ≥ 0 é 心", [("", ["x", "$y$"], [["a|b", "–"]])]
    )
    shown = [main_table, odd, *(tables.results_table(study, sizes) for study in studies.values())]
    for i, table in enumerate(shown):
        (tmp_path / f"{i}.tex").write_text(formats.to_latex(table), encoding="utf-8")
    (tmp_path / "all.tex").write_text(formats.latex_document(f"{i}.tex" for i in range(len(shown))), encoding="utf-8")
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "-no-shell-escape", "all.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout[-2000:]
    assert (tmp_path / "all.pdf").stat().st_size > 1000


def test_an_interval_that_is_printed_with_zero_is_not_bold() -> None:
    assert not tables.excludes_zero((0.0001, 0.053))  # printed as 0.000
    assert not tables.excludes_zero((-0.053, -0.0004))
    assert tables.excludes_zero((0.0006, 0.053))
    assert tables.excludes_zero((-0.053, -0.001))


def test_label_schemes_have_names(studies: dict[str, Study]) -> None:
    study = replace(studies["main-within-0.05"], scheme="cinc25")
    assert study.title == "Within one database, 5 % labelled, 25 classes of the Challenge 2021"
    assert display.scheme("mine") == "labels mine"


def test_tables_of_many_rows_look_at_the_runs_once(
    studies: dict[str, Study], sizes: SplitSizes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every cell asks which seeds its column has. A look at all rows for each would take the square of their number."""
    study = replace(studies["weights-within-0.05"])  # a copy that remembers nothing
    assert len(study.rows) > 2
    calls = []
    looked = Study.column_runs
    monkeypatch.setattr(Study, "column_runs", lambda *which: calls.append(which) or looked(*which))  # type: ignore[func-returns-value]
    tables.results_table(study, sizes)
    assert len(calls) <= 2 * len(study.columns)


def test_runs_of_the_same_settings_share_them(runs: list[FinishedRun]) -> None:
    """Thousands of runs have a handful of settings."""
    plain = [run for run in runs if run.method == "ecgmatch" and not run.tag]
    assert len(plain) > 2
    assert {id(run.settings) for run in plain} == {id(plain[0].settings)}
    assert len({id(run.settings) for run in runs}) == 9  # ECGMatch, FixMatch and the seven variants
