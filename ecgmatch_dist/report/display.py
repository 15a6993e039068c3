"""Names of methods, databases and metrics in tables and figures, and their order."""

import hashlib
import re
from dataclasses import dataclass

from ecgmatch_dist.config import MethodSettings, methods

CONTROL = "ecgmatch"
"""The method that the others are tested against."""
DATABASES = {"g12ec": "G12EC", "ptbxl": "PTB-XL", "ningbo": "Ningbo", "chapman": "Chapman"}
PROTOCOLS = {"within": "Within one database", "cross": "Unseen database", "mix": "Databases mixed"}

SCHEMES = {
    "ecgmatch5": "the paper's five classes",
    "cinc25": "25 classes of the Challenge 2021",
    "ptbxl_super": "five superclasses of PTB-XL",
}


@dataclass(frozen=True)
class Metric:
    """One number of a run."""

    key: str
    label: str
    greater_is_better: bool

    @property
    def title(self) -> str:
        return f"{self.label} {'↑' if self.greater_is_better else '↓'}"


METRICS = (
    Metric("map", "MAP", True),
    Metric("macro_auc", "Macro AUC", True),
    Metric("macro_gbeta", "Macro G-beta", True),
    Metric("ranking_loss", "Ranking loss", False),
    Metric("hamming_loss", "Hamming loss", False),
    Metric("coverage", "Coverage", False),
)
CALIBRATION = (Metric("ece", "Calibration error", False), Metric("brier", "Brier score", False))
OF_CLASS = (Metric("ap", "Average precision", True), Metric("gbeta", "G-beta", True))


def method(key: str) -> str:
    """The method's title; its key where this version does not know it."""
    known = methods()
    return known[key].title if key in known else key


def method_sort_key(key: str) -> tuple[int, str]:
    """Methods in their order; an unknown one stands where new methods do."""
    known = methods()
    return (known[key].place if key in known else MethodSettings.place), key


def is_probe(key: str) -> bool:
    """A start without labels: tables show a linear probe of its features, which is ranked nowhere."""
    known = methods()
    return key in known and not known[key].needs_labels


def competes(key: str) -> bool:
    """Whether the method is a rival: not a probe, and not the upper bound, which knows all labels."""
    known = methods()
    return not is_probe(key) and not (key in known and known[key].knows_all_labels)


def database(key: str) -> str:
    return DATABASES.get(key, key)


def scheme(key: str) -> str:
    """What a label scheme's classes are; its key where it is somebody's own."""
    return SCHEMES.get(key, f"labels {key}")


def sort_key(key: str, known: dict[str, str]) -> tuple[int, str]:
    """Known names in their order, then the others by name."""
    return (list(known).index(key), "") if key in known else (len(known), key)


def slug(text: str) -> str:
    """A safe file name. Text that had to be changed gets a checksum, so that names stay distinct."""
    clean = re.sub(r"[^A-Za-z0-9_.+=-]+", "-", text).strip(".-")[:80]
    return clean if clean == text else f"{clean}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def percent(ratio: float) -> str:
    """0.05 -> "5 %"."""
    return f"{100 * ratio:g} %"
