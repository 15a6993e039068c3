"""The kept model of a run, ready for new recordings: `em.load`."""

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import expit

from ecgmatch_dist.data.formats.read import from_array
from ecgmatch_dist.data.formats.recording import Recording, Rejected
from ecgmatch_dist.data.labels import load_scheme
from ecgmatch_dist.data.preprocess import LEADS
from ecgmatch_dist.distributed.devices import pick_device, use_whole_fp32
from ecgmatch_dist.distributed.session import to_device
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.metrics import Metrics
from ecgmatch_dist.network.crops import over_crops
from ecgmatch_dist.network.model import build_model
from ecgmatch_dist.predict.cases import KnownCases
from ecgmatch_dist.predict.files import find_files
from ecgmatch_dist.predict.prepare import Inputs, Prepared, prepare
from ecgmatch_dist.predict.read import Reader, read_all
from ecgmatch_dist.predict.result import Failure, Prediction
from ecgmatch_dist.record.calibration import read_calibration
from ecgmatch_dist.record.hub import model_folder, weights_file, why_no_weights
from ecgmatch_dist.record.result import read_result
from ecgmatch_dist.record.second_opinion import SecondOpinion, load_opinion
from ecgmatch_dist.record.weights import REMEDY, load_weights

BY_ITSELF = "The model judges each class by itself: several may be true, or none."
ALONE = (
    "{} reaches its threshold, too. It stands alone by the label rule: it is not named beside another class that does."
)
STANDS_ALONE = "{} stands alone by the label rule: it is not named beside another class."
Floats = NDArray[np.floating[Any]]
Signal = NDArray[Any] | Sequence[Sequence[float]]


