"""Tables of how sure one can be: intervals over test recordings, tests over databases and seeds."""

import numpy as np

from ecgmatch_dist.report import names, published
from ecgmatch_dist.report import statistics as st
from ecgmatch_dist.report.assess import Assessment
from ecgmatch_dist.report.render import plain
from ecgmatch_dist.report.resample import Floats, interval
from ecgmatch_dist.report.runs import Run
from ecgmatch_dist.report.studies import Column, Row, Study
from ecgmatch_dist.report.tables import MISSING, Cell, Lookup, Table, signed

Assessments = dict[str, Assessment]
ENOUGH = 6
"""Pairs from which the signed-rank test can reach 0.05."""


def replicates(runs: tuple[Run, ...], metric: str, assessed: Assessments) -> dict[int, Floats]:
    """Resampled values of each seed's run that has them."""
    found = {run.seed: assessed[str(run.folder)].replicates.get(metric) for run in runs if str(run.folder) in assessed}
    return {seed: values for seed, values in found.items() if values is not None}


def intervals(study: Study, assessed: Assessments, count: int) -> Table:
    """95 % intervals of each method's mean over seeds, and of its paired difference from the control."""
    control = next((row for row in study.rows if row.key == names.CONTROL), None)

    def lines(cells: list[tuple[Column, names.Metric]]) -> list[list[str | Cell]]:
        rows: list[list[str | Cell]] = []
        for row in study.rows:
            rows.append([row.label, *(mean_cell(study, row, column, metric, assessed) for column, metric in cells)])
        for row in study.rows if control else ():
            if control and row != control:
                found = (difference_cell(study, row, control, column, metric, assessed) for column, metric in cells)
                rows.append([f"{control.label} − {row.label}", *found])
        return rows

    if len(study.columns) == 1:
        header = ["Method", *(metric.title for metric in names.METRICS)]
        blocks = [(study.columns[0].label, header, lines([(study.columns[0], metric) for metric in names.METRICS]))]
    else:
        header = ["Method", *(column.label for column in study.columns)]
        blocks = [(m.title, header, lines([(column, m) for column in study.columns])) for m in names.METRICS]
    note = (
        f"In brackets: the central 95 % over {count:,} resamples of the test recordings, of the mean over seeds; the choice of "
        "seeds is not in it. Differences are paired: all methods see the same resamples. Bold: the interval excludes zero."
    )
    return plain(f"intervals-{study.key}", study.title, note, blocks)


def mean_cell(study: Study, row: Row, column: Column, metric: names.Metric, assessed: Assessments) -> Cell:
    runs = study.runs(row, column)
    drawn = replicates(runs, metric.key, assessed)
    values = [run.test[metric.key] for run in runs if run.seed in drawn and run.test[metric.key] is not None]
    if not values:
        return Cell(MISSING, "missing")
    low, high = interval(np.mean(list(drawn.values()), axis=0))
    mean = float(np.mean(values))
    return Cell(
        f"{mean:.3f} [{low:.3f}, {high:.3f}]", "value", mean, runs=tuple(run for run in runs if run.seed in drawn)
    )


def difference_cell(
    study: Study, row: Row, control: Row, column: Column, metric: names.Metric, assessed: Assessments
) -> Cell:
    ours, theirs = (replicates(study.runs(r, column), metric.key, assessed) for r in (control, row))
    seeds = sorted(set(ours) & set(theirs))
    if not seeds:
        return Cell(MISSING, "missing")
    low, high = interval(np.mean([ours[seed] - theirs[seed] for seed in seeds], axis=0))
    found = [
        pair
        for pair in pairs(study, control, row, column, lambda run, key: run.test[key], metric.key)
        if pair[0].seed in seeds
    ]
    if not found:
        return Cell(MISSING, "missing")
    mean = float(np.mean([a.test[metric.key] - b.test[metric.key] for a, b in found]))
    text, runs = f"{signed(mean)} [{signed(low)}, {signed(high)}]", tuple(run for pair in found for run in pair)
    return Cell(text, "value", mean, strong=low > 0 or high < 0, runs=runs, listed=True)


