"""Which runs belong in which table: the comparison of methods, and what changes when one setting of a method does.

Of each method, protocol and label scheme one configuration is the main one (untagged, then the most frequent). The comparison
shows the main ones; every other run is described by how its settings differ.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ecgmatch_dist.config import Config
from ecgmatch_dist.report import names
from ecgmatch_dist.report.runs import Run, settings

Settings = dict[str, Any]


@dataclass(frozen=True)
class Column:
    """A split without its ratio and seed: what a method is tested on."""

    protocol: str
    scheme: str
    databases: tuple[str, ...]
    test_database: str | None

    @property
    def label(self) -> str:
        if self.protocol == "cross" and self.test_database:
            trained = "" if self.usual else f" (from {', '.join(map(names.database, self.databases))})"
            return names.database(self.test_database) + trained
        return (
            " + ".join(map(names.database, self.databases)) if len(self.databases) < 4 else f"All {len(self.databases)}"
        )

    @property
    def slug(self) -> str:
        trained = "+".join(self.databases)
        if self.protocol == "cross" and self.test_database:
            return self.test_database if self.usual else f"{self.test_database}-from-{trained}"
        return trained

    @property
    def usual(self) -> bool:
        """Trained on all of the four databases but the tested one."""
        return {*self.databases, self.test_database} == set(names.DATABASES)

    @property
    def order(self) -> tuple[Any, ...]:
        tested = (self.test_database,) if self.test_database else self.databases
        return (
            names.place(self.protocol, names.PROTOCOLS),
            [names.place(d, names.DATABASES) for d in tested],
            self.databases,
        )


@dataclass(frozen=True)
class Row:
    """A line of a table."""

    key: str
    """What the paper's data files call it, after the method's name and a slash where several methods are in it."""
    label: str
    at: tuple[float, ...] = ()
    """The numbers that it stands for: K, the ratio, both lambdas; lines are sorted by them."""


@dataclass(frozen=True)
class Study:
    """Runs arranged in rows and columns."""

    kind: str
    protocol: str
    scheme: str
    ratio: float | None
    """None where the rows differ in it."""
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    cells: dict[tuple[Row, Column], tuple[Run, ...]]

    @property
    def key(self) -> str:
        ratio = "" if self.ratio is None else f"-{self.ratio}"
        scheme = "" if self.scheme == "ecgmatch5" else f"-{self.scheme}"
        return names.slug(f"{self.kind}-{self.protocol}{ratio}{scheme}")

    @property
    def title(self) -> str:
        ratio = "" if self.ratio is None else f", {names.percent(self.ratio)} labelled"
        scheme = "" if self.scheme == "ecgmatch5" else f", {self.scheme} labels"
        return f"{names.PROTOCOLS.get(self.protocol, self.protocol)}{ratio}{scheme}"

    def runs(self, row: Row, column: Column) -> tuple[Run, ...]:
        return self.cells.get((row, column), ())

    def seeds(self, column: Column) -> tuple[int, ...]:
        """All seeds that any row of this column has."""
        return tuple(sorted({run.seed for row in self.rows for run in self.runs(row, column)}))

    def missing(self) -> list[tuple[Row, Column, tuple[int, ...]]]:
        """Cells that lack seeds which their column has elsewhere."""
        gaps = []
        for row in self.rows:
            for column in self.columns:
                have = {run.seed for run in self.runs(row, column)}
                if lack := tuple(seed for seed in self.seeds(column) if seed not in have):
                    gaps.append((row, column, lack))
        return gaps


def column_of(run: Run) -> Column:
    return Column(run.protocol, run.scheme, run.databases, run.test_database)


def main_settings(runs: Iterable[Run]) -> dict[tuple[str, str, str], Settings]:
    """The main configuration of each (method, protocol, scheme): of untagged runs if there are, the most frequent.

    Of equally frequent ones it is the one that differs least from the defaults, which are the paper's."""
    defaults = settings(Config().to_json())
    groups: dict[tuple[str, str, str], list[Run]] = defaultdict(list)
    for run in runs:
        groups[run.method, run.protocol, run.scheme].append(run)
    out = {}
    for key, members in groups.items():
        candidates = [run for run in members if not run.tag] or members
        found = {repr(sorted(run.settings.items())): run.settings for run in candidates}
        frequent = Counter(repr(sorted(run.settings.items())) for run in candidates)
        strange = {text: sum(defaults.get(k, v) != v for k, v in found[text].items()) for text in found}
        out[key] = found[min(found, key=lambda text: (-frequent[text], strange[text], text))]
    return out


def differences(run: Run, main: dict[tuple[str, str, str], Settings]) -> Settings:
    """The settings of `run` that differ from its method's main ones."""
    base = main[run.method, run.protocol, run.scheme]
    return {k: run.settings.get(k) for k in sorted(base | run.settings) if base.get(k) != run.settings.get(k)}


LAMBDAS = {"method.lambda_u", "method.lambda_f"}
ABLATIONS = {
    ("method.lambda_u", 0): Row("lambda_u=0", "without pseudo-label generation", (1,)),
    ("method.refine", False): Row("refine=False", "without pseudo-label refinement", (2,)),
    ("method.lambda_f", 0): Row("lambda_f=0", "without label correlation alignment", (3,)),
}
STUDIES = {
    "ablation": "Ablation: one part taken away",
    "similarity": "Similarity that measures label correlation",
    "augmentation": "Augmentation: random against fixed sequence",
    "neighbours": "Number of neighbours K",
    "weights": "Weights of the two losses",
    "ratio": "Share of labelled recordings",
    "committee": "Supervised runs that begin the bank together",
    "other": "Other settings",
}


