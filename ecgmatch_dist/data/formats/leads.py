"""Lead names, units, derived leads: from what a file calls its signals to the twelve standard leads in mV."""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ecgmatch_dist.data.formats.recording import Layout, Rejected, Tracing
from ecgmatch_dist.data.preprocess import LEADS as LEADS
from ecgmatch_dist.errors import UserError

Array = NDArray[np.floating]
MILLIVOLTS = {"nv": 1e-6, "uv": 1e-3, "mv": 1.0, "v": 1e3}
UNIT_WORDS = {"microvolt": "uv", "millivolt": "mv", "volt": "v", "nanovolt": "nv", "microv": "uv"}
DERIVED = {"III": (-1.0, 1.0), "aVR": (-0.5, -0.5), "aVL": (1.0, -0.5), "aVF": (-0.5, 1.0)}
"""Lead -> its weights of I and II. Exact: Einthoven and Goldberger define them so."""
PLAUSIBLE = 0.02, 30.0
"""mV between the 1st and the 99th percentile of a recording's middle lead. Real ECGs lie between 0.2 and 5."""
LARGEST = 1e12
"""mV. No wrong unit leads to more: such values are not numbers that a device wrote."""

# Lead I, LEAD_II, MDC_ECG_LEAD_AVR, ECG-V1, EKG aVL, Ableitung III, DI (Brazil), C1 (IEC), I (Einthoven), V1 [uV], I-uV
_ALIAS = re.compile(
    r"(?:mdc_ecg_)?(?:(?:ecg|ekg|lead|ableitung|derivation)(?:[ _:.]*|-))*"
    r"(?:d?(?P<limb>i{1,3})|(?P<augmented>av[rlf])|[vc](?P<chest>[1-6]))"
    r"(?:\s*[(\[].*[)\]])?"
)


@lru_cache(maxsize=4096)
def lead_of(name: str) -> str | None:
    """The standard lead that a name means, or None. `-aVR` is none: its sign is another."""
    match = _ALIAS.fullmatch(name.strip().lower())
    if match is None:
        return None
    if match["limb"]:
        return match["limb"].upper()
    return f"aV{match['augmented'][2].upper()}" if match["augmented"] else f"V{match['chest']}"


def millivolts(unit: str) -> float:
    """What 1 of a unit is in mV: `uV`, `µV`, `mV`, `V`, with a factor before it if need be (`1e-4 V`). Raises Rejected."""
    match = re.fullmatch(r"([0-9.]+(?:e[+-]?[0-9]+)?)?\s*\*?\s*([a-zµμ]+)", unit.strip().lower())
    word = match[2].replace("µ", "u").replace("μ", "u").rstrip("s") if match else ""
    word = UNIT_WORDS.get(word, word)
    if match is None or word not in MILLIVOLTS:
        raise Rejected("units", f"{unit.lower() or 'none'}: not a voltage")
    return float(match[1] or 1) * MILLIVOLTS[word]


def check_layout(layout: Layout, where: str) -> None:
    """Refuse a rate, a unit or lead names that no file could have. `where` begins the message."""
    if layout.rate is not None and not layout.rate >= 1:
        raise UserError(f"{where}rate = {layout.rate:g}: at least 1 sample per second")
    if layout.unit:
        try:
            millivolts(layout.unit)
        except Rejected:
            raise UserError(f'{where}unit = "{layout.unit}": uV, mV or V, or a factor before one: "4.88 uV"') from None
    for own, standard in layout.lead_map.items():
        if standard not in LEADS:
            raise UserError(f'{where}lead_map: "{own}" -> "{standard}": one of {" ".join(LEADS)}')
    if layout.leads:
        try:
            places(layout.leads, layout.lead_map)
        except Rejected as fault:
            raise UserError(f"{where}leads: {fault.detail}") from None


def places(names: Sequence[str], lead_map: Mapping[str, str]) -> dict[str, int]:
    """Standard lead -> its place in `names`, for those that are there. A standard name goes before an alias."""
    return dict(_places(tuple(map(str, names)), tuple((own.strip().lower(), to) for own, to in lead_map.items())))


@lru_cache(maxsize=4096)
def _places(names: tuple[str, ...], lead_map: tuple[tuple[str, str], ...]) -> tuple[tuple[str, int], ...]:
    own, standard = dict(lead_map), {lead.lower(): lead for lead in LEADS}
    words = [name.strip().lower() for name in names]
    found: dict[str, int] = {}
    for meanings in (
        [own.get(word) for word in words],
        [None if word in own else standard.get(word) for word in words],
        [None if word in own or word in standard else lead_of(word) for word in words],
    ):
        new: dict[str, int] = {}
        for place, lead in enumerate(meanings):
            if lead is None or lead in found:
                continue
            if lead in new:
                raise Rejected("leads", f"{lead} more than once")
            new[lead] = place
        found |= new
    return tuple((lead, found[lead]) for lead in LEADS if lead in found)


def arrange(tracing: Tracing, lead_map: Mapping[str, str], fill: bool) -> tuple[NDArray[np.float32], tuple[str, ...]]:
    """The twelve leads [12, n] in mV, and flags. `fill`: a missing lead that cannot be derived is zero, otherwise refused."""
    place = places(tracing.names, lead_map)
    names = [*tracing.others, *tracing.names]  # what a lead map might name comes first
    there = f"; there are {len(names)}: {' '.join(names)}"
    derivable = DERIVED if {"I", "II"} <= place.keys() else {}
    missing = [lead for lead in LEADS if lead not in place and lead not in derivable]
    if missing and (not fill or len(place) < 2):
        raise Rejected("leads", f"{' '.join(missing)} missing{there}")
    factor = {lead: millivolts(tracing.units[at]) for lead, at in place.items()}
    if len(place) == len(LEADS):
        signal = tracing.signal[[place[lead] for lead in LEADS]]
        if set(factor.values()) != {1.0}:
            signal = signal * np.array([factor[lead] for lead in LEADS])[:, None]
        return _checked(signal), ()
    out = np.zeros((len(LEADS), tracing.signal.shape[1]), np.result_type(tracing.signal, np.float32))
    for lead, at in place.items():
        out[LEADS.index(lead)] = tracing.signal[at] * factor[lead]
    flags = []
    for v, lead in enumerate(LEADS):
        if lead in place:
            continue
        if lead in derivable:
            of_i, of_ii = DERIVED[lead]
            out[v] = of_i * out[0] + of_ii * out[1]
        flags.append(f"{'derived' if lead in derivable else 'missing'}:{lead}")
    return _checked(out), tuple(flags)


def _checked(signal: Array) -> NDArray[np.float32]:
    if not np.isfinite(signal).any():
        raise Rejected("no signal", "not one sample has a value")
    return signal.astype(np.float32, copy=False)


def check_signal(signal: NDArray[np.float32]) -> tuple[str, ...]:
    """Flags of twelve leads [12, n]. Refuses a recording of which fewer than two leads move, or that holds no voltages."""
    values = [lead[np.isfinite(lead)] for lead in signal]
    moving = [lead for lead in values if lead.size and lead.min() < lead.max()]
    if len(moving) < 2:
        raise Rejected("no signal", f"{len(moving)} of 12 leads move; two are needed")
    largest = max(float(np.abs(lead).max()) for lead in moving)
    if largest > LARGEST:
        raise Rejected("no signal", f"values up to {largest:.0e} mV: the file is damaged")
    spans = [high - low for low, high in (np.percentile(lead, (1, 99)) for lead in moving)]
    return () if PLAUSIBLE[0] <= np.median(spans) <= PLAUSIBLE[1] else ("unit?",)
