"""A page with counts, doubts and pictures of five recordings: a look tells whether leads and unit are right."""

from collections.abc import Sequence
from dataclasses import dataclass

import ecg_plot
import jinja2
import numpy as np

from ecgmatch_dist.data.adopt.survey import Found
from ecgmatch_dist.data.formats.leads import LEADS, PLAUSIBLE

SHOWN = 5


@dataclass(frozen=True)
class Picture:
    name: str
    about: str
    svg: str


def choose(found: Sequence[Found]) -> list[Found]:
    """Five recordings that can be read, of as many formats as there are."""
    good = [one for one in found if not one.problem and one.recording is not None]
    by_format: dict[str, list[Found]] = {}
    for one in good:
        by_format.setdefault(one.format, []).append(one)
    turns = [one for turn in range(SHOWN) for some in by_format.values() for one in some[turn : turn + 1]]
    return turns[:SHOWN]


def draw(one: Found, rate: float, unit: str) -> Picture:
    """At most ten seconds on ECG paper. `rate` and `unit`: the guesses for a file that does not say them."""
    assert one.recording is not None
    rate = rate if "rate" in one.unsaid else one.rate
    signal = np.nan_to_num(one.recording.signal.astype(float))
    signal = signal / 1000 if "units" in one.unsaid and unit == "uV" else signal
    signal = signal - np.median(signal, axis=1, keepdims=True)
    if one.span > PLAUSIBLE[1] and "units" not in one.unsaid:
        signal = np.clip(signal, -5, 5)
    window = (0, min(10.0, signal.shape[1] / rate))
    figure = ecg_plot.plot(
        signal, sample_rate=rate, lead_names=LEADS, layout="12lead", time_mode="sequential", window=window
    )
    missing = f"; without {' '.join(one.missing)}" if one.missing else ""
    guessed = f"; guessed: {', '.join(one.unsaid)}" if one.unsaid else ""
    about = f"{one.format}, {rate:g} Hz, {one.samples / rate:.1f} s{missing}{guessed}"
    return Picture(one.ref.key, about, figure.to_svg())


def page(
    name: str, lines: Sequence[str], doubts: Sequence[str], ignored: Sequence[str], pictures: Sequence[Picture]
) -> str:
    """`ignored`: labels that are no class, with their counts."""
    loader = jinja2.PackageLoader("ecgmatch_dist.data.adopt", ".")
    template = jinja2.Environment(loader=loader, autoescape=True).get_template("preview.html.jinja")
    return template.render(name=name, lines=lines, doubts=doubts, ignored=ignored, pictures=pictures)
