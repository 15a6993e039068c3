"""What each link of a chain adds: every run against the run that it started from, and chains that begin otherwise against the
plain one, on the same test recordings."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from textwrap import wrap

import numpy as np
from matplotlib.figure import Figure

from ecgmatch_dist.config import Config, without_trees
from ecgmatch_dist.record.second_opinion import FOLDER, folder_of
from ecgmatch_dist.report import display
from ecgmatch_dist.report.assess import Assessments
from ecgmatch_dist.report.drawing import INK, method_colour, panels
from ecgmatch_dist.report.resample import Floats, interval
from ecgmatch_dist.report.runs import FinishedRun, result_settings
from ecgmatch_dist.report.studies import Column, column_of
from ecgmatch_dist.report.tables import MISSING, Cell, Table, excludes_zero, signed, text_table

METRICS = tuple(metric for metric in display.METRICS if metric.key in ("map", "macro_auc"))
DRAWS = 2000
TITLE = 24  # letters of a panel's width
BRACKETS = (
    f"In brackets: the central 95 % over {DRAWS:,} draws of labelled sets, and of test recordings within each. With one "
    "labelled set the interval is over recordings alone. Bold: it excludes zero, and there are at least three labelled sets."
)
NOTE = (
    "A run minus the run whose weights it started from; with its trees: the answer of the network and of the trees that the "
    "method has asked (`ecgmatch predict --trees`) minus that of the network. Where trees answer at both ends, the first run "
    "is labels alone with trees, begun alike, and not the start. " + BRACKETS
)
OTHERWISE_NOTE = (
    "A tagged run minus the run of the same method without a tag, on the same labelled set; only runs that begin otherwise: "
    "another network, other weights, another start. Other settings in which they differ stand behind the tag. "
    + BRACKETS
)
AND_TREES = "with its trees"
BEGINNING = ("weights", "selfsupervised", "contrast", "init", "model", "augment")
"""Settings, or sections of them, that make another start."""
Pair = tuple[FinishedRun, FinishedRun]
"""A start, and the run that began with its weights; or a plain run, and the one that began otherwise."""


@dataclass(frozen=True)
class Link:
    """The pairs of one kind on one test set: one per labelled set."""

    column: Column
    ratio: float
    label: str
    pairs: tuple[Pair, ...]

    @property
    def runs(self) -> tuple[FinishedRun, ...]:
        return tuple(run for pair in self.pairs for run in pair)

    @property
    def ends(self) -> tuple[str, str]:
        """What the two runs of a pair are called."""
        start, run = self.pairs[0]
        return title(start), AND_TREES if asks_trees(start, run) else title(run)

    def mean(self, metric: str, of: int) -> float:
        return float(np.mean([pair[of].test.get(metric) for pair in self.pairs]))


def find_links(runs: Iterable[FinishedRun], with_trees: Iterable[FinishedRun] = ()) -> list[Link]:
    """All links between these runs, in the order of the chain. `with_trees`: what some of them answer with their trees."""
    runs, with_trees = list(runs), list(with_trees)
    by_name = {(run.split_sha256, run.name): run for run in runs}
    by_folder = {run.folder: run for run in runs}
    starts = [(by_name.get((run.split_sha256, run.started_from or "")), run) for run in runs]
    starts += [(by_folder.get(run.folder.parent), run) for run in with_trees]
    # What the unlabelled recordings still add where trees answer, too.
    alone = sorted((run for run in with_trees if run.method == "supervised"), key=lambda run: run.tag, reverse=True)
    bounds = {beginning(run): run for run in alone}  # of several, the one without a tag
    starts += [(bounds.get(beginning(run)), run) for run in with_trees if run.method != "supervised"]
    return _grouped((label(start, run), (start, run)) for start, run in starts if start)


def find_otherwise(runs: Iterable[FinishedRun]) -> list[Link]:
    """Tagged runs that begin otherwise than the plain run of their method on the same split, paired with it. Not the further
    members of a committee: they differ from it by their seed alone."""
    runs = [run for run in runs if not run.settings.get("member")]
    plain = {(run.split_sha256, run.method): run for run in runs if not run.tag}
    tagged = ((plain.get((run.split_sha256, run.method)), run) for run in runs if run.tag)
    return _grouped(
        (f"{display.method(run.method)}: {run.tag}{also_other(other, run)}", (other, run))
        for other, run in tagged
        if other and begins_otherwise(other, run)
    )


def setting(run: FinishedRun, key: str) -> object:
    """A setting of a run, which an older version may not have known. Whether trees beside the weights are asked is left out."""
    value = run.settings.get(key, _usual().get(key))
    return without_trees(str(value)) if key == "weights" else value


@cache
def _usual() -> dict[str, object]:
    return result_settings(Config().to_json())


def beginning(run: FinishedRun) -> tuple[object, ...]:
    """The split, and what the chain of a run began with."""
    keys = [key for key in _usual() if key.partition(".")[0] in ("weights", "selfsupervised", "model")]
    return run.split_sha256, *(setting(run, key) for key in keys)


def begins_otherwise(plain: FinishedRun, run: FinishedRun) -> bool:
    if run.started_from or plain.started_from:
        return run.started_from != plain.started_from
    return any(key.partition(".")[0] in BEGINNING for key in differing(plain, run))


def also_other(plain: FinishedRun, run: FinishedRun) -> str:
    """The settings in which two runs differ beside their start: the difference may be theirs."""
    others = [key for key in differing(plain, run) if key.partition(".")[0] not in BEGINNING]
    return f" (also other {', '.join(others)})" if others else ""


def differing(plain: FinishedRun, run: FinishedRun) -> list[str]:
    keys = sorted(plain.settings.keys() | run.settings.keys())
    return [key for key in keys if setting(plain, key) != setting(run, key)]


def _grouped(pairs: Iterable[tuple[str, Pair]]) -> list[Link]:
    """Pairs with their labels as links, in the order of the chain."""
    groups: dict[tuple[Column, float, str], list[Pair]] = defaultdict(list)
    for name, pair in pairs:
        groups[column_of(pair[1]), pair[1].ratio, name].append(pair)
    links = [
        Link(*key, tuple(sorted(pairs, key=lambda pair: (pair[1].seed, pair[1].name)))) for key, pairs in groups.items()
    ]

    def order(link: Link) -> tuple[object, ...]:
        start, run = link.pairs[0]
        steps = tuple(display.method_sort_key(method) for method in (start.method, run.method))
        return link.column.sort_key, link.ratio, steps, link.label

    return sorted(links, key=order)


def asks_trees(start: FinishedRun, run: FinishedRun) -> bool:
    """Whether the second is the first one with its trees."""
    return run.folder == folder_of(start.folder)


def title(run: FinishedRun) -> str:
    name = display.method(run.method)
    return f"{name} {AND_TREES}" if run.folder.name == FOLDER else name


def label(start: FinishedRun, run: FinishedRun) -> str:
    name = f"{title(start)} → {AND_TREES if asks_trees(start, run) else title(run)}"
    return f"{name} ({run.tag})" if run.tag else name  # a variant of a sweep is a link of its own


def chain_table(links: Sequence[Link], assessed: Assessments) -> Table:
    """The mean of the starts, of the runs, and their difference."""
    return text_table("chain", "Links of the chain", NOTE, _blocks(links, assessed, ("Link", "start", "after")))


def otherwise_table(links: Sequence[Link], assessed: Assessments) -> Table:
    """The mean of the plain runs, of those that begin otherwise, and their difference."""
    blocks = _blocks(links, assessed, ("Method: begun as", "plain", "otherwise"))
    return text_table("otherwise", "Another start instead", OTHERWISE_NOTE, blocks)


def _blocks(
    links: Sequence[Link], assessed: Assessments, names: tuple[str, str, str]
) -> list[tuple[str, list[str], list[list[str | Cell]]]]:
    """One block per metric. `names`: of a link, of its first runs, of its second ones."""
    header = [names[0], "test set", "labelled", "sets", *names[1:], "difference"]
    blocks = []
    for metric in METRICS:
        rows: list[list[str | Cell]] = []
        for link in links:
            counted = (
                Cell(text, runs=link.runs, runs_below=True)
                for text in (display.percent(link.ratio), str(len(link.pairs)))
            )
            means = (
                Cell(f"{mean:.3f}", "value", mean, runs=link.runs, runs_below=True)
                for mean in (link.mean(metric.key, of) for of in (0, 1))
            )
            where = f"{display.PROTOCOLS.get(link.column.protocol, link.column.protocol)}: {link.column.label}"
            rows.append([link.label, where, *counted, *means, difference_cell(link, metric.key, assessed)])
        blocks.append((metric.title, header, rows))
    return blocks


def difference_cell(link: Link, metric: str, assessed: Assessments) -> Cell:
    values = [(replicates(start, metric, assessed), replicates(run, metric, assessed)) for start, run in link.pairs]
    mean = link.mean(metric, 1) - link.mean(metric, 0)
    known = [after - before for before, after in values if before is not None and after is not None]
    if len(known) < len(values):
        return Cell(f"{signed(mean)} {MISSING}", "value", mean, runs=link.runs, runs_below=True)
    bounds = interval(over_sets_and_recordings(known))
    text = f"{signed(mean)} [{signed(bounds[0])}, {signed(bounds[1])}]"
    return Cell(text, "value", mean, bold=len(known) >= 3 and excludes_zero(bounds), runs=link.runs, runs_below=True)


def chain_figure(links: Sequence[Link]) -> Figure:
    """One panel per link and test set: a line per labelled set, from the test MAP of its start to that of its run."""
    titles = [panel_title(link) for link in links]
    more = 0.16 * (max(map(len, titles)) - 2)
    figure, axes = panels(len(links), 4, 2.5, 2.7 + more, (0.62, 0.42, 0.1, 0.62 + more))
    scores = [run.test.map for link in links for pair in link.pairs for run in pair]
    low, high = min(scores), max(scores)
    margin = 0.08 * (high - low) + 0.005
    for axis, link, title in zip(axes, links, titles, strict=False):
        for pair in link.pairs:
            axis.plot([0, 1], [run.test.map for run in pair], "o-", color=method_colour(pair[1].method), ms=3, lw=1)
        means = [link.mean("map", of) for of in (0, 1)]
        axis.plot([0, 1], means, color=INK, lw=2.2)
        for x, (mean, side) in enumerate(zip(means, ("right", "left"), strict=True)):
            axis.annotate(
                f"{mean:.3f}", (x, mean), (-6 if x == 0 else 6, 0), textcoords="offset points", ha=side, va="center"
            )
        axis.set_xlim(-0.75, 1.75)
        axis.set_ylim(low - margin, high + margin)
        axis.set_xticks([0, 1], link.ends)
        axis.set_title("\n".join(title))
        axis.grid(False, axis="x")
    axes[0].set_ylabel("test MAP")
    return figure


def panel_title(link: Link) -> list[str]:
    """Test set, ratio and variant, in lines that a panel has room for."""
    tag = f", {link.pairs[0][1].tag}" if link.pairs[0][1].tag else ""
    texts = link.column.label, f"{display.percent(link.ratio)} labelled{tag}"
    return [line for text in texts for line in wrap(text, TITLE, break_on_hyphens=False)]


def replicates(run: FinishedRun, metric: str, assessed: Assessments) -> Floats | None:
    found = assessed.get(str(run.folder))
    return found.replicates.get(metric) if found else None


def over_sets_and_recordings(differences: Sequence[Floats], draws: int = DRAWS) -> Floats:
    """Means of differences [S][R] over S labelled sets that are drawn again, each with one of its R resamples: [draws]."""
    rng = np.random.default_rng(len(differences))
    table = np.stack(differences)
    sets = rng.integers(len(table), size=(draws, len(table))) if len(table) > 1 else np.zeros((draws, 1), np.int64)
    found: Floats = table[sets, rng.integers(table.shape[1], size=sets.shape)].mean(1)
    return found
