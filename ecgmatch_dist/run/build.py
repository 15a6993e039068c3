"""Build a run from a configuration, a split and the runs that it starts from."""

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from safetensors.torch import load_file

from ecgmatch_dist.augment import ECGAugment, why_no_kernel
from ecgmatch_dist.config import Config, fitted
from ecgmatch_dist.data.labels import known, load_scheme
from ecgmatch_dist.data.split_file import Split, digest
from ecgmatch_dist.data.stream import LoadedPart, Stream
from ecgmatch_dist.data.unlabelled import open_stream
from ecgmatch_dist.data.web_stream import WebStream
from ecgmatch_dist.distributed.session import Ranks, host_buffer
from ecgmatch_dist.errors import require
from ecgmatch_dist.learner import build_learner
from ecgmatch_dist.losses import annotation_weights
from ecgmatch_dist.readiness import open_archive, open_store
from ecgmatch_dist.record.diagnostics import Diagnostics
from ecgmatch_dist.record.folder import RunFolder
from ecgmatch_dist.record.logger import RunLogger
from ecgmatch_dist.record.start_weights import begins_with, starting_weights
from ecgmatch_dist.recovery.checkpoint import Checkpointer
from ecgmatch_dist.recovery.finite import FiniteCheck
from ecgmatch_dist.run.parts import Parts, as_seen_by, parts_of
from ecgmatch_dist.run.run import Run

LABELLED, UNLABELLED = 1, 2  # give the two streams of a run different seeds


def build_run(config: Config, ranks: Ranks, folder: RunFolder, split: Split, starts: Sequence[RunFolder]) -> Run:
    """Build a run. It starts from the finished runs `starts`: the weights of the first, the predictions of all."""
    fingerprint = config.fingerprint()
    parts = open_parts(config, ranks, folder, split)
    config = fit_to_parts(config, parts)
    config.check_shares(ranks.world)
    parts = as_seen_by(config.method, parts)
    seed = (config.seed or split.seed) + 1000 * config.member
    y_b = parts.targets(ranks.device, torch.float64 if config.runtime.precision == "fp64" else torch.float32)
    unlabelled_labels = parts.labels["unlabelled"]
    classes = list(load_scheme(split.scheme).short)
    weights = [load_file(start.best) for start in starts]
    if config.begins_with:
        weights = [starting_weights(config, parts.store.preprocess, classes)]
    learner = build_learner(config, ranks, y_b, len(unlabelled_labels), seed, weights)
    labelled, unlabelled = open_streams(config, ranks, parts, seed)
    run = Run(
        config=config,
        fingerprint=fingerprint,
        ranks=ranks,
        folder=folder,
        split=split,
        parts=parts,
        seed=seed,
        learner=learner,
        y_b=y_b,
        weight_b=annotation_weights(y_b),
        labelled=labelled,
        unlabelled=unlabelled,
        augment=ECGAugment(config.augment),
        logger=RunLogger(folder.path, ranks.main, config.optim.steps, folder.fence),
        checkpointer=build_checkpointer(fingerprint, folder, split, parts),
        diagnostics=Diagnostics(classes, torch.from_numpy(unlabelled_labels)),
        finite=FiniteCheck(ranks.device),
        starts=[start.path.name for start in starts],
    )
    if config.begins_with:
        run.logger.say(begins_with(config, weights[0]))
    tell_what_was_built(run)
    if config.method.asks_trees:
        learner.method.set_opinion(run.second_opinion())
    return run


def open_parts(config: Config, ranks: Ranks, folder: RunFolder, split: Split) -> Parts:
    """The shards of the split, and the archive. A collective."""
    store = open_store(config, split)
    archive = open_archive(config, split, store, folder, ranks)
    crop, length = config.augment.crop, store.preprocess.length
    require(crop <= length, "augment.crop", crop, f"at most {length}, as the shards have")
    return parts_of(split, store, archive, config.data.unlabelled)


def fit_to_parts(config: Config, parts: Parts) -> Config:
    """The configuration with steps and batches for these parts."""
    hidden = known(parts.labels["unlabelled"])  # of the others nobody knows the labels
    return fitted(config, len(parts.labels["labelled"]), len(hidden) + len(parts.archive), int(hidden.sum()))


def open_streams(
    config: Config, ranks: Ranks, parts: Parts, seed: int
) -> tuple[Stream | None, Stream | WebStream | None]:
    """The labelled and the unlabelled stream, as far as the method reads them."""
    labelled, unlabelled, share = None, None, (ranks.rank, ranks.world)
    buffer = partial(host_buffer, length=parts.store.preprocess.length, device=ranks.device)
    if config.method.needs_labels:
        loaded = LoadedPart(parts.store, parts.rows["labelled"])
        order = (config.optim.labelled_batch, 4 * seed + LABELLED, *share)
        labelled = Stream(loaded, np.arange(len(loaded.x)), *order, buffer=buffer)
    if config.method.uses_unlabelled:
        order = (config.optim.unlabelled_batch, 4 * seed + UNLABELLED, *share)
        unlabelled = open_stream(config.data, parts.store, parts.rows["unlabelled"], parts.archive, *order, buffer)
    return labelled, unlabelled


def build_checkpointer(fingerprint: str, folder: RunFolder, split: Split, parts: Parts) -> Checkpointer:
    """Its checkpoints are refused by a run of other settings, shards, split or archive."""
    must_match = {"configuration": fingerprint, "manifest": digest(split.manifests), "split": split.sha256}
    must_match |= {"archive": parts.archive.sha256} if len(parts.archive) else {}
    return Checkpointer(folder.path / "checkpoints", must_match, folder.fence)


def tell_what_was_built(run: Run) -> None:
    if run.ranks.device.type == "cuda" and (why := why_no_kernel()):
        run.logger.say(f"views: by torch's operations, which are slower than one kernel: {why}")
    if run.learner.bank:
        run.logger.say(run.learner.bank.describe())
    if archive := run.parts.archive:
        run.logger.say(f"archive: {len(archive):,} recordings; left out, with keys of the split: {archive.left_out:,}")
