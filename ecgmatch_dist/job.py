"""The parts of a run, built from its configuration: data, networks, banks, optimiser; saved and resumed as one."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor

from ecgmatch_dist.augment import ECGAugment
from ecgmatch_dist.checkpoint import Checkpointer
from ecgmatch_dist.config import Config
from ecgmatch_dist.data.labels import load_scheme
from ecgmatch_dist.data.splits import Split, digest
from ecgmatch_dist.data.store import ShardStore
from ecgmatch_dist.data.stream import Batch, Stream, finite
from ecgmatch_dist.dealt import Rows
from ecgmatch_dist.diagnostics import Diagnostics
from ecgmatch_dist.distributed import Ranks, barrier, to_device
from ecgmatch_dist.evaluate import Predictions, predict
from ecgmatch_dist.learner import Learner, build_learner
from ecgmatch_dist.methods.base import Views
from ecgmatch_dist.methods.configs import FullySupervised
from ecgmatch_dist.monitor import Monitor
from ecgmatch_dist.run import RunFolder
from ecgmatch_dist.schedule import pack_optimizer, unpack_optimizer
from ecgmatch_dist.watchdog import during

LABELLED, UNLABELLED = 1, 2  # the two streams of a seed


class Loaded:
    """A part that is small enough to be read once; has the store's `read`."""

    def __init__(self, store: ShardStore, rows: NDArray[np.int64]) -> None:
        self.x = store.read(rows)

    def read(self, rows: NDArray[np.int64], out: NDArray[np.float16] | None = None) -> NDArray[np.float16]:
        return np.take(self.x, rows, axis=0, out=out)


@dataclass
class Best:
    """The kept model: highest validation MAP so far, ties to the later step as in the official code."""

    map: float = -1.0
    step: int = 0
    thresholds: list[float] = field(default_factory=list)
    checks_since: int = 0

    def update(self, step: int, map_: float, thresholds: list[float]) -> bool:
        if map_ < self.map:
            self.checks_since += 1
            return False
        self.map, self.step, self.thresholds, self.checks_since = map_, step, thresholds, 0
        return True


