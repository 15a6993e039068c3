"""What the report holds: sections of tables and of figures yet to be drawn."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ecgmatch_dist.report import evidence, figures, figures_run, names, published
from ecgmatch_dist.report.evidence import Assessments
from ecgmatch_dist.report.facts import Sizes, sizes_of
from ecgmatch_dist.report.runs import Run
from ecgmatch_dist.report.studies import STUDIES, Column, Study
from ecgmatch_dist.report.tables import Table, per_class, results


@dataclass(frozen=True)
class Job:
    """A figure to be drawn: `function(*arguments)` gives it, or None where there is nothing to show."""

    key: str
    title: str
    caption: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]


@dataclass
class Part:
    """Tables and figures under one heading. `folded`: shown when it is opened."""

    title: str
    tables: list[Table] = field(default_factory=list)
    figures: list[Job] = field(default_factory=list)
    folded: bool = False


@dataclass
class Section:
    """A chapter of the page."""

    key: str
    title: str
    intro: str
    parts: list[Part]


def test_value(run: Run, metric: str) -> float | None:
    found = run.test[metric]
    return None if found is None else float(found)


def sections(
    studies: list[Study],
    sizes: Sizes,
    assessed: Assessments,
    replicates: int,
    bench: dict[str, list[tuple[int, float]]],
) -> list[Section]:
    main = [study for study in studies if study.kind == "main"]
    chapters = [
        Section("results", "Results", RESULTS, [Part("", [result_table(study, sizes)]) for study in main]),
        Section(
            "evidence", "How sure is it?", "", [part for study in main if (part := sure(study, assessed, replicates))]
        ),
        Section(
            "studies", "What matters", STUDIED, [changed(study, sizes) for study in studies if study.kind != "main"]
        ),
        Section(
            "classes",
            "By class",
            "",
            [Part(t.title, [t], folded=True) for s in main for c in s.columns for t in [per_class(s, c)]],
        ),
        Section("closer", "A closer look", CLOSER, [look(study, column) for study in main for column in study.columns]),
        Section("calibration", "Calibration and use", CALIBRATION, calibrated(main, assessed)),
        Section(
            "cost",
            "Cost",
            "",
            [Part("", figures=[Job("cost", "Bytes a rank receives in a step", "", figures.cost, (bench,))])]
            if bench
            else [],
        ),
    ]
    return [chapter for chapter in chapters if chapter.parts]


RESULTS = (
    "Mean ± standard deviation over seeds, on the test part; the small numbers are the seeds, and lead to their run folders. "
    "Bold: the best of our runs. “paper”: what the paper prints for this setting; Δ: ours minus the paper's. – : no run."
)
STUDIED = (
    "What the test part says of other settings. To decide which to use, look at validation data (ecgmatch choose), not here: "
    "a setting that is chosen on the test part has seen it."
)
CLOSER = (
    "One run of each test set: ECGMatch's where there is one, else that of the highest test MAP; of the seed that most "
    "methods have."
)
CALIBRATION = (
    "Calibration error: the mean gap between probability and observed frequency in 15 bins; Brier score: the mean squared "
    "error; both are means over classes. Net benefit: what acting at a threshold probability is worth, in true positives, "
    "after the price of false ones."
)


def result_table(study: Study, sizes: Sizes) -> Table:
    return results(
        study, names.METRICS, test_value, lambda c: not published.mismatch(study, c, sizes_of(study, c, sizes))
    )


def sure(study: Study, assessed: Assessments, replicates: int) -> Part | None:
    """Intervals over recordings, tests over databases and seeds."""
    part = Part(study.title)
    if any(found.replicates for found in assessed.values()):
        part.tables.append(evidence.intervals(study, assessed, replicates))
    rows, tests = evidence.ranked(study, test_value)
    if tests:
        part.tables += [evidence.friedman_table(study, rows, tests), evidence.ranks_table(study, rows, tests)]
        caption = (
            "The band starts at the control and is one critical difference wide (Bonferroni-Dunn): beyond it is worse."
        )
        n = len(study.columns)
        part.figures.append(
            Job(f"ranks-{study.key}", "Mean ranks", caption, figures.critical_difference, (rows, tests, n))
        )
    if wilcoxon := evidence.wilcoxon_table(study, test_value):
        part.tables.append(wilcoxon)
    if tests:
        part.tables.append(evidence.nemenyi_table(study, rows, tests))
    return part if part.tables else None


def changed(study: Study, sizes: Sizes) -> Part:
    """A study of one setting: its table, and its figure."""
    part = Part(f"{STUDIES[study.kind]}. {study.title}", [result_table(study, sizes)])
    if study.kind == "augmentation":
        caption = "Larger is better in the first three panels, smaller in the last three. Axes do not start at zero."
        part.figures.append(
            Job(f"radar-{study.key}", "Augmentation pipelines", caption, figures.radar, (study, test_value))
        )
    for name, label, rows in figures.settings_axes(study):
        arguments = (study, rows, label, test_value)
        part.figures.append(
            Job(
                names.slug(f"curve-{study.key}-{name}"),
                label,
                "Bars: standard deviation over seeds.",
                figures.sensitivity,
                arguments,
            )
        )
    return part


def representative(study: Study, column: Column) -> tuple[Run, list[Run]]:
    """The run that is shown in detail, and all methods' runs of its seed."""
    by_seed = {
        seed: [run for row in study.rows for run in study.runs(row, column) if run.seed == seed]
        for seed in study.seeds(column)
    }
    runs = max(by_seed.values(), key=len)
    control = next((run for run in runs if run.method == names.CONTROL), None)
    return control or max(runs, key=lambda run: run.test["map"] or 0), runs


