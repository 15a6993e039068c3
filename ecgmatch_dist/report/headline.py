"""The page's first sentences: how ECGMatch compares in test MAP, after which training, and whether that settles anything."""

from collections.abc import Iterable, Sequence

import numpy as np

from ecgmatch_dist.errors import UserError
from ecgmatch_dist.report import display
from ecgmatch_dist.report.arrange import as_numbers
from ecgmatch_dist.report.assess import Assessments, committee_difference, difference_interval, replicates_by_seed
from ecgmatch_dist.report.runs import FinishedRun
from ecgmatch_dist.report.studies import Column, Row, Study
from ecgmatch_dist.report.tables import excludes_zero, signed

ByName = dict[str, FinishedRun]
"""All runs of the report by name: a run knows the names of those that it started from."""


def headline(study: Study, assessed: Assessments, runs: ByName) -> str:
    """Empty without a control or without other methods that compete."""
    control = study.control
    rivals = [row for row in study.rows if row != control and display.competes(row.key)]
    if control is None or not rivals:
        return ""
    if len(study.columns) == 1:
        return of_one_column(study, control, rivals, study.columns[0], assessed, runs)
    best = compared = 0
    unfair: dict[str, None] = {}
    behind: list[FinishedRun] = []
    for column in study.columns:
        means = mean_maps(study, [control, *rivals], column)
        if control in means and len(means) > 1:
            compared += 1
            best += means[control] == max(means.values())
            rival = max(means.keys() - {control}, key=lambda row: (means[row], row.key))
            unfair |= dict.fromkeys(reasons_to_withhold(study, column, control, rival, runs))
            behind += study.runs(rival, column)
    if not compared:
        return ""
    everything = [run for row in (control, *rivals) for column in study.columns for run in study.runs(row, column)]
    text = f"{study.title}: {control.label} has the highest test MAP on {best} of {compared} databases. "
    text += f"{seeds_text(everything)}. "
    text += "; ".join(f"{name}: {training(of, runs)}" for name, of in by_method(study, control, rivals)) + ". "
    improving = sum(still_improving(run) for run in everything)
    text += f"{improving} of {len(everything)} runs were still improving at their end."
    if unfair:
        return f"{text} No method is called better here: {', '.join(unfair)}."
    return text + start_sentence(behind, [run for column in study.columns for run in study.runs(control, column)])


def by_method(study: Study, control: Row, rivals: Sequence[Row]) -> list[tuple[str, list[FinishedRun]]]:
    """The runs of the control, and those of all others."""

    def of(rows: Sequence[Row]) -> list[FinishedRun]:
        return [run for row in rows for column in study.columns for run in study.runs(row, column)]

    return [(control.label, of([control])), (rivals[0].label if len(rivals) == 1 else "others", of(rivals))]


def of_one_column(
    study: Study, control: Row, rivals: Sequence[Row], column: Column, assessed: Assessments, runs: ByName
) -> str:
    """The control against the best rival. Both have runs: it is the study's only column."""
    means = mean_maps(study, [control, *rivals], column)
    ours = means.pop(control)
    rival = max(means, key=lambda row: means[row])
    text = f"{study.title} ({column.label}): {control.label} reaches a test MAP of {ours:.3f}, {rival.label} "
    text += f"{means[rival]:.3f}: {signed(ours - means[rival])}"
    replicates = (replicates_by_seed(study.runs(row, column), "map", assessed) for row in (control, rival))
    if bounds := difference_interval(*replicates):
        text += f", 95 % interval over test recordings {signed(bounds[0])} to {signed(bounds[1])}"
    of = {row: study.runs(row, column) for row in (control, rival)}
    text += f". {seeds_text([run for found in of.values() for run in found])}. "
    text += "; ".join(f"{row.label}: {training(found, runs)}" for row, found in of.items()) + ". "
    improving = [row.label for row, found in of.items() if any(map(still_improving, found))]
    text += (
        f"{' and '.join(improving) or 'Neither'} {'were' if len(improving) > 1 else 'was'} still improving at the end."
    )
    if unfair := reasons_to_withhold(study, column, control, rival, runs):
        return f"{text} Which is better cannot be said: {', '.join(unfair)}."
    if bounds is None:
        return text
    if not excludes_zero(bounds):
        return f"{text} The interval includes zero: these recordings show no difference."
    if bounds[1] < 0:
        return f"{text} On these recordings {rival.label} is better."
    return f"{text} On these recordings {control.label} is better.{start_sentence(of[rival], of[control])}"


def reasons_to_withhold(study: Study, column: Column, control: Row, rival: Row, runs: ByName) -> list[str]:
    """Why the difference between two methods does not say which is better: too few seeds, or the worse one was cut short.

    The start of a chain has fewer steps than the whole by its nature. It counts as cut short unless it had settled."""
    ours, theirs = study.runs(control, column), study.runs(rival, column)
    common = {run.seed for run in ours} & {run.seed for run in theirs}
    out = []
    if {run.seed for run in ours} != {run.seed for run in theirs}:
        out.append("their seeds differ")
    if len(common) < 2:
        out.append("one seed" if common else "no common seed")
    behind, ahead, label = (
        (theirs, ours, rival.label) if mean_map(ours) >= mean_map(theirs) else (ours, theirs, control.label)
    )
    if any(map(still_improving, behind)):
        out.append(f"{label} was still improving")
    budget = min(total_steps(run, runs) for run in ahead)
    settled = are_starts_of(behind, ahead) and all(map(had_settled, behind))
    if not settled and any(run.stopped == "steps" and total_steps(run, runs) < budget for run in behind):
        out.append(f"{label} had fewer steps")
    return out


