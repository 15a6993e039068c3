"""`ecgmatch predict`: classes, probabilities, a picture and the nearest known cases of new ECGs."""

import base64
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ecg_plot
import numpy as np
import torch
import tyro
from jinja2 import Environment, PackageLoader
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from ecgmatch_dist.data.labels import load_scheme
from ecgmatch_dist.data.preprocess import Preprocess, preprocess
from ecgmatch_dist.data.recordings import LEADS, Recording, RecordRef, Rejected, read_recording
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.files.atomic import write_json, write_text
from ecgmatch_dist.network.crops import over_crops
from ecgmatch_dist.network.model import build_model
from ecgmatch_dist.record.predictions import predictions_file, read_predictions
from ecgmatch_dist.record.weights import load_weights


@dataclass(frozen=True)
class Case:
    """A recording with known labels, and how similar it is to the new one."""

    id: str
    similarity: float
    classes: list[str]


@dataclass(frozen=True)
class Prediction:
    """The model's output for one recording."""

    record: str
    probabilities: dict[str, float]
    predicted: list[str]
    flags: list[str]
    nearest: list[Case]


class Predictor:
    """The kept model of a finished run, with its thresholds, its preprocessing and its known cases."""

    def __init__(self, run: Path) -> None:
        state, notes = load_weights(run / "best.safetensors")
        self.classes, self.thresholds = list(notes.classes), np.array(notes.thresholds)
        self.names = load_scheme(notes.scheme).classes
        self.preprocess, self.crop = notes.preprocess, notes.crop
        self.model = build_model(len(self.classes), notes.model, seed=0).eval()
        self.model.load_state_dict(state)
        self.cases = known_cases(run)

    @torch.no_grad()
    def __call__(self, recording: Recording, nearest: int) -> Prediction:
        x, flags = preprocess(recording.signal, recording.rate, self.settings(recording))
        # Shards store half precision, so that is what the model was trained on.
        z, logits = over_crops(self.model, torch.from_numpy(x.astype(np.float16).astype(np.float32))[None], self.crop)
        p = logits.sigmoid()[0].numpy()
        predicted = [name for name, hit in zip(self.classes, p >= self.thresholds, strict=True) if hit]
        probabilities = dict(zip(self.classes, p.tolist(), strict=True))
        return Prediction(recording.key, probabilities, predicted, list(flags), self.nearest(z[0].numpy(), nearest))

    def settings(self, recording: Recording) -> Preprocess:
        """As the training shards were made; but a network that sees crops sees all of a longer recording."""
        if not self.crop:
            return self.preprocess
        samples = int(recording.signal.shape[1] * self.preprocess.rate / recording.rate)
        return replace(self.preprocess, length=max(samples, self.preprocess.length))

    def nearest(self, z: NDArray[np.float32], count: int) -> list[Case]:
        ids, labels, features = self.cases
        similarity = features @ (z / np.maximum(np.linalg.norm(z), 1e-12))
        order = np.argsort(-similarity, kind="stable")[:count]
        return [
            Case(str(ids[i]), float(similarity[i]), [c for c, y in zip(self.classes, labels[i], strict=True) if y == 1])
            for i in order
        ]


def known_cases(run: Path) -> tuple[NDArray[np.str_], NDArray[np.uint8], NDArray[np.float32]]:
    """Ids, labels and L2-normalised features of the labelled and validation recordings."""
    parts = [read_predictions(predictions_file(run, part)) for part in ("labelled", "validation")]
    ids, labels, _, features = (np.concatenate(column) for column in zip(*parts, strict=True))
    norms = np.linalg.norm(features, axis=1, keepdims=True)
    return ids, labels, (features / np.maximum(norms, 1e-12)).astype(np.float32)


def read_record(path: Path) -> Recording:
    """The WFDB record at `path`, which may lack the suffix."""
    stem = path.with_suffix("") if path.suffix in (".hea", ".dat", ".mat") else path
    try:
        return read_recording(RecordRef(stem.name, stem))
    except Rejected as error:
        raise UserError(f"{path}: {error}") from None


def draw_leads(recording: Recording) -> str:
    """At most ten seconds of the twelve leads on ECG paper, as SVG in base64."""
    signal = np.nan_to_num(recording.signal.astype(float))
    window = (0, min(10.0, signal.shape[1] / recording.rate))
    layout = {"lead_names": LEADS, "layout": "12lead", "time_mode": "sequential", "window": window}
    return base64.b64encode(ecg_plot.plot(signal, sample_rate=recording.rate, **layout).to_svg().encode()).decode()


def main(
    run: tyro.conf.Positional[Path],
    records: tyro.conf.Positional[tuple[Path, ...]],
    /,
    nearest: int = 3,
    out: Path | None = None,
) -> None:
    """Predict new recordings with the kept model of a finished run.

    Args:
        run: The run's folder.
        records: WFDB records (the .hea file, or its name without suffix).
        nearest: Number of known cases to show.
        out: Folder for predictions.json and a page with pictures.
    """
    if not records:
        raise UserError("no records: give at least one .hea file after the run's folder")
    predictor = Predictor(run)
    console, results = Console(), []
    for path in records:
        recording = read_record(path)
        prediction = predictor(recording, nearest)
        console.print(result_table(prediction, predictor))
        results.append((prediction, draw_leads(recording) if out else ""))
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / "predictions.json", [as_json(prediction) for prediction, _ in results])
        page = Environment(loader=PackageLoader("ecgmatch_dist", "."), autoescape=True).get_template(
            "predict.html.jinja"
        )
        thresholds = dict(zip(predictor.classes, predictor.thresholds.tolist(), strict=True))
        names = dict(zip(predictor.classes, predictor.names, strict=True))
        write_text(out / "index.html", page.render(run=run.name, results=results, thresholds=thresholds, names=names))
        console.print(f"page: {out / 'index.html'}", highlight=False)


def as_json(prediction: Prediction) -> dict[str, Any]:
    return {**vars(prediction), "nearest": [vars(case) for case in prediction.nearest]}


def result_table(prediction: Prediction, predictor: Predictor) -> Table:
    out = Table("class", "probability", "threshold", "", title=prediction.record, title_justify="left")
    for name, threshold in zip(predictor.classes, predictor.thresholds, strict=True):
        mark = "predicted" if name in prediction.predicted else ""
        out.add_row(name, f"{prediction.probabilities[name]:.3f}", f"{threshold:.3f}", mark)
    cases = "; ".join(f"{c.id} ({', '.join(c.classes) or 'none'}, {c.similarity:.3f})" for c in prediction.nearest)
    flags = f"\nflags: {' '.join(prediction.flags)}" if prediction.flags else ""
    out.caption, out.caption_justify = f"nearest known cases: {cases}{flags}", "left"
    return out
