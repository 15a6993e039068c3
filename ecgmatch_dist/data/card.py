"""card.html: one page about a database's shards, without external links: counts, quality and pictures."""

import base64
import re
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import ecg_plot
import jinja2
import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ecgmatch_dist.data.index import Dataset
from ecgmatch_dist.data.labels import known
from ecgmatch_dist.data.manifest import read_rejects
from ecgmatch_dist.data.preprocess import LEADS
from ecgmatch_dist.data.table import Table

MARK = 5
"""Standard deviations drawn as 1 mV."""
FOOTER = {
    "10 mm/mV": f"10 mm = {MARK} standard deviations",
    "amplitude: mV": "amplitude: standard deviations",
    "calibration: 1 mV": f"calibration: {MARK} standard deviations",
}
"""What ecg_plot writes below a picture -> the right words for a z-scored signal."""
HARMLESS = {"resampled", "short", "cropped"}
"""Flags that say how a recording was made to fit; the others are faults of its signal."""
DURATIONS = 12
"""Rows of the table of durations: with more different ones, they are grouped."""


@dataclass(frozen=True)
class ClassRow:
    """One row of the table of classes."""

    short: str
    name: str
    count: int
    share: float
    """Of all recordings with a diagnosis."""
    expected: int | str
    """Empty: not known."""


@dataclass(frozen=True)
class Cell:
    """One cell of the table of classes that occur together."""

    count: int
    share: float
    """Of the row's class."""


@dataclass(frozen=True)
class TogetherRow:
    short: str
    cells: list[Cell]


@dataclass(frozen=True)
class Picture:
    key: str
    labels: str
    faults: str
    """Flags of a signal that is not as it should be."""
    notes: str
    """Flags that say what preprocessing did."""
    svg: str
    """In base64."""


def render_card(
    folder: Path,
    dataset: Dataset,
    table: Table,
    labels: NDArray[np.uint8],
    problems: list[str],
    differences: list[str],
) -> str:
    """The page as HTML. `labels` [n, C], 1, 0 or UNKNOWN, belong to the rows of `table`. `differences`: what to look at."""
    is_known = known(labels)
    labels = (labels == 1).astype(np.uint8)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=jinja2.StrictUndefined
    )
    return environment.get_template("card.html.jinja").render(
        title=dataset.title or dataset.database,
        dataset=dataset,
        problems=problems,
        differences=differences,
        classes=_classes(dataset, labels[is_known]),
        unknown=int((~is_known).sum()),
        together=_together(dataset, labels),
        tables=_tables(folder, table, labels, is_known),
        pictures=_pictures(folder, dataset, table, labels) if not problems else [],
        mark=MARK,
    )


def _classes(dataset: Dataset, labels: NDArray[np.uint8]) -> list[ClassRow]:
    expected = dataset.expected.classes
    return [
        ClassRow(short, name, int(count), count / max(len(labels), 1), expected.get(short, ""))
        for short, name, count in zip(dataset.classes, dataset.class_names, labels.sum(axis=0), strict=True)
    ]


def _together(dataset: Dataset, labels: NDArray[np.uint8]) -> list[TogetherRow]:
    counts = labels.astype(np.int64).T @ labels
    return [
        TogetherRow(short, [Cell(int(n), n / max(row[c], 1)) for n in row])
        for c, (short, row) in enumerate(zip(dataset.classes, counts, strict=True))
    ]


def _tables(
    folder: Path, table: Table, labels: NDArray[np.uint8], is_known: NDArray[np.bool_]
) -> list[tuple[str, list[tuple[str, int]]]]:
    rate, samples = table.arrays["rate"], table.arrays["samples"]
    flags: Counter[str] = Counter()
    for joined, n in table.counts("flags").items():
        for flag in joined.split():
            flags[flag] += n
    ages: Counter[int] = Counter()
    for age, n in table.counts("age").items():
        ages[_decade(age)] += n
    sexes = Counter(table.counts("sex")).most_common()
    rejects = read_rejects(folder / "rejects.csv")
    reasons = Counter(str(reason).partition(":")[0] for reason in rejects["reason"])
    return [
        ("Sampling rate", [(f"{rate} Hz", n) for rate, n in _count(rate)]),
        ("Duration", _durations(_count(np.round(samples / rate)))),
        ("Quality flags", sorted(flags.items(), key=lambda item: _flag_order(item[0]))),
        ("Rejected", reasons.most_common()),
        ("Classes per recording", [(str(k), n) for k, n in _count(labels[is_known].sum(axis=1))]),
        ("Age", [("not known" if a < 0 else f"{a}–{a + 9}", n) for a, n in sorted(ages.items())]),
        ("Sex", [(sex or "not known", n) for sex, n in sexes if n]),
    ]


