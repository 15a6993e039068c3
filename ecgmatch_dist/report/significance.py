"""Tables of uncertainty: bootstrap intervals over test recordings, significance tests over databases and seeds."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ecgmatch_dist.report import display, paper
from ecgmatch_dist.report import statistics as st
from ecgmatch_dist.report.assess import Assessments, difference_interval, replicates_by_seed
from ecgmatch_dist.report.resample import interval
from ecgmatch_dist.report.run_files import SplitSizes
from ecgmatch_dist.report.runs import FinishedRun
from ecgmatch_dist.report.studies import Column, Row, Study
from ecgmatch_dist.report.tables import MISSING, Cell, Table, excludes_zero, signed, text_table

MIN_PAIRS = 6
"""With fewer pairs the signed-rank test cannot reach 0.05."""
Lines = list[list[str | Cell]]


def intervals_table(study: Study, assessed: Assessments, replicates: int) -> Table:
    """95 % intervals of each method's mean over seeds, and of its paired difference from the control."""
    control = study.control

    def lines(cells: list[tuple[Column, display.Metric]]) -> Lines:
        rows: Lines = []
        for row in study.rows:
            rows.append([row.label, *(mean_cell(study, row, column, metric, assessed) for column, metric in cells)])
        for row in study.rows if control else ():
            if control and row != control:
                found = (difference_cell(study, row, control, column, metric, assessed) for column, metric in cells)
                rows.append([f"{control.label} − {row.label}", *found])
        return rows

    if len(study.columns) == 1:
        header = ["Method", *(metric.title for metric in display.METRICS)]
        blocks = [(study.columns[0].label, header, lines([(study.columns[0], metric) for metric in display.METRICS]))]
    else:
        header = ["Method", *(column.label for column in study.columns)]
        blocks = [(m.title, header, lines([(column, m) for column in study.columns])) for m in display.METRICS]
    note = (
        f"In brackets: the central 95 % of the mean over seeds, over {replicates:,} resamples of the test recordings; the "
        "spread over seeds is not included. Differences are paired: all methods use the same resamples. Bold: the interval "
        "excludes zero."
    )
    return text_table(f"intervals-{study.key}", study.title, note, blocks)


def mean_cell(study: Study, row: Row, column: Column, metric: display.Metric, assessed: Assessments) -> Cell:
    replicates = replicates_by_seed(study.runs(row, column), metric.key, assessed)
    runs = tuple(run for run in study.runs(row, column) if run.seed in replicates)
    if not runs:
        return Cell(MISSING, "missing")
    low, high = interval(np.mean(list(replicates.values()), axis=0))
    mean = float(np.mean([run.test.get(metric.key) for run in runs]))
    return Cell(f"{mean:.3f} [{low:.3f}, {high:.3f}]", "value", mean, runs=runs)


def difference_cell(
    study: Study, row: Row, control: Row, column: Column, metric: display.Metric, assessed: Assessments
) -> Cell:
    ours, theirs = (replicates_by_seed(study.runs(r, column), metric.key, assessed) for r in (control, row))
    bounds = difference_interval(ours, theirs)
    if bounds is None:
        return Cell(MISSING, "missing")
    low, high = bounds
    pairs = [
        pair for pair in same_seed_pairs(study, control, row, column) if pair[0].seed in ours.keys() & theirs.keys()
    ]
    mean = float(np.mean([a.test.get(metric.key) - b.test.get(metric.key) for a, b in pairs]))
    text, runs = f"{signed(mean)} [{signed(low)}, {signed(high)}]", tuple(run for pair in pairs for run in pair)
    return Cell(text, "value", mean, bold=excludes_zero(bounds), runs=runs, runs_below=True)


@dataclass(frozen=True)
class Ranking:
    """The methods of a study that are ranked against each other, and Friedman's test of each metric over them."""

    rows: tuple[Row, ...]
    tests: dict[str, st.Friedman]
    """By metric; empty for fewer than three methods or two databases."""
    on_request: tuple[Row, ...]
    """Ranked although the paper does not have them."""
    incomplete: tuple[Row, ...]
    """Not ranked: without a result on every database."""
    not_asked_for: tuple[Row, ...]
    """Not ranked: not among the paper's methods."""

    @property
    def is_the_papers(self) -> bool:
        """Exactly the paper's methods: its critical value and its F_F belong to this number of them."""
        return {row.key for row in self.rows} == set(paper.METHODS)