def look(study: Study, column: Column) -> Part:
    chosen, runs = representative(study, column)
    where = names.slug(f"{study.key}-{column.slug}")
    part = Part(f"{study.title}: {column.label} ({names.method(chosen.method)}, seed {chosen.seed})", folded=True)
    hidden = "Measured for the eye alone: training does not see the hidden labels."
    true = "Each row: recordings with this class; each number: the share of them that is predicted to have the column's class."
    part.figures = [
        Job(f"training-{where}", "Training", "", figures_run.training, (runs, chosen)),
        Job(f"pseudo-{where}", "Pseudo-label quality", hidden, figures_run.pseudo, (runs, chosen)),
        Job(f"curves-{where}", "ROC and precision-recall", "Test part.", figures_run.roc_pr, (chosen,)),
        Job(f"confusion-{where}", "Confusion of classes", true, figures_run.confusion, (chosen,)),
        Job(f"correlation-{where}", "Label correlation", "", figures_run.correlation, (chosen,)),
        Job(
            f"features-{where}",
            "Features on their principal axes",
            "Of the bank's recordings, or of the test part where the method has no bank; in colour: those with the class.",
            figures_run.feature_map,
            (chosen,),
        ),
    ]
    return part


def calibrated(main: list[Study], assessed: Assessments) -> list[Part]:
    def value(run: Run, metric: str) -> float | None:
        found = assessed.get(str(run.folder))
        return found.calibration.get(metric) if found else None

    parts = []
    for study in main:
        part = Part(study.title, [results(study, names.CALIBRATION, value, lambda column: False, kind="calibration")])
        parts.append(part)
        for column in study.columns:
            chosen, _ = representative(study, column)
            where = names.slug(f"{study.key}-{column.slug}")
            more = Part(
                f"{study.title}: {column.label} ({names.method(chosen.method)}, seed {chosen.seed})", folded=True
            )
            size = "Bars: how many recordings have such a probability."
            more.figures = [
                Job(f"reliability-{where}", "Reliability", size, figures_run.reliability_diagram, (chosen,)),
                Job(f"decision-{where}", "Decision curves", "", figures_run.decision_curves, (chosen,)),
            ]
            parts.append(more)
    return parts
