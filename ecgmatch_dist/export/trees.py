"""Trees on measurements of the recordings that a run has learnt from: they go with its model (`ecgmatch export --trees`)."""

from pathlib import Path

from ecgmatch_dist.config import Config
from ecgmatch_dist.data.labels import load_scheme
from ecgmatch_dist.data.split_file import Split
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.measurements.trees import PUBLISHED, fit_trees
from ecgmatch_dist.measurements.trees_file import save_trees
from ecgmatch_dist.predict.model import Predictor
from ecgmatch_dist.readiness import open_store
from ecgmatch_dist.record.config_file import read_config


def write_trees(path: Path, model: Predictor, shards: str = "") -> int:
    """Grow trees on the labelled part of the run's split, and write them. `shards`: their folder or address; empty: the one in
    the run's config.json. Returns the number of recordings."""
    if not (model.folder / "split.json").is_file():
        raise UserError(
            f"--trees: {model.folder} is no run's folder, so its labelled recordings are not known; give the folder of the run"
        )
    split = Split.load(model.folder / "split.json")
    place = shards or str(read_config(model.folder / "config.json").settings["shards"])
    try:
        store = open_store(Config(split=model.folder / "split.json", shards=place), split)
    except UserError as error:
        raise error if shards else UserError(f"--trees: {error}, or give --shards, where they are now") from None
    classes = load_scheme(split.scheme).short
    if list(classes) != model.classes:
        raise UserError(
            f"--trees: the label scheme {split.scheme} has the classes {', '.join(classes)} by now, the model was trained on "
            f"{', '.join(model.classes)}; bring the scheme back"
        )
    rows, labels = split.rows(store)["labelled"], split.all_labels(store)["labelled"]
    trees = fit_trees(store, rows, labels, split.seed, settings=PUBLISHED)
    save_trees(path, trees.forests, model.classes)
    return len(rows)
