"""One page per recording: what the model says, how sure that is, where it looked, and which known cases are alike."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader
from markupsafe import Markup
from numpy.typing import NDArray

from ecgmatch_dist.data.formats.recording import Recording, RecordRef, Rejected
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.files.atomic import write_text
from ecgmatch_dist.predict.flags import sentences
from ecgmatch_dist.predict.influence import influence
from ecgmatch_dist.predict.known import KnownSignals
from ecgmatch_dist.predict.model import Predictor
from ecgmatch_dist.predict.paper import SECONDS, Picture, last_sample
from ecgmatch_dist.predict.prepare import prepare
from ecgmatch_dist.predict.read import Reader, label
from ecgmatch_dist.predict.result import SEEN, Case, Prediction

SMALLEST = 0.05  # logits; where no piece changes more, colours are pale: the evidence is spread over the recording
INDEX = "index.html"  # the list of pages; a recording may be called index, too
LONGEST_NAME = 100  # of a page without its suffix; a file system takes 255 bytes
TEMPLATES = Environment(loader=PackageLoader("ecgmatch_dist.predict", "."), autoescape=True, trim_blocks=True)


@dataclass(frozen=True)
class ClassRow:
    """A class on the page. Numbers in per cent of the bar's width where they are drawn."""

    short: str
    name: str
    calibrated: float
    probability: float
    threshold: float
    mark: float
    """Where the F2 threshold lies among the calibrated probabilities."""
    likely: bool
    predicted: bool
    recall: float | None
    """On the test part, at the F2 threshold."""
    precision: float | None


class Pages:
    """Pages of many recordings in one folder, and an index of them."""

    def __init__(self, model: Predictor, reader: Reader, refs: list[RecordRef], folder: Path, shards: str = "") -> None:
        self.model, self.reader, self.folder = model, reader, folder
        self.refs = {label(ref): ref for ref in refs}
        self.known = KnownSignals(model, shards)
        self.made: dict[str, Prediction] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def add(self, prediction: Prediction) -> Path:
        """Write the page of a recording that was predicted from a file."""
        name = base = re.sub(r"[^\w.-]+", "_", prediction.record)[:LONGEST_NAME].strip("._") or "ecg"
        number = 1
        while f"{name}.html".lower() in {INDEX, *(made.lower() for made in self.made)}:
            number += 1
            name = f"{base}-{number}"
        try:
            recording = self.reader.read(self.refs[prediction.path])
        except Rejected as error:
            raise UserError(f"{prediction.path}: it changed while it was used ({error})") from None
        path = self.folder / f"{name}.html"
        write_text(path, render(self.model, recording, prediction, self.known))
        self.made[path.name] = prediction
        return path

    def finish(self) -> Path:
        """Write the list of pages."""
        names = dict(zip(self.model.classes, self.model.scheme.classes, strict=True))
        text = TEMPLATES.get_template("index.html.jinja").render(run=self.model.name, made=self.made, names=names)
        write_text(self.folder / INDEX, text)
        return self.folder / INDEX


def render(model: Predictor, recording: Recording, prediction: Prediction, known: KnownSignals) -> str:
    """The page of one recording."""
    rows = class_rows(model, prediction)
    by_probability = sorted(rows, key=lambda row: -row.calibrated)
    shown = [row for row in by_probability if row.likely or row.predicted] or by_probability[:1]
    x = prepare(recording, model.inputs).x[
        0, :, : model.inputs.preprocess.length
    ]  # the beginning is enough for a picture
    effects, seconds = influence(model, x)
    marks = {row.short: (strength(effects[:, :, model.classes.index(row.short)]), seconds) for row in shown}
    name = prediction.record
    rate = model.inputs.preprocess.rate
    own = Picture(x[:, : last_sample(x)], rate, millivolts=False)
    total = recording.signal.shape[1] / recording.rate
    return TEMPLATES.get_template("page.html.jinja").render(
        run=model.name,
        prediction=prediction,
        rows=rows,
        shown=shown,
        flags=sentences(prediction.flags),
        picture=Markup(Picture(recording.signal, recording.rate, marks=marks).svg(f"The twelve leads of {name}")),
        own=Markup(own.svg(f"{name} as the model sees it")),
        cases=[(case, case_names(model, case), case_picture(case, known, rate)) for case in prediction.nearest],
        why_not=known.why_not,
        exported=model.exported,
        how_many=model.how_many,
        seen=SEEN if prediction.seen else "",
        gave_way=model.gave_way(prediction),
        seconds=total,
        longer=total > SECONDS + 0.5,
        rate=recording.rate,
        usual=model.cases.usual if prediction.nearest else 0,
        tested=model.tested is not None,
        trees=model.opinion.together.share if model.opinion else None,
        output=model.output,
        calibration=model.calibration,
    )


def class_rows(model: Predictor, prediction: Prediction) -> list[ClassRow]:
    marks = model.calibration.of_probabilities(model.thresholds)
    rows = []
    for c, (short, name) in enumerate(zip(model.classes, model.scheme.classes, strict=True)):
        test = model.tested.per_class.get(short) if model.tested else None
        rows.append(
            ClassRow(
                short=short,
                name=name,
                calibrated=prediction.calibrated[short],
                probability=prediction.probabilities[short],
                threshold=prediction.thresholds[short],
                mark=float(marks[c]),
                likely=short in prediction.likely,
                predicted=short in prediction.predicted,
                recall=test.recall if test else None,
                precision=test.precision if test else None,
            )
        )
    return rows


def strength(effect: NDArray[np.float32]) -> NDArray[np.float32]:
    """Changes of a logit [12, pieces] -> [-1, 1], by the largest of them."""
    scaled: NDArray[np.float32] = effect / max(float(np.abs(effect).max()), SMALLEST)
    return scaled


def case_names(model: Predictor, case: Case) -> list[str]:
    return [name for short, name in zip(model.classes, model.scheme.classes, strict=True) if short in case.classes]


def case_picture(case: Case, known: KnownSignals, rate: float) -> Any:
    x = known.read(case.id)
    return None if x is None else Markup(Picture(x, rate, millivolts=False).svg(f"The twelve leads of {case.id}"))