def still_improving(run: FinishedRun) -> bool:
    """Its last validation was its best, and it ended only because its steps were used up."""
    every = as_numbers(run.settings.get("evaluate.every", 1)) or (1,)
    return run.stopped == "steps" and run.steps - run.best_step < every[0]


def had_settled(run: FinishedRun) -> bool:
    """Nothing improved its validation in the last quarter of its steps, or in as long as its patience."""
    return run.stopped != "steps" or 4 * (run.steps - run.best_step) >= run.steps


def are_starts_of(starts: Sequence[FinishedRun], chain: Sequence[FinishedRun]) -> bool:
    """Whether each run of `chain` began with the weights of one of `starts`, and none of these is left over."""
    return {run.started_from for run in chain} == {run.name for run in starts}


def start_sentence(behind: Sequence[FinishedRun], ahead: Sequence[FinishedRun]) -> str:
    """Beside a comparison of a chain with its own start: why it may be made, and what it does not show."""
    if not are_starts_of(behind, ahead):
        return ""
    name = display.method(behind[0].method)
    best, steps = (span([getattr(run, field) for run in behind]) for field in ("best_step", "steps"))
    return (
        f" It began with the weights of {name}, which was no longer improving: its best validation was at step {best} "
        f"of {steps}. Whether as many further steps of {name} would do the same was not tried."
    )


def start_of(run: FinishedRun, runs: ByName) -> FinishedRun | None:
    return runs.get(run.started_from) if run.started_from else None


def total_steps(run: FinishedRun, runs: ByName) -> int:
    """Steps on the weights of this run, with those of the run that it started from."""
    start = start_of(run, runs)
    return run.steps + (start.steps if start else 0)


def training(found: Iterable[FinishedRun], runs: ByName) -> str:
    """ "160 steps after a supervised start of 60"."""
    found = list(found)
    steps = span([run.steps for run in found])
    starts = [start.steps for run in found if (start := start_of(run, runs))]
    if starts:
        return f"{steps} steps after a supervised start of {span(starts)}"
    return f"{steps} steps" + (" after a supervised start" if any(run.started_from for run in found) else "")


def span(values: Iterable[int]) -> str:
    """ "60", or "60 to 160"."""
    low_to_high = sorted(values)
    return " to ".join(dict.fromkeys(f"{value:,}" for value in (low_to_high[0], low_to_high[-1])))


def seeds_text(found: Iterable[FinishedRun]) -> str:
    seeds = sorted({run.seed for run in found})
    return f"Seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"


def mean_map(found: Iterable[FinishedRun]) -> float:
    return float(np.mean([run.test.map for run in found]))


def mean_maps(study: Study, rows: Iterable[Row], column: Column) -> dict[Row, float]:
    """Mean test MAP over seeds of each row that has runs."""
    return {row: mean_map(found) for row in rows if (found := study.runs(row, column))}


def committee_sentence(study: Study, runs: ByName, assessed: Assessments) -> str:
    """Where several supervised runs began the control's bank, the tables show only the first. How good each of them is, and
    the mean of their predictions: that is what the control had to beat."""
    controls = [run for (row, _), cell in study.cells.items() if row.key == display.CONTROL for run in cell]
    teams = {
        run.folder: [runs[name] for name in (run.started_from, *run.committee) if name in runs]
        for run in controls
        if run.started_from and run.committee
    }
    complete = [run for run in controls if len(teams.get(run.folder, ())) == 1 + len(run.committee) > 1]
    if not complete:
        return ""
    maps = [member.test.map for run in complete for member in teams[run.folder]]
    text = (
        f" Its bank began with the mean prediction of {len(teams[complete[0].folder])} supervised runs, of which the tables "
        f"show the first: alone they reach {min(maps):.3f} to {max(maps):.3f}, on average {np.mean(maps):.3f}"
    )
    try:
        together = [committee_difference(run, teams[run.folder], assessed) for run in complete]
    except UserError:  # a run without readable predictions is reported as such elsewhere
        return f"{text}."
    committee = float(np.mean([found.committee_map for found in together]))
    difference = mean_map(complete) - committee
    text += f"; the mean of their predictions reaches {committee:.3f}, {display.method(display.CONTROL)} {signed(difference)}"
    spread = [found.replicates for found in together if found.replicates is not None]
    if len(spread) == len(together):
        bounds = difference_interval(dict(enumerate(spread)), {i: np.zeros(1) for i in range(len(spread))})
        text += f" against it, 95 % interval {signed(bounds[0])} to {signed(bounds[1])}" if bounds else ""
    return f"{text}."