def complete(study: Study, value: Lookup) -> tuple[list[Row], dict[str, st.Array]]:
    """Methods with a result on every database, and their values {metric: [N, k]}."""

    def mean(row: Row, column: Column, metric: str) -> float:
        values = [v for run in study.runs(row, column) if (v := value(run, metric)) is not None]
        return float(np.mean(values)) if values else np.nan

    table = {m.key: np.array([[mean(r, c, m.key) for r in study.rows] for c in study.columns]) for m in names.METRICS}
    whole = np.all([np.isfinite(values).all(axis=0) for values in table.values()], axis=0)
    return [row for row, ok in zip(study.rows, whole, strict=True) if ok], {k: v[:, whole] for k, v in table.items()}


def ranked(study: Study, value: Lookup) -> tuple[list[Row], dict[str, st.Friedman]]:
    """Friedman's test of each metric over the complete methods; empty where there are too few."""
    rows, values = complete(study, value)
    if len(rows) < 3 or len(study.columns) < 2:
        return rows, {}
    return rows, {m.key: st.friedman(values[m.key], m.greater_is_better) for m in names.METRICS}


def friedman_table(study: Study, rows: list[Row], tests: dict[str, st.Friedman]) -> Table:
    """F_F of each metric with its critical value, and the paper's for protocols that it has."""
    k, n, runs = len(rows), len(study.columns), runs_of(study, rows)
    has_paper = study.protocol in ("within", "cross")
    header = [
        "Metric",
        "F_F",
        "tie-corrected",
        "critical value",
        "p",
        *(["paper prints", "from its tables"] if has_paper else []),
    ]
    lines: list[list[str | Cell]] = []
    for metric in names.METRICS:
        test = tests[metric.key]
        line: list[str | Cell] = [metric.label, derived(f"{test.f:.4f}", test.f, runs, test.rejected)]
        line += [derived(f"{x:.4f}", x, runs) for x in (test.f_tied, test.critical)]
        line.append(derived(probability(test.p), test.p, runs))
        if has_paper:
            theirs = st.friedman(published.comparison(study.protocol, metric.key), metric.greater_is_better)
            line += [Cell(f"{x:.4f}", "paper", x) for x in (published.printed_f(study.protocol, metric.key), theirs.f)]
        lines.append(line)
    left = [row.label for row in study.rows if row not in rows]
    note = (
        f"k = {k} methods, N = {n} databases. Bold: the methods differ (F_F above the critical value of "
        f"F({k - 1}, {(k - 1) * (n - 1)}) at 0.05). Critical difference of mean ranks: {st.bonferroni_dunn(k, n):.4f} from the "
        f"control (Bonferroni-Dunn), {st.nemenyi(k, n):.4f} between any two (Nemenyi)."
    )
    note += f" Not in it, for want of a result on every database: {', '.join(left)}." if left else ""
    if has_paper:
        note += " For the paper's k = 8, N = 4 the critical value is F(7, 21) = 2.4876; it prints 3.2590, which is F(4, 12)."
    return plain(f"friedman-{study.key}", study.title, note, [("Friedman test", header, lines)])


def ranks_table(study: Study, rows: list[Row], tests: dict[str, st.Friedman]) -> Table:
    """Mean rank of each method; bold where it is beyond the control's critical difference."""
    k, n, runs = len(rows), len(study.columns), runs_of(study, rows)
    control = next((i for i, row in enumerate(rows) if row.key == names.CONTROL), None)
    critical = st.bonferroni_dunn(k, n)
    lines: list[list[str | Cell]] = []
    for i, row in enumerate(rows):
        line: list[str | Cell] = [row.label]
        for metric in names.METRICS:
            rank = tests[metric.key].ranks
            beyond = control is not None and bool(rank[i] - rank[control] >= critical)
            line.append(derived(f"{rank[i]:.2f}", float(rank[i]), runs, beyond))
        lines.append(line)
    note = "1 is the best." + (
        f" Bold: worse than {names.method(names.CONTROL)} by the critical difference or more."
        if control is not None
        else ""
    )
    return plain(
        f"ranks-{study.key}", study.title, note, [("Mean rank", ["Method", *(m.label for m in names.METRICS)], lines)]
    )