def classify(difference: Settings) -> list[str]:
    """The studies that a run with these differences takes part in."""
    if not difference:
        return ["main"]
    keys = set(difference)
    kinds = []
    if len(difference) == 1 and next(iter(difference.items())) in ABLATIONS:
        kinds.append("ablation")
    if keys <= LAMBDAS:
        kinds.append("weights")
    single = {
        "method.similarity": "similarity",
        "augment.pipeline": "augmentation",
        "method.neighbours": "neighbours",
        "member": "committee",
    }
    if len(keys) == 1 and (kind := single.get(next(iter(keys)))):
        kinds.append(kind)
    return kinds or ["other"]


def row_of(kind: str, run: Run, difference: Settings) -> Row:
    """The line of study `kind` that `run` stands in."""
    method, s = names.method(run.method), run.settings
    if kind == "main":
        return Row(run.method, method)
    if kind == "ablation":
        changed = next(iter(difference.items()), None)
        return ABLATIONS[changed] if changed else Row("full", method, (4,))
    if kind == "similarity":
        return Row(str(s.get("method.similarity")), str(s.get("method.similarity")))
    if kind == "augmentation":
        pipeline = s.get("augment.pipeline")
        return Row(f"{run.method}/{pipeline}", f"{method}, {pipeline}")
    if kind == "neighbours":
        K = s.get("method.neighbours")
        return Row(f"{run.method}/{K}", f"{method}, K = {K}", numbers(K))
    if kind == "weights":
        u, f = s.get("method.lambda_u"), s.get("method.lambda_f")
        return Row(f"{run.method}/{u}/{f}", f"{method}, λ_u = {u}, λ_f = {f}", numbers(u, f))
    if kind == "committee":
        at = tuple(number + 1 for number in numbers(s.get("member", 0)))
        name = f"{at[0]:g}" if at else str(s.get("member"))
        return Row(f"{run.method}/{name}", f"{method}, start {name}", at)
    if kind == "ratio":
        return Row(f"{run.method}/{run.ratio}", f"{method}, {names.percent(run.ratio)}", (run.ratio,))
    text = ", ".join(f"{key.removeprefix('method.')} = {value}" for key, value in difference.items())
    label = f"{method} ({': '.join(filter(None, (run.tag, text)))})" if text else method
    return Row(f"{run.method}/{text}", label)


def numbers(*values: object) -> tuple[float, ...]:
    """The values as numbers; none, where one is not (a setting that this version does not have)."""
    found = tuple(float(value) for value in values if isinstance(value, int | float))
    return found if len(found) == len(values) else ()


def arrange(kind: str, runs: Iterable[Run], ratio: float | None, row: Callable[[Run], Row]) -> Study:
    """A study of `runs`, all of one protocol and scheme."""
    cells: dict[tuple[Row, Column], list[Run]] = defaultdict(list)
    for run in sorted(runs, key=lambda run: (run.seed, run.name)):
        cells[row(run), column_of(run)].append(run)

    def place(row: Row) -> tuple[Any, ...]:
        return (names.place(row.key.split("/")[0], names.METHODS)[0], row.at, row.key)

    first = next(iter(cells))[1]
    columns = tuple(sorted({column for _, column in cells}, key=lambda column: column.order))
    rows = tuple(sorted({row for row, _ in cells}, key=place))
    frozen = {key: tuple(value) for key, value in cells.items()}
    return Study(kind, first.protocol, first.scheme, ratio, columns, rows, frozen)


def find_studies(runs: Iterable[Run]) -> list[Study]:
    """All tables that the runs are enough for, comparisons first."""
    runs = list(runs)
    main = main_settings(runs)
    changed = {run.folder: differences(run, main) for run in runs}
    groups: dict[tuple[str, str, float | None, str], list[Run]] = defaultdict(list)
    for run in runs:
        for kind in classify(changed[run.folder]):
            groups[kind, run.protocol, run.ratio, run.scheme].append(run)
        if not changed[run.folder]:
            groups["ratio", run.protocol, None, run.scheme].append(run)
    studies = []
    for (kind, protocol, ratio, scheme), members in groups.items():
        if kind == "ratio":
            members = with_several_ratios(members)
        elif kind != "main":  # beside the varied runs, their methods' main ones on the same databases
            where = {(run.method, column_of(run)) for run in members}
            unchanged = groups.get(("main", protocol, ratio, scheme), [])
            members = members + [run for run in unchanged if (run.method, column_of(run)) in where]
        if members:
            studies.append(arrange(kind, members, ratio, lambda run, kind=kind: row_of(kind, run, changed[run.folder])))  # type: ignore[misc]
    kinds = ["main", *STUDIES]
    studies.sort(key=lambda s: (kinds.index(s.kind), names.place(s.protocol, names.PROTOCOLS), s.ratio or 0, s.scheme))
    return studies


def with_several_ratios(runs: list[Run]) -> list[Run]:
    """Runs whose method was tried with other label ratios on the same database."""
    ratios: dict[tuple[str, Column], set[float]] = defaultdict(set)
    for run in runs:
        ratios[run.method, column_of(run)].add(run.ratio)
    return [run for run in runs if len(ratios[run.method, column_of(run)]) > 1]
