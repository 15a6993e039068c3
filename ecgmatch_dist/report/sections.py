"""The sections of the page: which tables and figures they hold. Figures are described here and drawn later, in parallel."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ecgmatch_dist.report import display, figures, figures_run, significance
from ecgmatch_dist.report.assess import Assessments
from ecgmatch_dist.report.chain import chain_figure, chain_table, find_links, find_otherwise, otherwise_table
from ecgmatch_dist.report.outlook import find_outlooks, outlook_figure, outlook_table
from ecgmatch_dist.report.run_files import SplitSizes
from ecgmatch_dist.report.runs import FinishedRun
from ecgmatch_dist.report.studies import STUDIES, Column, Study
from ecgmatch_dist.report.tables import Table, calibration_table, per_class_table, results_table
from ecgmatch_dist.report.unlabelled import comparison_figure, comparison_table, find_comparisons

RESULTS_INTRO = (
    "Mean ± standard deviation over seeds, on the test part. The small numbers are the seeds, and link to their run folders. "
    "Bold: the best of our runs. “paper”: what the paper prints for this setting; Δ: ours minus the paper's. –: no run."
)
CLAIMS_INTRO = (
    "What these runs say about each claim of the paper. They may have other data, sizes and settings than the paper's: see "
    "“Settings that differ from the paper” above. A run of synthetic recordings says nothing about patients."
)
STUDIES_INTRO = (
    "Test results of other settings. Do not choose a setting here: it would be chosen on the test part. Choose on validation "
    "data (ecgmatch choose)."
)
DETAILS_INTRO = (
    "One run per test set, of the seed that most methods have: ECGMatch's where there is one, else the run with the highest "
    "test MAP."
)
CURVE_CAPTION = (
    "The mean over databases as in the paper, and its standard deviation over seeds; thin: each database. A setting without "
    "runs on every database has no mean."
)
CALIBRATION_INTRO = (
    "Calibration error: the mean gap between probability and observed frequency in 15 bins. Brier score: the mean squared "
    "error. Both are means over classes. Net benefit: what acting at a threshold probability is worth, in true positives, "
    "minus the cost of false positives."
)


CHAIN_INTRO = (
    "A chain of runs: without labels, supervised, semi-supervised. Each begins with the weights of the one before it. A start "
    "that was not trained to its end flatters the link behind it."
)
CHAIN_CAPTION = "Thin: one labelled set each. Thick: their mean. Axes do not start at zero."
UNLABELLED_CAPTION = "Thin: one labelled set each. Thick: their mean. Dotted: the mean of their starts."
OUTLOOK_CAPTION = "Dots: runs. Lines: the fitted curves, with 90 % bands. Dotted: the most labels that were tried."


@dataclass(frozen=True)
class FigureTask:
    """A figure to be drawn by `function(*arguments)`, which returns None where there is nothing to show."""

    key: str
    title: str
    caption: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]


@dataclass
class Part:
    """Tables and figures under one heading. `folded`: hidden until opened."""

    title: str
    tables: list[Table] = field(default_factory=list)
    figures: list[FigureTask] = field(default_factory=list)
    folded: bool = False


@dataclass
class Section:
    """A section of the page; `key` is its anchor."""

    key: str
    title: str
    intro: str
    parts: list[Part]


def make_sections(
    studies: list[Study],
    split_sizes: SplitSizes,
    assessed: Assessments,
    replicates: int,
    bench: dict[str, list[tuple[int, float]]],
    also: Sequence[str] = (),
    with_trees: Sequence[FinishedRun] = (),
) -> list[Section]:
    """All sections that have content. `also`: methods to rank beside the paper's. `with_trees`: what runs answer with the trees
    that they have asked."""
    main = [study for study in studies if study.kind == "main"]
    test_sets = [(study, column) for study in main for column in study.columns]
    results = [Part("", [results_table(study, split_sizes)]) for study in main]
    uncertainty = [part for study in main if (part := uncertainty_part(study, split_sizes, assessed, replicates, also))]
    settings = [study_part(study, split_sizes) for study in studies if study.kind != "main"]
    by_class = [Part(t.title, [t], folded=True) for t in (per_class_table(*test_set) for test_set in test_sets)]
    cost = FigureTask("cost", "Bytes per rank and step", "", figures.cost, (bench,))
    sections = [
        Section("results", "Results", RESULTS_INTRO, results),
        Section("uncertainty", "How sure is it?", "", uncertainty),
        Section("chain", "What each link adds", CHAIN_INTRO, chain_parts(studies, split_sizes, assessed, with_trees)),
        Section("studies", "What matters", STUDIES_INTRO, settings),
        Section("classes", "By class", "", by_class),
        Section("details", "A closer look", DETAILS_INTRO, [details_part(*test_set) for test_set in test_sets]),
        Section("calibration", "Calibration and use", CALIBRATION_INTRO, calibration_parts(main, assessed)),
        Section("cost", "Cost", "", [Part("", figures=[cost])] if bench else []),
    ]
    return [section for section in sections if section.parts]


def chain_parts(
    studies: list[Study], split_sizes: SplitSizes, assessed: Assessments, with_trees: Sequence[FinishedRun]
) -> list[Part]:
    """What each link of a chain adds, and what more recordings do, with or without labels."""
    runs = {run.folder: run for study in studies for column in study.columns for run in study.column_runs(column)}
    links, outlooks = find_links(runs.values(), with_trees), find_outlooks(studies, split_sizes)
    parts = []
    if links:
        drawn = FigureTask("chain", "From start to end", CHAIN_CAPTION, chain_figure, (links,))
        parts.append(Part("", [chain_table(links, assessed)], [drawn]))
    if otherwise := find_otherwise(runs.values()):
        parts.append(Part("", [otherwise_table(otherwise, assessed)]))
    if any(outlook.fit for outlook in outlooks):
        curve = FigureTask("outlook", "Learning curves", OUTLOOK_CAPTION, outlook_figure, (outlooks,))
        parts.append(Part("What would more labels buy?", [outlook_table(outlooks)], [curve]))
    if comparisons := find_comparisons(studies, list(runs.values()), split_sizes):
        drawn = FigureTask("unlabelled", "", UNLABELLED_CAPTION, comparison_figure, (comparisons,))
        parts.append(Part("What do more unlabelled recordings bring?", [comparison_table(comparisons)], [drawn]))
    return parts


def uncertainty_part(
    study: Study, split_sizes: SplitSizes, assessed: Assessments, replicates: int, also: Sequence[str]
) -> Part | None:
    """Intervals over recordings, tests over databases and seeds."""
    part = Part(study.title)
    if any(found.replicates for found in assessed.values()):
        part.tables.append(significance.intervals_table(study, assessed, replicates))
    ranking = significance.rank_methods(study, also)
    if ranking.tests:
        part.tables += [
            significance.friedman_table(study, ranking, split_sizes),
            significance.ranks_table(study, ranking),
        ]
        caption = (
            "The band starts at the control and is one critical difference wide (Bonferroni-Dunn): beyond it is worse."
        )
        arguments = (ranking.rows, ranking.tests, len(study.columns))
        part.figures.append(
            FigureTask(f"ranks-{study.key}", "Mean ranks", caption, figures.critical_difference, arguments)
        )
    if wilcoxon := significance.wilcoxon_table(study):
        part.tables.append(wilcoxon)
    if ranking.tests:
        part.tables.append(significance.nemenyi_table(study, ranking))
    return part if part.tables else None


def study_part(study: Study, split_sizes: SplitSizes) -> Part:
    """The table and the figures of a study of settings."""
    part = Part(f"{STUDIES[study.kind]}. {study.title}", [results_table(study, split_sizes)])
    if study.kind == "augmentation":
        names, _ = figures.augmentation_methods(study)
        where = ", ".join(column.label for column in study.columns)
        caption = (
            f"{', '.join(map(display.method, names))}; mean of {where}. Larger is better in the first three panels, smaller in "
            "the last three. Axes do not start at zero."
        )
        part.figures.append(
            FigureTask(f"radar-{study.key}", "Augmentation pipelines", caption, figures.augmentation, (study,))
        )
    for name, label, rows in figures.settings_axes(study):
        key, caption = display.slug(f"curve-{study.key}-{name}"), CURVE_CAPTION
        part.figures.append(FigureTask(key, label, caption, figures.sensitivity, (study, rows, label)))
    return part


def shown_run(study: Study, column: Column) -> tuple[FinishedRun, list[FinishedRun]]:
    """The run that is shown in detail, and all methods' runs of its seed."""
    all_runs = study.column_runs(column)
    by_seed = [[run for run in all_runs if run.seed == seed] for seed in study.seeds(column)]
    runs = max(by_seed, key=len)
    control = next((run for run in runs if run.method == display.CONTROL), None)
    return control or max(runs, key=lambda run: run.test.map), runs


