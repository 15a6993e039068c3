"""Standard ECG paper as SVG: 25 mm/s, 10 mm/mV, three rows of four leads for 2.5 s each, and a rhythm strip of lead II.

Coordinates are millimetres, paths count hundredths of them in whole numbers: a picture of 50 kB instead of 700.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ecgmatch_dist.data.preprocess import LEADS, resample

SPEED = 25.0  # mm/s
SECONDS = 10.0
COLUMN = SECONDS / 4
ROW, LEFT, TOP, BOTTOM = 30.0, 12.0, 6.0, 8.0  # mm
WIDTH, HEIGHT = LEFT + SECONDS * SPEED + 3, TOP + 4 * ROW + BOTTOM
RATE = 250.0  # samples per second are enough for the eye
STANDARD = 2.0  # mm for one standard deviation
LARGE = 2.2  # mV; larger signals are drawn with half the gain, as machines do


@dataclass(frozen=True)
class Strip:
    """A piece of a lead on the paper."""

    lead: int
    start: float
    stop: float
    """Seconds of the recording."""
    row: int

    @property
    def x(self) -> float:
        return LEFT + self.start * SPEED


STRIPS = [Strip(v, COLUMN * (v // 3), COLUMN * (v // 3 + 1), v % 3) for v in range(12)] + [Strip(1, 0, SECONDS, 3)]


@dataclass(frozen=True)
class Picture:
    """A drawing of twelve leads."""

    signal: NDArray[np.floating[Any]]
    """[12, n]; NaN where there is no value."""
    rate: float
    millivolts: bool = True
    """False: in standard deviations, as the network sees it; 1 is 2 mm."""
    marks: dict[str, tuple[NDArray[np.float32], float]] = field(default_factory=dict)
    """Name of a group -> strength of the pieces of each lead [12, pieces] in [-1, 1], and a piece's seconds."""

    def _repr_svg_(self) -> str:
        """What a notebook shows."""
        return self.svg("")

    def svg(self, title: str) -> str:
        """The picture. Groups of marks have the class `mark` and their name as `data-mark`."""
        signal = self.signal[:, : round(SECONDS * self.rate)].astype(np.float64)
        level = np.array([np.median(lead[np.isfinite(lead)]) if np.isfinite(lead).any() else 0.0 for lead in signal])
        signal = signal - level[:, None]  # machines remove an offset, too
        gain = self._gain(signal)
        rate = self.rate
        if rate > RATE and np.isfinite(signal).all():
            signal, rate = resample(signal, rate, RATE).astype(np.float64), RATE
        unit = f"{gain:g} mm/mV" if self.millivolts else "amplitude in standard deviations"
        body = "".join(self._strip(strip, signal, rate, gain) for strip in STRIPS)
        marks = "".join(_marks(name, *mark) for name, mark in self.marks.items())
        foot = f"{SPEED:g} mm/s · {unit}"
        pulse = "".join(_pulse(row, gain) for row in range(4)) if self.millivolts else ""
        return (
            f'<svg class="ecg" viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img" xmlns="http://www.w3.org/2000/svg">'
            f"<title>{escape(title)}</title>{_GRID}{marks}"
            f'<g class="trace" fill="none" stroke="#111" stroke-width=".28" stroke-linejoin="round">{body}{pulse}</g>'
            f"{_labels()}<text x='{LEFT:g}' y='{HEIGHT - 2.5:g}' class='foot'>{foot}</text></svg>"
        )

    def _gain(self, signal: NDArray[np.float64]) -> float:
        """mm for 1 of the signal's unit."""
        if not self.millivolts:
            return STANDARD
        sizes = np.abs(signal[np.isfinite(signal)])
        return 5.0 if sizes.size and np.quantile(sizes, 0.999) > LARGE else 10.0

    def _strip(self, strip: Strip, signal: NDArray[np.float64], rate: float, gain: float) -> str:
        first, last = round(strip.start * rate), round(strip.stop * rate) + 1
        y = signal[strip.lead, first:last]
        heights = np.clip(y * gain, -1.6 * ROW, 1.6 * ROW)  # an artefact must not leave the paper
        points = np.stack([np.arange(len(y)) / rate * SPEED + strip.x, _baseline(strip.row) - heights])
        return "".join(_path(run) for run in _runs(points))