@dataclass
class Job(Learner):
    """A run under way: what learns, its data, its files."""

    config: Config
    ranks: Ranks
    folder: RunFolder
    split: Split
    store: ShardStore
    seed: int
    labels: dict[str, NDArray[np.uint8]]
    rows: dict[str, NDArray[np.int64]]
    y_b: Tensor
    labelled: Stream
    unlabelled: Stream | None
    augment: ECGAugment
    monitor: Monitor
    checkpointer: Checkpointer
    diagnostics: Diagnostics
    dtype: torch.dtype
    starts: list[str]
    best: Best = field(default_factory=Best)
    step: int = 0
    seconds: float = 0.0
    stalled: float = 0.0
    """Seconds that the loop has waited for checkpoints since the last log."""

    @property
    def classes(self) -> list[str]:
        return list(load_scheme(self.split.scheme).short)

    def batches(self) -> Iterator[tuple[Batch, Batch | None]]:
        """This rank's share of the global batches, from the current step on."""
        start, stop, readers = self.step, self.config.optim.steps, self.config.runtime.readers
        labelled = self.labelled.iterate(start, stop, readers=1)
        unlabelled = self.unlabelled.iterate(start, stop, readers=readers) if self.unlabelled else None
        for step in range(start, stop):
            with during("reading", step + 1):
                batches = next(labelled), next(unlabelled) if unlabelled else None
            yield batches

    def views(self, labelled: Batch, unlabelled: Batch | None, step: int) -> Views:
        ids_b, x_b = self.to_device(labelled)
        ids_u, x_u = self.to_device(unlabelled) if unlabelled else (ids_b[:0], x_b[:0])
        return Views(x_b, self.y_b[ids_b], ids_b, x_u, ids_u, self.augment, self.seed, step)

    def to_device(self, batch: Batch) -> tuple[Tensor, Tensor]:
        device = self.ranks.device
        return to_device(batch.ids, device), to_device(batch.x, device).to(self.dtype)

    def bank_rows(self) -> dict[str, Rows]:
        """This rank's block of the banks, for checkpoints."""
        bank = self.bank
        return {name: Rows(t, bank.rows, bank.within) for name, t in bank.state().items()} if bank else {}

    def save(self) -> None:
        """Everything that the next step depends on, behind the next steps."""
        begin = time.perf_counter()
        state: dict[str, Mapping[str, Tensor | Rows]] = {
            "student": self.model.state_dict(),
            "teacher": self.teacher.module.state_dict(),
            "method": self.method.state_dict(),
            "optimizer": pack_optimizer(self.optimizer),
        }
        if self.bank and self.bank.is_first_replica:
            state["bank"] = self.bank_rows()
        counters = {"step": self.step, "best": vars(self.best), "seconds": self.seconds}
        self.checkpointer.save(self.step, state, counters, self.folder.best if self.best.step else None)
        self.stalled += time.perf_counter() - begin

    def resume(self) -> bool:
        """Go on from the latest checkpoint, if there is one; on any number of ranks."""
        checkpoint, notes = self.checkpointer.latest()
        for note in notes:
            self.monitor.say(note)
        if checkpoint is None:
            return False
        tensors = checkpoint.load({f"bank.{name}": rows for name, rows in self.bank_rows().items()})

        def part(prefix: str) -> dict[str, Tensor]:
            return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}

        self.model.load_state_dict(part("student."))
        self.teacher.module.load_state_dict(part("teacher."))
        self.method.load_state_dict(part("method."))
        unpack_optimizer(self.optimizer, part("optimizer."))
        if self.bank:
            self.bank.load(part("bank."))
        self.step, self.seconds = checkpoint.counters["step"], checkpoint.counters["seconds"]
        self.best = Best(**checkpoint.counters["best"])
        if self.ranks.main and checkpoint.best:
            self.folder.restore_best(checkpoint.best)
        return True

    def ended(self) -> str | None:
        """Why no step is left to be done, if so: the run was killed between its last step and its result."""
        if self.step >= self.config.optim.steps:
            return "steps"
        return "patience" if self.best.checks_since >= self.config.evaluate.patience else None

    @property
    def kept(self) -> torch.nn.Module:
        """The network that is validated and kept."""
        return self.teacher.module if self.config.evaluate.model == "teacher" else self.model

    def ids(self, part: str) -> list[str]:
        """database/key of the recordings of a part."""
        ids: list[str] = self.store.manifest["id"].iloc[self.rows[part]].tolist()
        return ids

    def predict(self, part: str, most: int | None = None) -> Predictions:
        """Of all recordings of a part, or its first `most`, on every rank."""
        share = (self.ranks.rank, self.ranks.world)
        batches = finite(self.store, self.rows[part][:most], self.config.evaluate.batch, *share)
        return predict(self.kept, batches, self.labels[part][:most], self.ranks.device, self.dtype)

    def keep_best(self) -> None:
        if self.ranks.main:
            facts = {
                "classes": self.classes,
                "scheme": self.split.scheme,
                "thresholds": self.best.thresholds,
                "preprocess": self.store.preprocess,
                "model": vars(self.config.model),
                "step": self.best.step,
            }
            self.folder.save_best(self.kept, facts)

    def load_best(self) -> None:
        barrier()
        missing = self.kept.load_state_dict(load_file(self.folder.best), strict=False)
        assert all(name.startswith("auxiliary.") for name in missing.missing_keys), missing

    def result(self, reason: str, measured: dict[str, Any]) -> dict[str, Any]:
        """What result.json holds."""
        split, config = self.split, self.config
        return {
            "name": self.folder.path.name,
            "split": split.name,
            "split_sha256": split.sha256,
            "protocol": split.protocol,
            "databases": list(split.databases),
            "test_database": split.test_database,
            "ratio": split.ratio,
            "seed": split.seed,
            "scheme": split.scheme,
            "classes": self.classes,
            "method": config.method.name,
            "tag": config.tag,
            "steps": self.step,
            "best_step": self.best.step,
            "stopped": reason,
            "seconds": round(self.seconds, 1),
            "world_size": self.ranks.world,
            "thresholds": self.best.thresholds,
            "started_from": self.starts[0] if self.starts else None,
            "committee": self.starts[1:],
            "config_meaning": config.meaning(),
            **measured,
        }

    def unlabelled_pass(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Every unlabelled signal once; see `methods.base.Pass`."""
        share = (self.ranks.rank, self.ranks.world)
        for batch in finite(self.store, self.rows["unlabelled"], self.config.evaluate.batch, *share):
            yield self.to_device(Batch(batch.ids, batch.x))


def build(config: Config, ranks: Ranks, folder: RunFolder, split: Split, starts: Sequence[RunFolder]) -> Job:
    """Make every part of the run; of the finished runs `starts`, it begins with the weights of the first."""
    cache = Path(config.data.cache) if config.data.cache else None
    store = ShardStore(config.shards, split.databases, cache, int(config.data.cache_gib * 2**30))
    split.check(store)
    labels = {part: split.labels(store, part) for part in split.parts}
    rows = {part: store.rows(ids) for part, ids in split.parts.items()}
    if isinstance(config.method, FullySupervised):  # the upper bound knows all labels of the training part
        rows["labelled"] = np.concatenate([rows["labelled"], rows["unlabelled"]])
        labels["labelled"] = np.concatenate([labels["labelled"], labels["unlabelled"]])
    seed = (config.seed or split.seed) + 1000 * config.member
    dtype = torch.float64 if config.runtime.precision == "fp64" else torch.float32
    y_b = torch.from_numpy(labels["labelled"]).to(ranks.device, dtype)
    weights = [load_file(start.best) for start in starts]
    learner = build_learner(config, ranks, y_b, len(rows["unlabelled"]), seed, weights)
    share = (ranks.rank, ranks.world)
    own = Loaded(store, rows["labelled"])
    labelled = Stream(own, np.arange(len(own.x)), config.optim.labelled_batch, 4 * seed + LABELLED, *share)
    unlabelled = None
    if learner.method.uses_unlabelled:
        unlabelled = Stream(
            store,
            rows["unlabelled"],
            config.optim.unlabelled_batch,
            4 * seed + UNLABELLED,
            *share,
            config.data.window or None,
        )
    fits = {"configuration": config.meaning(), "manifest": digest(split.manifests), "split": split.sha256}
    monitor = Monitor(folder.path, ranks.main, config.optim.steps, folder.fence)
    if learner.bank:
        monitor.say(learner.bank.describe())
    return Job(
        **vars(learner),
        config=config,
        ranks=ranks,
        folder=folder,
        split=split,
        store=store,
        seed=seed,
        labels=labels,
        rows=rows,
        y_b=y_b,
        labelled=labelled,
        unlabelled=unlabelled,
        augment=ECGAugment(config.augment),
        monitor=monitor,
        checkpointer=Checkpointer(folder.path / "checkpoints", fits, folder.fence),
        diagnostics=Diagnostics(list(load_scheme(split.scheme).short), torch.from_numpy(labels["unlabelled"])),
        dtype=dtype,
        starts=[start.path.name for start in starts],
    )