def shown_run_title(study: Study, column: Column, run: FinishedRun) -> str:
    return f"{study.title}: {column.label} ({display.method(run.method)}, seed {run.seed})"


def details_part(study: Study, column: Column) -> Part:
    run, runs = shown_run(study, column)
    where = display.slug(f"{study.key}-{column.slug}")
    hidden = (
        "MAP of the pseudo-labels, and of the network's own predictions for the same recordings, against labels that training "
        "never sees."
    )
    together = (
        "How alike two classes are: in the labels (R_b), in the predictions of unlabelled recordings (R_u), and the "
        "difference, which ECGMatch's third loss makes small."
    )
    shares = (
        "Rows: recordings with this class. Numbers: the share of them that is predicted to have the column's class."
    )
    of_bank = (
        "Recordings of the bank, or of the test part where the method has no bank. In colour: those with the class."
    )
    tasks = [
        FigureTask(f"training-{where}", "Training", "", figures_run.training, (runs, run)),
        FigureTask(f"pseudo-{where}", "Pseudo-label quality", hidden, figures_run.pseudo_labels, (runs, run)),
        FigureTask(f"curves-{where}", "ROC and precision-recall", "Test part.", figures_run.roc_pr, (run,)),
        FigureTask(f"confusion-{where}", "Confusion of classes", shares, figures_run.confusion, (run,)),
        FigureTask(f"correlation-{where}", "Label correlation", together, figures_run.correlation, (run,)),
        FigureTask(f"features-{where}", "Features on their principal axes", of_bank, figures_run.feature_map, (run,)),
    ]
    return Part(shown_run_title(study, column, run), figures=tasks, folded=True)


def calibration_parts(main: list[Study], assessed: Assessments) -> list[Part]:
    def value(run: FinishedRun, metric: str) -> float | None:
        found = assessed.get(str(run.folder))
        return found.calibration.get(metric) if found else None

    parts = []
    for study in main:
        parts.append(Part(study.title, [calibration_table(study, value)]))
        for column in study.columns:
            run, _ = shown_run(study, column)
            where = display.slug(f"{study.key}-{column.slug}")
            bars = "Bars: the number of recordings in each bin."
            worth = "Above both black lines, to act on the model's answer is worth more than to act on all, or on none."
            tasks = [
                FigureTask(f"reliability-{where}", "Reliability", bars, figures_run.reliability_diagram, (run,)),
                FigureTask(f"decision-{where}", "Decision curves", worth, figures_run.decision_curves, (run,)),
            ]
            parts.append(Part(shown_run_title(study, column, run), figures=tasks, folded=True))
    return parts
