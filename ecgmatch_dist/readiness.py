"""Before a run is built: do its shards fit its settings, and what is labelled?"""

from pathlib import Path

from ecgmatch_dist.config import Config
from ecgmatch_dist.data.split_file import Split
from ecgmatch_dist.data.split_summary import readiness
from ecgmatch_dist.data.store import ShardStore
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.presets import fitting


def open_store(config: Config, split: Split) -> ShardStore:
    """The shards of a split."""
    cache = Path(config.data.cache) if config.data.cache else None
    store = ShardStore(config.shards, split.databases, cache, int(config.data.cache_gib * 2**30))
    split.check(store)
    return store


def check_before_training(config: Config, split: Split, main: bool) -> None:
    """Refuse shards that the settings are not meant for. Tell what is labelled, unlabelled, unknown and rare."""
    store, meant = open_store(config, split), config.data
    found = f"{store.rate} Hz, 12 x {store.length}"
    if meant.rate not in (0, store.rate) or meant.length not in (0, store.length):
        presets = [f"--preset {name}" for name in fitting(store.rate, store.length)]
        own = f"--data.rate {store.rate} --data.length {store.length} if you mean it"
        raise UserError(
            f"{config.shards}: the shards are {found}, the settings are meant for {meant.rate or store.rate} Hz, "
            f"12 x {meant.length or store.length}; give {' or '.join(presets) or 'shards of that kind'}, or {own}"
        )
    for line in readiness(split, split.all_labels(store), found) if main else ():
        print(line, flush=True)