def last_sample(x: NDArray[np.float16]) -> int:
    """Samples before the padding with zeros at the end. The filter leaves a little behind the last beat."""
    used = np.flatnonzero(np.abs(x.astype(np.float32)).max(0) > 0.02)
    return int(used[-1]) + 1 if used.size else x.shape[1]


def _baseline(row: int) -> float:
    return TOP + ROW * (row + 0.5)


def _runs(points: NDArray[np.float64]) -> list[NDArray[np.float64]]:
    """[2, n] -> its pieces without missing values."""
    ends = np.flatnonzero(np.diff(np.r_[0, np.isfinite(points[1]), 0]))
    return [points[:, start:stop] for start, stop in ends.reshape(-1, 2)]


def _path(points: NDArray[np.float64]) -> str:
    places = np.round(100 * points).astype(int)
    steps = np.diff(places, axis=1).T
    first = f"M{places[0, 0]} {places[1, 0]}"
    line = "l" + " ".join(f"{dx} {dy}" for dx, dy in steps) if len(steps) else "h0"
    return f'<path transform="scale(.01)" stroke-width="28" d="{first}{line}"/>'


def _pulse(row: int, gain: float) -> str:
    """The calibration pulse: 1 mV for 0.2 s."""
    y = _baseline(row)
    return f'<path d="M2 {y:g}h2v{-gain:g}h{0.2 * SPEED:g}v{gain:g}h2"/>'


def _marks(name: str, strength: NDArray[np.float32], seconds: float) -> str:
    """Coloured bands behind the leads: orange speaks for a class, blue against it."""
    found = []
    for strip in STRIPS:
        for number, value in enumerate(strength[strip.lead]):
            start, stop = max(number * seconds, strip.start), min((number + 1) * seconds, strip.stop)
            if stop > start and abs(value) >= 0.1:
                x, y, width = LEFT + start * SPEED, _baseline(strip.row) - ROW / 2 + 1, (stop - start) * SPEED
                colour = "#f08000" if value > 0 else "#2070d0"
                found.append(
                    f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{ROW - 2:g}" fill="{colour}" '
                    f'opacity="{0.5 * min(abs(float(value)), 1):.2f}"/>'
                )
    return f'<g class="mark" data-mark="{escape(name)}">{"".join(found)}</g>'


def _labels() -> str:
    names = [f'<text x="{s.x + 1:g}" y="{_baseline(s.row) - 11:g}" class="lead">{LEADS[s.lead]}</text>' for s in STRIPS]
    ticks: Sequence[str] = [f"M{s.x:g} {_baseline(s.row) - 3:g}v6" for s in STRIPS if s.start > 0]
    return "".join(names) + f'<path d="{"".join(ticks)}" stroke="#111" stroke-width=".2"/>'


def _lines(step: float, colour: str, width: float) -> str:
    across = "".join(f"M{LEFT % step + x * step:g} 0V{HEIGHT:g}" for x in range(int(WIDTH / step) + 1))
    down = "".join(f"M0 {TOP % step + y * step:g}H{WIDTH:g}" for y in range(int(HEIGHT / step) + 1))
    return f'<path d="{across}{down}" stroke="{colour}" stroke-width="{width:g}"/>'


_GRID = (
    f'<rect width="{WIDTH:g}" height="{HEIGHT:g}" fill="#fffafa"/>'
    + _lines(1, "#f6dcdc", 0.1)
    + _lines(5, "#e8a9a9", 0.18)
)
