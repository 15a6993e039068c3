"""What methods, databases, metrics and settings are called in tables and figures, and in which order they stand."""

import hashlib
import re
from dataclasses import dataclass

METHODS = {
    "supervised": "Supervised",
    "mixmatch": "MixMatch",
    "fixmatch": "FixMatch",
    "flexmatch": "FlexMatch",
    "dst": "DST",
    "percentmatch": "PercentMatch",
    "softmatch": "SoftMatch",
    "ups": "UPS",
    "mixed_mean_teacher": "Mixed Mean Teacher",
    "msdnn": "MSDNN",
    "ecgmatch": "ECGMatch",
    "fully_supervised": "Fully supervised",
}
CONTROL = "ecgmatch"
"""The method that the others are tested against."""
UPPER_BOUND = "fully_supervised"
"""It knows all labels of the training part."""
DATABASES = {"g12ec": "G12EC", "ptbxl": "PTB-XL", "ningbo": "Ningbo", "chapman": "Chapman"}
PROTOCOLS = {"within": "Within one database", "cross": "Unseen database", "mix": "Databases mixed"}


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
    return METHODS.get(key, key)


def database(key: str) -> str:
    return DATABASES.get(key, key)


def place(key: str, known: dict[str, str]) -> tuple[int, str]:
    """Sort key: known names in their order, then the others by name."""
    return (list(known).index(key), "") if key in known else (len(known), key)


def slug(text: str) -> str:
    """A name that is safe as a file's, and still its own: what had to be changed is marked by a checksum."""
    clean = re.sub(r"[^A-Za-z0-9_.+=-]+", "-", text).strip(".-")[:80]
    return clean if clean == text else f"{clean}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def percent(ratio: float) -> str:
    """0.05 -> "5 %"."""
    return f"{100 * ratio:g} %"
