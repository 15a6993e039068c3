"""Before a run is built: do its shards fit its settings, what is labelled, and what is in its archive?"""

from dataclasses import asdict
from difflib import get_close_matches
from pathlib import Path

import torch

from ecgmatch_dist.config import Config, parted
from ecgmatch_dist.data import archive
from ecgmatch_dist.data.archive import Archive
from ecgmatch_dist.data.preprocess import PRESETS as BUILDS
from ecgmatch_dist.data.preprocess import Preprocess
from ecgmatch_dist.data.split_file import REMEDY, Split
from ecgmatch_dist.data.split_summary import readiness
from ecgmatch_dist.data.store import ShardStore
from ecgmatch_dist.distributed.collectives import all_sum_nograd
from ecgmatch_dist.distributed.session import Ranks
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.presets import fitting
from ecgmatch_dist.record.folder import RunFolder
from ecgmatch_dist.record.hub import model_folder, weights_file
from ecgmatch_dist.record.start_weights import FREE, check_not_seen, check_public_trees, starting_weights
from ecgmatch_dist.record.weights import read_notes

SHOWN = 5
"""Splits that an error names."""


def load_split(name: str | Path) -> Split:
    """The split that a run names. Where there is no such file, the error names those beside it, the most alike first."""
    path = Path(name)
    others = [] if path.exists() else sorted(file.name for file in path.parent.glob("*.json"))
    if others:
        some = get_close_matches(path.name, others, SHOWN, cutoff=0)
        more = f" and {len(others) - SHOWN} more" if len(others) > SHOWN else ""
        raise UserError(
            f"{path}: not found; {path.parent} has {', '.join(some)}{more}: give one with --split, or {REMEDY}"
        )
    return Split.load(path)


def open_store(config: Config, split: Split) -> ShardStore:
    """The shards of a split."""
    cache = Path(config.data.cache) if config.data.cache else None
    store = ShardStore(config.shards, split.databases, cache, int(config.data.cache_gib * 2**30))
    split.check(store)
    return store


def check_before_training(config: Config, split: Split, main: bool) -> None:
    """Refuse shards that the settings are not meant for, and weights that know the test part. Tell what is labelled,
    unlabelled, unknown and rare."""
    store, meant = open_store(config, split), config.data
    found = f"{store.rate} Hz, 12 x {store.length}"
    if meant.rate not in (0, store.rate) or meant.length not in (0, store.length):
        builds: dict[Preprocess, str] = {}
        for name, made in BUILDS.items():
            if (made.rate, made.length) == (meant.rate, meant.length):
                builds.setdefault(made, name)  # one name of each way to preprocess
        ways = [f"build them anew with `ecgmatch shards build --preset {name}`" for name in builds.values()]
        ways += [
            f"give --preset {' or --preset '.join(names)}" for names in [fitting(store.rate, store.length)] if names
        ]
        ways += [f"give --data.rate {store.rate} --data.length {store.length} if you mean it"]
        raise UserError(
            f"{config.shards}: the shards are {found}, the settings are meant for {meant.rate or store.rate} Hz, "
            f"12 x {meant.length or store.length}; {', or '.join(ways)}"
        )
    lines = readiness(split, split.all_labels(store), found)
    if config.weights:
        check_weights(config, store)
        told = [check_not_seen(config, split), check_public_trees(config) if config.method.asks_trees else ""]
        lines += [f"warning: {text}" for text in told if text]
    for line in lines if main else ():
        print(line, flush=True)


def check_weights(config: Config, store: ShardStore) -> None:
    """Refuse weights to begin with that do not fit. All that differs in network and preprocessing is told at once: each start
    takes a while."""
    path = weights_file(model_folder(parted(config.weights)[0])[0])[0]
    if path.is_file():
        notes = read_notes(path)
        own, theirs = asdict(config.model), asdict(notes.model)
        different = sorted(key for key in theirs.keys() - FREE if own[key] != theirs[key])
        wrong = []
        if notes.preprocess != store.preprocess:
            builds = [f" (`shards build --preset {name}`)" for name, made in BUILDS.items() if made == notes.preprocess]
            needs, have = (f"{p.rate} Hz, 12 x {p.length}" for p in (notes.preprocess, store.preprocess))
            wrong = [
                f"it reads signals of another preprocessing ({needs}) than the shards have ({have}): build shards as it needs "
                f"them{''.join(builds[:1])}"
            ]
        if wrong or len(different) > 1:
            options = " ".join(f"--model.{key.replace('_', '-')} {theirs[key]}" for key in different)
            wrong += [f"its network is another: give {options}"] if options else []
            raise UserError(f"{path}: the model does not fit this run; {'; '.join(wrong)}; or begin with another model")
    starting_weights(config, store.preprocess, ())


def open_archive(config: Config, split: Split, store: ShardStore, folder: RunFolder, ranks: Ranks) -> Archive:
    """What `data.archive` holds: as it was listed when the run began, or listed now. A collective."""
    if not config.data.archive or not config.method.uses_unlabelled:
        return Archive()
    path = folder.path / archive.NAME
    if all_sum_nograd(torch.tensor(int(ranks.main and path.is_file()))).item():  # another node may not see it yet
        return archive.read_archive(path)
    taken = {name.partition("/")[2] for rows in split.rows(store).values() for name in store.ids(rows)}
    found = archive.list_archive(config.data.archive, store.length, taken, ranks.rank, ranks.world)
    if ranks.main:
        folder.fence.write_json(path, asdict(found))
    return found
