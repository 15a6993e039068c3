"""What a flag means, in words. The flags come from `data/preprocess.py`, `data/formats/` and this room."""

from collections.abc import Iterable

WORDS = {
    "nan": "Samples without a value were filled in by straight lines.",
    "inf": "Infinite samples were replaced by straight lines.",
    "flat": "No signal in {}: constant.",
    "clipped": "The amplifier was at its limit in {}: peaks are cut off.",
    "short": "The recording is shorter than half of what the model was trained on.",
    "cropped": "The recording is a little longer than the model's input; its last instant was left out.",
    "resampled": "",  # what every recording of another rate goes through is not worth a warning
    "windows": "The recording is longer than the model's input: the answer is the mean over {} overlapping windows.",
    "derived": "{} computed from I and II, which is exact.",
    "missing": "{} not in the file: the model was given a flat line there. Read the answer with care.",
    "unit?": "The voltages are far from those of an ECG. Is the unit right?",
    "checksum": "The samples of {} do not match the checksum in the header: the file was changed or damaged.",
    "unfamiliar": "Unlike every known case, more than 99 % of those are: the model may not know such recordings.",
}
NOTES = ("derived", "windows", "cropped", "resampled")
"""Flags that are no reason for doubt."""


def sentences(flags: Iterable[str]) -> list[tuple[str, bool]]:
    """One sentence per kind of flag, and whether it is a warning. That a missing lead is flat goes without saying."""
    flags = list(flags)
    leads: dict[str, list[str]] = {}
    for flag in flags:
        kind, _, of = flag.partition(":")
        if kind != "flat" or f"missing:{of}" not in flags:
            leads.setdefault(kind, []).append(of)
    found = [(WORDS.get(kind, f"{kind} {{}}").format(", ".join(of)), kind not in NOTES) for kind, of in leads.items()]
    return [(text, warning) for text, warning in found if text]
