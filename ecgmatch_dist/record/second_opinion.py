"""`opinion/` in the folder of a run whose method asks trees: what its network and its trees answer together.

    opinion.json              the share of the trees, thresholds, metrics on validation and test; checksums of the trees
    trees.safetensors         the trees of the labelled part; without it, those beside the model's weights
    public.safetensors        the trees that came with the weights, if any did
    calibration.json, predictions/     as in the run folder, of both together

`ecgmatch predict --trees` answers from it. An exported model has it without predictions.
"""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from ecgmatch_dist.data.index import file_sha256
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.files.atomic import json_text
from ecgmatch_dist.files.strict import check_format, convert, read_object
from ecgmatch_dist.measurements.opinion import as_measured, mixture
from ecgmatch_dist.measurements.trees import MeasurementTrees, PublicTrees
from ecgmatch_dist.measurements.trees_file import NAME as OWN
from ecgmatch_dist.measurements.trees_file import OtherMeasurements, load_trees, save_trees
from ecgmatch_dist.metrics import Metrics
from ecgmatch_dist.record.calibration import Calibration, read_calibration
from ecgmatch_dist.record.config_file import read_config

FOLDER, FILE, PUBLIC = "opinion", "opinion.json", "public.safetensors"
FILES = tuple(f"{FOLDER}/{name}" for name in (FILE, OWN, PUBLIC, "calibration.json"))
"""What an exported model has of it."""
FORMAT = 1
AGAIN = "rename result.json in the run's folder and give its training command again, which only measures it anew"
ANEW = "it measures ECGs otherwise than this version: train it anew, with a --tag"
Write = Callable[[Path, Callable[[Path], object]], None]
"""Writes a file by a function, all of it or nothing."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Together:
    """opinion.json: how network and trees do together."""

    share: float
    """Of the trees in the answer, chosen on the validation part."""
    trees: tuple[str, ...] = ()
    """Checksums of the trees: of the labelled part and, if there are any, of those that came with the weights."""
    thresholds: tuple[float, ...]
    validation: Metrics
    test: Metrics
    format: int = FORMAT


@dataclass(frozen=True, eq=False)
class SecondOpinion:
    """Ready to answer. `normal`: the class that stands beside no other one, if there is one."""

    together: Together
    checksum: str
    """Of opinion.json: other trees, shares or thresholds are another opinion."""
    trees: MeasurementTrees
    calibration: Calibration
    normal: int | None

    def beside(self, p: NDArray[np.floating], windows: Sequence[NDArray[np.floating]]) -> NDArray[np.float64]:
        """The network's probabilities p [b, C] and the trees' of each recording's windows [w, 12, T], together: [b, C]."""
        network, share = torch.from_numpy(p.astype(np.float32)), self.together.share
        if not share:
            return np.asarray(mixture(network, network, share, self.normal).numpy(), np.float64)
        asked = self.trees.predict(np.concatenate(windows).astype(np.float32))
        ends = np.cumsum([len(each) for each in windows])[:-1]
        trees = np.stack([each.mean(0) for each in np.split(asked, ends)])
        # a threshold is some recording's probability: but for a last digit, the numbers must be those that the run has measured
        told = as_measured(torch.from_numpy(trees).float())
        return np.asarray(mixture(network, told, share, self.normal).numpy(), np.float64)


def folder_of(run: Path) -> Path:
    return run / FOLDER


def save_opinion(run: Path, trees: MeasurementTrees, classes: Sequence[str], together: Together, write: Write) -> None:
    """Write trees and result; opinion.json, the last one, marks the folder as complete."""
    folder, public, answers = folder_of(run), trees.public, 0
    if public:
        answers = len(public.forests.trees)
        names = classes if public.same_classes else [f"class {number}" for number in range(answers)]
        write(folder / PUBLIC, lambda path: save_trees(path, public.forests, names))
    else:
        (folder / PUBLIC).unlink(missing_ok=True)
    write(folder / OWN, lambda path: save_trees(path, trees.forests, classes, answers))
    together = replace(together, trees=checksums(folder / OWN, folder / PUBLIC))
    write(folder / FILE, lambda path: path.write_text(json_text(asdict(together)), encoding="utf-8"))


def checksums(own: Path, public: Path) -> tuple[str, ...]:
    return tuple(file_sha256(path) for path in (own, public) if path.is_file())


def begin_anew(run: Path) -> None:
    """From here until `save_opinion` has ended, the folder is incomplete."""
    (folder_of(run) / FILE).unlink(missing_ok=True)


def copy_opinion(model: Path, to: Path) -> None:
    """What a copy of the model needs to answer with its trees, if it can."""
    for name in FILES:
        if (model / name).is_file():
            folder_of(to).mkdir(exist_ok=True)
            shutil.copyfile(model / name, to / name)


def read_together(run: Path) -> Together | None:
    """How network and trees do together; None: the run has asked no trees, or an older version has finished it."""
    path = folder_of(run) / FILE
    if not path.is_file():
        return None
    value = read_object(path, AGAIN)
    check_format(value, FORMAT, path, AGAIN)
    found = convert(value, Together, str(path))
    for name, number in (("share", found.share), *(("a threshold", each) for each in found.thresholds)):
        if not 0 <= number <= 1:
            raise UserError(f"{path}: {name} is {number}: between 0 and 1; {AGAIN}")
    return found


def load_opinion(run: Path, classes: Sequence[str], rate: float, normal: int | None) -> SecondOpinion:
    """Everything that it takes to answer with the trees. A UserError says why there is nothing."""
    together = read_together(run)
    folder = folder_of(run)
    if together is None:
        raise UserError(
            f"--trees: {run} has no trees to ask (no {FOLDER}/{FILE}). Runs that asked them have, as those of the preset "
            f"few_labels{why_not(run)}; an export has them by `ecgmatch export RUN --to NEW --trees`"
        )
    if len(together.thresholds) != len(classes):
        raise UserError(f"{folder / FILE}: {len(together.thresholds)} thresholds for {len(classes)} classes; {AGAIN}")
    path = folder / OWN if (folder / OWN).is_file() else run / OWN
    if checksums(path, folder / PUBLIC) != together.trees:
        wrong = f"these are not the trees that {FILE} was measured with; bring them back, or"
        unknown = f"an older version has not noted which trees {FILE} was measured with;"
        raise UserError(f"{path}: {wrong if together.trees else unknown} {AGAIN}; an export: make it anew from its run")
    public = None
    try:
        if (folder / PUBLIC).is_file():
            forests, names = load_trees(folder / PUBLIC)
            public = PublicTrees(forests, same_classes=list(names) == list(classes))
        own, names = load_trees(path, len(public.forests.trees) if public else 0)
    except OtherMeasurements:
        raise UserError(f"{path}: {ANEW}") from None
    if list(names) != list(classes):
        raise UserError(f"{path}: trees of the classes {', '.join(names)}, not of the model's; {AGAIN}")
    trees, calibration = MeasurementTrees(own, rate, public), read_calibration(folder, len(classes))
    return SecondOpinion(together, file_sha256(folder / FILE), trees, calibration, normal)


def why_not(run: Path) -> str:
    """What to do about a run that has asked trees and cannot answer with them; empty: it has asked none."""
    if not (run / "config.json").is_file() or not (run / "result.json").is_file():
        return ""
    config = read_config(run / "config.json")
    method = config.settings.get("method")
    if not isinstance(method, dict) or not method.get("measurements"):
        return ""
    return (
        f"; this one's log says why not, or an older version has finished it: {AGAIN if config.is_of_today() else ANEW}"
    )