def _decade(age: str) -> int:
    """The first year of the decade; -10: not known."""
    try:
        years = float(age)
    except ValueError:
        return -10
    return int(np.clip(years, -1, 1000) // 10 * 10) if years == years else -10


def _count(values: NDArray[np.generic]) -> list[tuple[int, int]]:
    distinct, counts = np.unique(values, return_counts=True)
    return [(int(value), int(n)) for value, n in zip(distinct, counts, strict=True)]


def _durations(rows: list[tuple[int, int]]) -> list[tuple[str, int]]:
    """Seconds and counts. Many different ones are grouped, each group about twice as wide as the one before, so that the
    longest stay in sight."""
    if len(rows) <= DURATIONS:
        return [(f"{seconds} s", n) for seconds, n in rows]
    longest = rows[-1][0]
    edges = [0, 5, 10, 11]  # ten seconds is the usual length
    while edges[-1] <= longest:
        edges.append(20 if edges[-1] == 11 else 2 * edges[-1])
    grouped = []
    for low, high in pairwise(edges):
        last = min(high - 1, longest)
        if count := sum(n for seconds, n in rows if low <= seconds < high):
            grouped.append((f"{low} s" if last == low else f"{low}–{last} s", count))
    return grouped


def _flag_order(flag: str) -> tuple[str, int]:
    kind, _, lead = flag.partition(":")
    return kind, LEADS.index(lead) if lead in LEADS else -1


def _pictures(folder: Path, dataset: Dataset, table: Table, labels: NDArray[np.uint8]) -> list[Picture]:
    """One recording of each of the first five classes, if possible without another class, and two with flags."""
    flags, numbers = table.values("flags"), table.codes("flags")
    clean = np.array([not text for text in flags], np.uint8)[numbers]
    alone = (labels.sum(axis=1) == 1).astype(np.uint8)
    rows: list[int] = []
    for c in range(min(labels.shape[1], 5)):
        rows += _first(labels[:, c] * (1 + clean + 2 * alone))
    for kind in ("flat:", "clipped:|nan|inf"):
        rows += _first(np.array([bool(re.search(kind, text)) for text in flags])[numbers])
    return [_picture(folder, dataset, table.frame(slice(row, row + 1)).iloc[0]) for row in dict.fromkeys(rows)]


def _first(score: NDArray[np.generic]) -> list[int]:
    """The first row of highest score, if any is above zero."""
    return [int(score.argmax())] if len(score) and score.max() > 0 else []


def _picture(folder: Path, dataset: Dataset, record: "pd.Series[Any]") -> Picture:
    shape = (len(LEADS), dataset.length)
    signal = np.fromfile(folder / record["shard"], "<f2", count=shape[0] * shape[1], offset=record["offset"])
    end = min(10.0, record["samples"] / record["rate"], dataset.length / dataset.rate)
    chart = ecg_plot.plot(
        signal.reshape(shape).astype(float) / MARK,
        sample_rate=dataset.rate,
        lead_names=LEADS,
        layout="12lead",
        time_mode="sequential",
        window=(0, end),
        amplitude_range=(-1.5, 2.0),
    )
    svg = chart.to_svg()
    for volts, deviations in FOOTER.items():
        svg = svg.replace(volts, deviations)
    svg = base64.b64encode(svg.encode()).decode()
    flags = record["flags"].split()
    notes = [flag for flag in flags if flag in HARMLESS]
    faults = [flag for flag in flags if flag not in HARMLESS]
    return Picture(record["key"], record["labels"], " ".join(faults), " ".join(notes), svg)
