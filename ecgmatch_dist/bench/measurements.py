"""Trees on ECG measurements alone, without a network: what they reach on a split, and what a run on the same split reaches."""

import time
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from ecgmatch_dist.config import Config
from ecgmatch_dist.data.labels import known
from ecgmatch_dist.data.split_file import Split
from ecgmatch_dist.measurements.trees import fit_trees
from ecgmatch_dist.metrics import macro_ap
from ecgmatch_dist.readiness import open_store
from ecgmatch_dist.record.folder import RunFolder

CHUNK = 512  # recordings in memory at a time


def main(split: tuple[Path, ...], shards: str = "data/shards", runs: Path | None = None) -> None:
    """Fit trees to the labelled part of each split and measure them on its test part, and on the unlabelled part as far as its
    labels are only hidden.

    Args:
        split: Files of splits.
        shards: Folder of the shards.
        runs: Folder of run folders: the test MAP of the runs on these splits is shown beside.
    """
    table = Table(title="MAP of trees on measurements", title_justify="left")
    table.add_column("split", overflow="fold")
    for name in ("labelled", "test", "hidden", "seconds"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("runs on the same split: test", overflow="fold")
    for path in split:
        table.add_row(*measured(Split.load(path), path, shards, runs))
    Console().print(table)


def measured(split: Split, path: Path, shards: str, runs: Path | None) -> list[str]:
    """One row of the table."""
    begin = time.perf_counter()
    store = open_store(Config(split=path, shards=shards), split)
    labels = split.all_labels(store)
    rows = split.rows(store)
    trees = fit_trees(store, rows["labelled"], labels["labelled"], split.seed)

    def reached(part: str) -> str:
        looked = known(labels[part])
        chosen = rows[part][looked]
        if not len(chosen):
            return "-"
        chunks = [chosen[at : at + CHUNK] for at in range(0, len(chosen), CHUNK)]
        p = np.concatenate([trees.predict(store.read(chunk)) for chunk in chunks])
        return f"{macro_ap(labels[part][looked], p):.3f}"

    test, hidden = reached("test"), reached("unlabelled")
    folders = [RunFolder(found) for found in sorted(runs.glob(f"{split.name}.*"))] if runs else []
    beside = [
        f"{folder.path.name.removeprefix(split.name + '.')} {folder.result().test.map:.3f}"
        for folder in folders
        if folder.finished
    ]
    return [
        split.name,
        str(len(rows["labelled"])),
        test,
        hidden,
        f"{time.perf_counter() - begin:.0f}",
        ", ".join(beside) or "-",
    ]