def rank_methods(study: Study, also: Sequence[str] = ()) -> Ranking:
    """Rank the paper's eight methods, and those of `also`, by their results on all databases.

    Each further method changes the ranks of all, the critical value and the critical difference. So the bounds (a supervised
    start, a run with all labels) take part only where somebody asks for them; a probe never does."""
    known = tuple(row for row in study.rows if not display.is_probe(row.key))
    wanted = tuple(row for row in known if row.key in paper.METHODS or row.key in also)
    rows = tuple(row for row in wanted if all(study.runs(row, column) for column in study.columns))

    def mean(row: Row, column: Column, metric: str) -> float:
        return float(np.mean([run.test.get(metric) for run in study.runs(row, column)]))

    def values(metric: str) -> st.Array:
        return np.array([[mean(row, column, metric) for row in rows] for column in study.columns])

    enough = len(rows) >= 3 and len(study.columns) >= 2
    return Ranking(
        rows=rows,
        tests={m.key: st.friedman(values(m.key), m.greater_is_better) for m in display.METRICS} if enough else {},
        on_request=tuple(row for row in rows if row.key not in paper.METHODS),
        incomplete=tuple(row for row in wanted if row not in rows),
        not_asked_for=tuple(row for row in known if row not in wanted),
    )


def friedman_table(study: Study, ranking: Ranking, split_sizes: SplitSizes) -> Table:
    """F_F of each metric with its critical value; beside it the paper's, where all that decides it is the paper's."""
    k, n, runs = len(ranking.rows), len(study.columns), runs_of(study, ranking.rows)
    has_paper = paper_ranks_the_same(study, ranking, split_sizes)
    header = ["Metric", "F_F", "tie-corrected", "critical value", "p"]
    header += ["paper prints", "from its tables"] if has_paper else []
    lines: Lines = []
    for metric in display.METRICS:
        test = ranking.tests[metric.key]
        line: list[str | Cell] = [metric.label, joint_cell(f"{test.f:.4f}", test.f, runs, test.rejected)]
        line += [joint_cell(f"{x:.4f}", x, runs) for x in (test.f_tied, test.critical)]
        line.append(joint_cell(format_p(test.p), test.p, runs))
        if has_paper:
            theirs = st.friedman(paper.comparison(study.protocol, metric.key), metric.greater_is_better)
            line += [Cell(f"{x:.4f}", "paper", x) for x in (paper.printed_f(study.protocol, metric.key), theirs.f)]
        lines.append(line)
    note = (
        f"k = {k} methods, N = {n} databases. Bold: the methods differ (F_F above the critical value of "
        f"F({k - 1}, {(k - 1) * (n - 1)}) at 0.05). Critical difference of mean ranks: {st.bonferroni_dunn(k, n):.4f} from the "
        f"control (Bonferroni-Dunn), {st.nemenyi(k, n):.4f} between any two (Nemenyi)."
    )
    for words, rows in (
        ("Ranked on request, not among the paper's methods", ranking.on_request),
        ("Left out, without a result on every database", ranking.incomplete),
        ("Left out, not among the paper's methods (ecgmatch report --rank)", ranking.not_asked_for),
    ):
        note += f" {words}: {', '.join(row.label for row in rows)}." if rows else ""
    if has_paper:
        note += " For the paper's k = 8, N = 4 the critical value is F(7, 21) = 2.4876; it prints 3.2590, which is F(4, 12)."
    return text_table(f"friedman-{study.key}", study.title, note, [("Friedman test", header, lines)])


def paper_ranks_the_same(study: Study, ranking: Ranking, split_sizes: SplitSizes) -> bool:
    """The paper's protocol, ratio, label scheme, methods and databases: only then its F_F means the same as ours."""
    return (
        study.protocol in ("within", "cross")
        and ranking.is_the_papers
        and len(study.columns) == len(display.DATABASES)
        and not any(paper.mismatch(study, column, split_sizes) for column in study.columns)
    )