class Predictor:
    """A trained network with its preprocessing, thresholds, calibration and known cases. Legend: V leads, n samples, C classes,
    D features.

    `batch`: windows that go through the network at once; results do not depend on it. `only`: a class that the scheme declares
    as `only` (Normal) is not predicted beside another one; off, each class follows its threshold alone, as in the metrics.
    `trees`: the trees that the run has asked answer, too; thresholds and calibration are then those of both together.
    """

    def __init__(
        self,
        folder: str | Path,
        device: Literal["auto", "cpu", "cuda"] = "auto",
        *,
        batch: int = 32,
        nearest: int = 3,
        only: bool = True,
        trees: bool = False,
    ) -> None:
        self.folder, self.name = model_folder(folder)
        self.weights, self.exported = weights_file(self.folder)
        if not self.weights.is_file():
            raise UserError(f"{self.folder}: {why_no_weights(self.folder)}")
        state, self.notes = load_weights(self.weights)
        self.scheme = load_scheme(str(self.folder / "labels.toml") if self.exported else self.notes.scheme)
        self.classes, self.thresholds = list(self.notes.classes), np.array(self.notes.thresholds)
        self.opinion: SecondOpinion | None = None
        if trees:
            rate = self.notes.preprocess.rate
            self.opinion = load_opinion(self.folder, self.classes, rate, self.scheme.normal)
            self.thresholds, self.calibration = np.array(self.opinion.together.thresholds), self.opinion.calibration
        else:
            self.calibration = read_calibration(self.folder, len(self.classes))
        self.inputs = Inputs(self.notes.preprocess, self.notes.crop)
        self.device = pick_device(device, 0)
        use_whole_fp32(self.device)
        self.network = build_model(len(self.classes), self.notes.model, seed=0).eval().to(self.device)
        try:
            self.network.load_state_dict(state)
        except RuntimeError as error:  # torch lists every name and shape that differs
            first = " ".join(str(error).split("\n\t")[1:2]) or str(error)
            raise UserError(f"{self.weights}: the weights do not fit its settings ({first}); {REMEDY}") from None
        if batch < 1 or nearest < 0:
            raise UserError(f"batch = {batch}, nearest = {nearest}: at least 1, and at least 0")
        self.batch, self.count, self.only = batch, 0 if self.exported else nearest, only

    @cached_property
    def tested(self) -> Metrics | None:
        """How what answers did on the test part; None: an export, which does not say it."""
        if self.opinion:
            return self.opinion.together.test
        path = self.folder / "result.json"
        return read_result(path).test if path.is_file() else None

    @cached_property
    def cases(self) -> KnownCases:
        """The labelled and validation recordings of the run."""
        return KnownCases.of_run(self.folder, self.classes)

    def predict(
        self, signal: Signal, *, rate: float, leads: Sequence[str] = LEADS, unit: str = "mV", record: str = "array"
    ) -> Prediction:
        """The answer for one recording, [V, n] or [n, V], whose `leads` are named in their order.

        III, aVR, aVL and aVF are derived if they are missing; other missing leads are zero, with a flag. Raises UserError for
        what is no ECG.
        """
        return self._predict([self._prepare(signal, rate, leads, unit, record)])[0]

    def predict_many(
        self, signals: Iterable[Signal], *, rate: float, leads: Sequence[str] = LEADS, unit: str = "mV"
    ) -> Iterator[Prediction]:
        """The answers for many recordings, in batches: an array [b, V, n], or anything that yields arrays [V, n]."""
        every = (self._prepare(s, rate, leads, unit, f"array {i}") for i, s in enumerate(signals))
        while some := list(islice(every, self.batch)):
            yield from self._predict(some)

    def predict_files(
        self,
        paths: str | Path | Iterable[str | Path],
        *,
        rate: float | None = None,
        leads: Sequence[str] = (),
        unit: str = "",
        workers: int = 1,
    ) -> Iterator[Prediction | Failure]:
        """The answers for files, folders and lists of them (.txt), in order; a file that cannot be read is a Failure with the
        reason. `rate`, `leads` and `unit`: for files that do not say them."""
        some = [paths] if isinstance(paths, str | Path) else paths
        reader = Reader(self.inputs, rate, unit, tuple(leads))
        yield from self.answers(read_all(find_files(some, rate), reader, workers))

    def embed(self, signal: Signal, *, rate: float, leads: Sequence[str] = LEADS, unit: str = "mV") -> Floats:
        """The network's features of one recording, [D]: what the classifier and the nearest cases use."""
        _, features = self.outputs([self._prepare(signal, rate, leads, unit, "array")])
        return np.asarray(features[0])

    def predict_recording(self, recording: Recording, path: str = "") -> Prediction:
        """The answer for a recording that was read already. Raises Rejected."""
        return self._predict([prepare(recording, self.inputs, path)])[0]

    def answers(self, prepared: Iterable[Prepared | Failure]) -> Iterator[Prediction | Failure]:
        """The answers in the order of the recordings, computed in batches."""
        every = iter(prepared)
        while some := list(islice(every, self.batch)):
            good = iter(self._predict([entry for entry in some if isinstance(entry, Prepared)]))
            yield from (next(good) if isinstance(entry, Prepared) else entry for entry in some)

    @torch.no_grad()
    def outputs(self, prepared: Sequence[Prepared]) -> tuple[Floats, Floats]:
        """Logits [b, C] and features [b, D], the means over a recording's windows."""
        logits = np.zeros((len(prepared), len(self.classes)), np.float32)
        features: NDArray[np.float32] = np.zeros((len(prepared), self.network.classifier.in_features), np.float32)
        z, own = self.forward(np.concatenate([entry.x for entry in prepared]))
        counts = np.array([len(entry.x) for entry in prepared])
        owner = np.repeat(np.arange(len(prepared)), counts)
        np.add.at(logits, owner, own)
        np.add.at(features, owner, z)
        return logits / counts[:, None], features / counts[:, None]

    @torch.no_grad()
    def forward(self, x: NDArray[np.float16]) -> tuple[Floats, Floats]:
        """Windows [w, 12, T] -> features [w, D], logits [w, C], in the precision and with the crops of `evaluate`."""
        found: list[tuple[Floats, Floats]] = []
        for start in range(0, len(x), self.batch):
            part = to_device(x[start : start + self.batch], self.device).to(torch.float32)
            z, logits = over_crops(self.network, part, self.inputs.crop)
            found.append((z.cpu().numpy(), logits.cpu().numpy()))
        features, outputs = zip(*found, strict=True)
        return np.concatenate(features), np.concatenate(outputs)

    def decide(self, reached: NDArray[np.bool_]) -> tuple[str, ...]:
        """Names of the classes [C] that are reached; `only` classes give way to others."""
        names = [name for name, hit in zip(self.classes, reached, strict=True) if hit]
        alone = None if self.scheme.normal is None else self.scheme.short[self.scheme.normal]
        return tuple(name for name in names if not (self.only and name == alone and len(names) > 1))

    @property
    def output(self) -> str:
        """What `probabilities` are, in words."""
        return "output of both" if self.opinion else "network's output"

    @property
    def how_many(self) -> str:
        """How many classes an answer may name, in words."""
        alone = self.scheme.normal if self.only else None
        return BY_ITSELF if alone is None else f"{BY_ITSELF} {STANDS_ALONE.format(self.scheme.classes[alone])}"

    def gave_way(self, answer: Prediction) -> str:
        """Why a class that reaches its threshold is not in the answer, a sentence; empty: there is none."""
        for name, full in zip(self.classes, self.scheme.classes, strict=True):
            reached = answer.probabilities[name] >= answer.thresholds[name]
            if reached and name not in (*answer.predicted, *answer.likely):
                return ALONE.format(full)
        return ""

    def _prepare(self, signal: Signal, rate: float, leads: Sequence[str], unit: str, record: str) -> Prepared:
        try:
            recording = from_array(np.asarray(signal), rate=rate, unit=unit, leads=leads, key=record)
            return prepare(recording, self.inputs)
        except Rejected as error:
            raise UserError(f"{record}: {error}") from None

    def _predict(self, prepared: Sequence[Prepared]) -> list[Prediction]:
        if not prepared:
            return []
        logits, features = self.outputs(prepared)
        p, calibrated = expit(logits), self.calibration(logits)
        if self.opinion:
            p = self.opinion.beside(p, [entry.x for entry in prepared])
            calibrated = self.calibration.of_probabilities(p)
        nearest = self.cases.nearest(features, self.count) if self.count else [()] * len(prepared)
        return [
            Prediction(
                record=entry.record,
                path=entry.path,
                probabilities=dict(zip(self.classes, p[i].tolist(), strict=True)),
                calibrated=dict(zip(self.classes, calibrated[i].tolist(), strict=True)),
                thresholds=dict(zip(self.classes, self.thresholds.tolist(), strict=True)),
                predicted=self.decide(p[i] >= self.thresholds),
                likely=self.decide(calibrated[i] >= 0.5),
                flags=self._flags(entry, nearest[i]),
                nearest=nearest[i],
                features=features[i],
            )
            for i, entry in enumerate(prepared)
        ]

    def _flags(self, entry: Prepared, nearest: Sequence[Any]) -> tuple[str, ...]:
        strange = nearest and nearest[0].similarity < self.cases.rare
        return (*entry.flags, "unfamiliar") if strange else entry.flags