def nemenyi_table(study: Study, rows: list[Row], tests: dict[str, st.Friedman]) -> Table:
    """p-values of all pairs, one block a metric."""
    blocks, runs = [], runs_of(study, rows)
    for metric in names.METRICS:
        p = st.nemenyi_p(tests[metric.key].ranks, len(study.columns))
        lines: list[list[str | Cell]] = []
        for i, row in enumerate(rows):
            cells = [
                Cell("") if i == j else derived(probability(x), float(x), runs, bool(x < st.ALPHA))
                for j, x in enumerate(p[i])
            ]
            lines.append([row.label, *cells])
        blocks.append((metric.label, ["Method", *(row.label for row in rows)], lines))
    note = "Nemenyi's test of all pairs of methods; bold: p < 0.05."
    return plain(f"nemenyi-{study.key}", study.title, note, blocks)


def wilcoxon_table(study: Study, value: Lookup) -> Table | None:
    """The control against each method over all pairs of equal database and seed, Holm-adjusted over the methods.

    None below six pairs, which cannot reach 0.05."""
    control = next((row for row in study.rows if row.key == names.CONTROL), None)
    others = [row for row in study.rows if row != control]
    if control is None or not others:
        return None
    lines: list[list[str | Cell]] = [[row.label] for row in others]
    sizes = []
    for metric in names.METRICS:
        matched = [
            [p for c in study.columns for p in pairs(study, control, row, c, value, metric.key)] for row in others
        ]
        sizes += [len(found) for found in matched]
        enough = {i: found for i, found in enumerate(matched) if len(found) >= ENOUGH}
        raw = [
            st.wilcoxon(*np.array([[value(run, metric.key) for run in pair] for pair in found], float).T)
            for found in enough.values()
        ]
        adjusted = dict(zip(enough, st.holm(raw), strict=True))
        # Holm's adjustment looks at all methods: so each p comes from the runs of all.
        used = tuple({run.folder: run for found in enough.values() for pair in found for run in pair}.values())
        for i, line in enumerate(lines):
            p = adjusted.get(i)
            line.append(Cell(MISSING, "missing") if p is None else derived(probability(p), p, used, p < st.ALPHA))
    if max(sizes) < ENOUGH:
        return None
    note = (
        f"{control.label} against each method: Wilcoxon's signed-rank test over pairs of the same database and seed "
        f"({min(sizes)} to {max(sizes)} pairs), "
        "Holm-adjusted p. Bold: p < 0.05. Seeds of one database are not independent."
    )
    return plain(
        f"wilcoxon-{study.key}",
        study.title,
        note,
        [("Adjusted p", ["Method", *(m.label for m in names.METRICS)], lines)],
    )


def pairs(study: Study, control: Row, other: Row, column: Column, value: Lookup, metric: str) -> list[tuple[Run, Run]]:
    """Runs of both methods with the same seed, where both have a value."""
    first, second = (
        {run.seed: run for run in study.runs(row, column) if value(run, metric) is not None} for row in (control, other)
    )
    return [(first[seed], second[seed]) for seed in sorted(first.keys() & second.keys())]


def runs_of(study: Study, rows: list[Row]) -> tuple[Run, ...]:
    return tuple(run for row in rows for column in study.columns for run in study.runs(row, column))


def derived(text: str, value: float, runs: tuple[Run, ...], strong: bool = False) -> Cell:
    """A number that is made from all of `runs` together."""
    return Cell(text, "value", value, strong=strong, runs=runs, listed=True)


def probability(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"{p:.3f}"
