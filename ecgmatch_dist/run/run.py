"""A run: its learner, data and files. Saves and resumes them, and measures the model."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field

import torch
from safetensors.torch import load_file
from torch import Tensor

from ecgmatch_dist.augment import ECGAugment
from ecgmatch_dist.config import Config
from ecgmatch_dist.data.labels import load_scheme
from ecgmatch_dist.data.split_file import Split
from ecgmatch_dist.data.stream import Batch, FiniteBatch, Stream, finite
from ecgmatch_dist.data.web_stream import WebStream
from ecgmatch_dist.distributed.collectives import barrier, from_rank_0
from ecgmatch_dist.distributed.session import Ranks, to_device
from ecgmatch_dist.distributed.whereabouts import during
from ecgmatch_dist.evaluate import Best, Predictions, predict
from ecgmatch_dist.learner import Learner
from ecgmatch_dist.measurements.opinion import Opinion
from ecgmatch_dist.measurements.trees import MeasurementTrees, fit_trees
from ecgmatch_dist.measurements.trees_file import as_saved
from ecgmatch_dist.methods.views import Views
from ecgmatch_dist.metrics import Metrics
from ecgmatch_dist.network.optim import pack_optimizer, unpack_optimizer
from ecgmatch_dist.network.probe import classifier_input, linear_probe
from ecgmatch_dist.record.diagnostics import Diagnostics
from ecgmatch_dist.record.folder import RunFolder
from ecgmatch_dist.record.logger import RunLogger
from ecgmatch_dist.record.result import Result
from ecgmatch_dist.record.start_weights import public_trees
from ecgmatch_dist.record.weights import ModelNotes
from ecgmatch_dist.recovery.checkpoint import Checkpointer
from ecgmatch_dist.recovery.dcp import Rows
from ecgmatch_dist.recovery.finite import FiniteCheck, named
from ecgmatch_dist.run.parts import Parts


@dataclass
class Run:
    """Everything that the training loop needs."""

    config: Config
    """As it is trained: with steps and batches for this split."""
    fingerprint: str
    """Of the configuration as it was asked for."""
    ranks: Ranks
    folder: RunFolder
    split: Split
    parts: Parts
    seed: int
    learner: Learner
    y_b: Tensor
    """Labels of the labelled part on the device, [N_B, C]; NaN where nobody has looked."""
    weight_b: Tensor | None
    """Their weights, [N_B, C]; None: every label is known."""
    labelled: Stream | None
    unlabelled: Stream | WebStream | None
    augment: ECGAugment
    logger: RunLogger
    checkpointer: Checkpointer
    diagnostics: Diagnostics
    finite: FiniteCheck
    starts: list[str]
    """Names of the runs that this one starts from."""
    best: Best = field(default_factory=Best)
    step: int = 0
    seconds: float = 0.0
    stalled: float = 0.0
    """Seconds that checkpoints have blocked the loop since the last log line."""

    @property
    def classes(self) -> list[str]:
        return list(load_scheme(self.split.scheme).short)

    def batches(self) -> Iterator[tuple[Batch | None, Batch | None]]:
        """This rank's share of the global batches, from the current step on."""
        start, stop = self.step, self.config.optim.steps
        readers = self.config.runtime.readers or (8 if self.ranks.device.type == "cuda" else 2)
        labelled = self.labelled.iterate(start, stop, readers=1) if self.labelled else None
        unlabelled = self.unlabelled.iterate(start, stop, readers, max(4, readers)) if self.unlabelled else None
        for step in range(start, stop):
            with during("reading", step + 1):
                batches = next(labelled) if labelled else None, next(unlabelled) if unlabelled else None
            yield batches

    def views(self, labelled: Batch | None, unlabelled: Batch | None) -> Views:
        """The batches of the current step on the device, with their views."""
        some = labelled or unlabelled
        assert some is not None
        empty = Batch(some.ids[:0], some.x[:0])
        (ids_b, x_b), (ids_u, x_u) = self._to_device(labelled or empty), self._to_device(unlabelled or empty)
        weight_b = None if self.weight_b is None else self.weight_b[ids_b]
        return Views(x_b, self.y_b[ids_b], ids_b, x_u, ids_u, self.augment, self.seed, self.step, weight_b)

    def recordings(self, step: int) -> tuple[list[str], list[str]]:
        """database/key of the recordings in this rank's batches of `step` (from 1), and of those that are not finite."""
        streams = [(part, s) for part, s in (("labelled", self.labelled), ("unlabelled", self.unlabelled)) if s]
        parts = [named(batch := stream[step - 1], self.parts.ids(part, batch.ids)) for part, stream in streams]
        return [name for names, _ in parts for name in names], [name for _, wrong in parts for name in wrong]

    def unlabelled_pass(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Every unlabelled signal once; see `methods.views.Pass`."""
        for batch in self._once("unlabelled", title="all unlabelled signals"):
            yield self._to_device(Batch(batch.ids, batch.x))

    def _once(self, part: str, limit: int | None = None, title: str = "") -> Iterator[FiniteBatch]:
        """One pass over a part, or over its first `limit` recordings, with a bar if it has a title."""
        share = (self.ranks.rank, self.ranks.world)
        # The size of a forward pass is for a whole CPU machine, or for one GPU.
        batch = self.config.evaluate.batch * (self.ranks.world if self.ranks.device.type == "cuda" else 1)
        if part == "unlabelled" and isinstance(self.unlabelled, WebStream):
            return self.unlabelled.once(batch, limit)
        rows = self.parts.rows[part][:limit]
        batches = finite(self.parts.store, rows, batch, *share)
        return self.logger.track(batches, title, -(-len(rows) // batch)) if title else batches

    def _to_device(self, batch: Batch) -> tuple[Tensor, Tensor]:
        device = self.ranks.device
        return to_device(batch.ids, device), to_device(batch.x, device).to(self.y_b.dtype)

    # Checkpoints

    def _bank_rows(self) -> dict[str, Rows]:
        """This rank's block of the banks."""
        bank = self.learner.bank
        return {name: Rows(t, bank.rows, bank.within) for name, t in bank.state().items()} if bank else {}

    def save(self) -> None:
        """Write a checkpoint of everything that the next step depends on, in the background."""
        begin, learner = time.perf_counter(), self.learner
        state: dict[str, Mapping[str, Tensor | Rows]] = {
            "student": learner.model.state_dict(),
            "teacher": learner.teacher.state_dict(),
            "method": learner.method.state_dict(),
            "optimizer": pack_optimizer(learner.optimizer),
        }
        if learner.bank and learner.bank.is_first_replica:
            state["bank"] = self._bank_rows()
        counters = {"step": self.step, "best": asdict(self.best), "seconds": self.seconds}
        self.checkpointer.save(self.step, state, counters, self.folder.best if self.best.step else None)
        self.stalled += time.perf_counter() - begin

    def resume(self) -> bool:
        """Continue from the latest checkpoint, on any number of ranks. False: there is none."""
        checkpoint, notes = self.checkpointer.latest()
        for note in notes:
            self.logger.say(note)
        if checkpoint is None:
            return False
        tensors = checkpoint.load({f"bank.{name}": rows for name, rows in self._bank_rows().items()})

        def part(prefix: str) -> dict[str, Tensor]:
            return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}

        learner = self.learner
        learner.model.load_state_dict(part("student."))
        learner.teacher.load_state_dict(part("teacher."))
        learner.method.load_state_dict(part("method."))
        unpack_optimizer(learner.optimizer, part("optimizer."))
        if learner.bank:
            learner.bank.load(part("bank."))
        self.step, self.seconds = checkpoint.counters["step"], checkpoint.counters["seconds"]
        self.best = Best(**checkpoint.counters["best"])
        if self.ranks.main and checkpoint.best:
            self.folder.restore_best(checkpoint.best)
        return True

    def ended(self) -> str | None:
        """Why training has ended, if the run was killed between its last step and its result; else None."""
        if self.step >= self.config.optim.steps:
            return "steps"
        return "patience" if self.best.checks_since >= self.config.evaluate.patience else None

    # Measuring

    @property
    def kept(self) -> torch.nn.Module:
        """The network that is validated and kept."""
        return self.learner.teacher.module if self.config.evaluate.model == "teacher" else self.learner.model

    def predict(self, part: str, limit: int | None = None) -> Predictions:
        """Predictions of a part, or of its first `limit` recordings, on every rank."""
        device, crop = self.ranks.device, self.config.augment.crop
        batches = self._once(part, limit, f"predict {part}")
        precision = self.learner.student.precision if device.type == "cuda" else "fp32"
        labels = self.parts.labels[part][:limit]
        return predict(self.kept, batches, labels, device, self.y_b.dtype, crop, precision)

    def second_opinion(self, saved: bool = False) -> Opinion:
        """Trees on measurements of the labelled part, made when they are first asked, and trees that came with the weights of
        the chain. The validation part weighs them. `saved`: as their file will have them, rounded."""
        parts = self.parts

        def predict_by(model: torch.nn.Module, part: str) -> Predictions:
            return predict(model, self._once(part), parts.labels[part], self.ranks.device, self.y_b.dtype)

        labels = parts.labels["labelled"]

        def fit() -> MeasurementTrees:
            public = public_trees(self.config, self.classes)
            trees = fit_trees(parts.store, parts.rows["labelled"], labels, self.seed, public)
            return MeasurementTrees(as_saved(trees.forests), trees.rate, public) if saved else trees

        return Opinion(fit, predict_by, self.logger.say, load_scheme(self.split.scheme).normal)

    def fit_probe(self) -> None:
        """Replace the classifier of the network that is kept by a linear probe of the labelled part."""
        found = self.predict("labelled")
        classifier = self.kept.classifier
        assert isinstance(classifier, torch.nn.Linear)
        features = classifier_input(self.kept, found.features)
        for own, value in zip(classifier.parameters(), linear_probe(features, found.labels), strict=True):
            own.data.copy_(from_rank_0(torch.from_numpy(value).to(self.ranks.device)))

    def keep_best(self) -> None:
        """Write the current weights as the best ones."""
        if self.ranks.main:
            notes = ModelNotes(
                classes=tuple(self.classes),
                scheme=self.split.scheme,
                thresholds=tuple(self.best.thresholds),
                preprocess=self.parts.store.preprocess,
                model=self.config.model,
                crop=self.config.augment.crop,
                step=self.best.step,
            )
            self.folder.save_best(self.kept, notes)

    def load_best(self) -> None:
        """Load the best weights."""
        barrier()
        missing = self.kept.load_state_dict(load_file(self.folder.best), strict=False)
        assert all(name.startswith("auxiliary.") for name in missing.missing_keys), missing

    def worse_than_start(self) -> str:
        """A warning if the run has not reached the validation MAP of the run that it started from; else an empty text."""
        start = RunFolder(self.config.runs / self.starts[0]) if self.starts else None
        if start is None or not start.finished or start.result().validation.map <= self.best.map:
            return ""
        return (
            f"warning: the start was better: {start.path.name} has a validation MAP of {start.result().validation.map:.4f}, "
            f"this run {self.best.map:.4f}"
        )

    def result(self, reason: str, measured: dict[str, Metrics]) -> Result:
        """The content of result.json."""
        split, config = self.split, self.config
        return Result(
            name=self.folder.path.name,
            split=split.name,
            split_sha256=split.sha256,
            protocol=split.protocol,
            databases=split.databases,
            test_database=split.test_database,
            ratio=split.ratio,
            seed=split.seed,
            scheme=split.scheme,
            classes=tuple(self.classes),
            method=config.method.name,
            tag=config.tag,
            steps=self.step,
            best_step=self.best.step,
            stopped=reason,
            seconds=round(self.seconds, 1),
            world_size=self.ranks.world,
            precision=self.learner.student.precision,
            thresholds=tuple(self.best.thresholds),
            started_from=self.starts[0] if self.starts else None,
            committee=tuple(self.starts[1:]),
            fingerprint=self.fingerprint,
            validation=measured["validation"],
            test=measured["test"],
        )