def ranks_table(study: Study, ranking: Ranking) -> Table:
    """Mean rank of each method; bold where it is worse than the control by the critical difference or more."""
    rows, tests = ranking.rows, ranking.tests
    k, n, runs = len(rows), len(study.columns), runs_of(study, rows)
    control = next((i for i, row in enumerate(rows) if row.key == display.CONTROL), None)
    critical = st.bonferroni_dunn(k, n)
    lines: Lines = []
    for i, row in enumerate(rows):
        line: list[str | Cell] = [row.label]
        for metric in display.METRICS:
            rank = tests[metric.key].ranks
            worse = control is not None and bool(rank[i] - rank[control] >= critical)
            line.append(joint_cell(f"{rank[i]:.2f}", float(rank[i]), runs, worse))
        lines.append(line)
    note = "1 is the best."
    if control is not None:
        note += f" Bold: worse than {display.method(display.CONTROL)} by the critical difference or more."
    header = ["Method", *(m.label for m in display.METRICS)]
    return text_table(f"ranks-{study.key}", study.title, note, [("Mean rank", header, lines)])


def nemenyi_table(study: Study, ranking: Ranking) -> Table:
    """p-values of all pairs of methods, one block per metric."""
    rows, tests = ranking.rows, ranking.tests
    blocks, runs = [], runs_of(study, rows)
    for metric in display.METRICS:
        p = st.nemenyi_p(tests[metric.key].ranks, len(study.columns))
        lines: Lines = []
        for i, row in enumerate(rows):
            cells = [
                Cell("") if i == j else joint_cell(format_p(x), float(x), runs, bool(x < st.ALPHA))
                for j, x in enumerate(p[i])
            ]
            lines.append([row.label, *cells])
        blocks.append((metric.label, ["Method", *(row.label for row in rows)], lines))
    note = "Nemenyi's test of all pairs of methods; bold: p < 0.05."
    return text_table(f"nemenyi-{study.key}", study.title, note, blocks)


def wilcoxon_table(study: Study) -> Table | None:
    """The control against each method, over pairs of equal database and seed, Holm-adjusted over the methods.

    None where no method has enough pairs."""
    control = study.control
    if control is None:
        return None
    pairs = {
        row: [pair for column in study.columns for pair in same_seed_pairs(study, control, row, column)]
        for row in study.rows
        if row != control and display.competes(row.key)
    }
    enough = {row: found for row, found in pairs.items() if len(found) >= MIN_PAIRS}
    if not enough:
        return None
    # Holm's adjustment uses the p-values of all methods, so each adjusted p comes from the runs of all.
    used = tuple({run.folder: run for found in enough.values() for pair in found for run in pair}.values())
    lines: Lines = [[row.label] for row in pairs]
    for metric in display.METRICS:
        p = [
            st.wilcoxon(*np.array([[run.test.get(metric.key) for run in pair] for pair in found]).T)
            for found in enough.values()
        ]
        cells = {
            row: joint_cell(format_p(adjusted), adjusted, used, adjusted < st.ALPHA)
            for row, adjusted in zip(enough, st.holm(p), strict=True)
        }
        for row, line in zip(pairs, lines, strict=True):
            line.append(cells.get(row, Cell(MISSING, "missing")))
    sizes = [len(found) for found in pairs.values()]
    note = (
        f"{control.label} against each method: Wilcoxon's signed-rank test over pairs of the same database and seed "
        f"({min(sizes)} to {max(sizes)} pairs), "
        "Holm-adjusted p. Bold: p < 0.05. Seeds of one database are not independent."
    )
    header = ["Method", *(m.label for m in display.METRICS)]
    return text_table(f"wilcoxon-{study.key}", study.title, note, [("Adjusted p", header, lines)])


def same_seed_pairs(study: Study, control: Row, other: Row, column: Column) -> list[tuple[FinishedRun, FinishedRun]]:
    first, second = ({run.seed: run for run in study.runs(row, column)} for row in (control, other))
    return [(first[seed], second[seed]) for seed in sorted(first.keys() & second.keys())]


def runs_of(study: Study, rows: Sequence[Row]) -> tuple[FinishedRun, ...]:
    return tuple(run for row in rows for column in study.columns for run in study.runs(row, column))


def joint_cell(text: str, value: float, runs: tuple[FinishedRun, ...], bold: bool = False) -> Cell:
    """A number computed from all of `runs` together."""
    return Cell(text, "value", value, bold=bold, runs=runs, runs_below=True)


def format_p(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"{p:.3f}"
