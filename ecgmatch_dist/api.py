"""What the commands do, as functions. Each imports what it needs when it is called: torch takes a second."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import pandas as pd

    from ecgmatch_dist.config import Config
    from ecgmatch_dist.predict.model import Predictor
    from ecgmatch_dist.record.folder import RunFolder


def train(config: "Config") -> "RunFolder":
    """Train one run, and before it the runs that it starts from (`ecgmatch train`).

    Under torchrun, every rank calls it. A finished run is not trained again, a started one is resumed.
    """
    from ecgmatch_dist.train import train

    return train(config)


def build_shards(
    recipe: str,
    raw: str | Path,
    out: str | Path,
    preset: Literal["paper", "official_code", "cpu", "few_labels", "demo"] = "paper",
    *,
    workers: int = 1,
    labels: str | Path | None = None,
) -> "pd.DataFrame":
    """Recordings under `raw` -> preprocessed shards in `out`/<database>/ (`ecgmatch shards build`). Returns the manifest.

    `recipe`: a name in shards/ or the path of a .toml file; `labels`: a CSV table instead of the recipe's labels.
    """
    from ecgmatch_dist.data.build import build
    from ecgmatch_dist.data.databases import load_recipe
    from ecgmatch_dist.data.preprocess import PRESETS

    table = None if labels is None else Path(labels)
    return build(load_recipe(recipe), Path(raw), Path(out), PRESETS[preset], workers, labels=table)


def make_split(
    shards: str | Path,
    protocol: Literal["within", "mix", "cross", "folds", "given"],
    *,
    database: str = "",
    databases: Sequence[str] = (),
    test: str = "",
    ratio: float | None = None,
    seed: int = 20,
    scheme: str = "",
    to: str | Path = "splits",
    labels: str | Path | None = None,
    labelled: str | Path | None = None,
    validation: str | Path | None = None,
    unlabelled_databases: Sequence[str] = (),
    name: str = "",
    strict: bool = False,
) -> Path:
    """Labelled, unlabelled, validation and test recordings in one file (`ecgmatch split`). Returns the file."""
    from ecgmatch_dist.data.splits import split_shards

    def path_of(file: str | Path | None) -> Path | None:
        return None if file is None else Path(file)

    (path,) = split_shards(
        str(shards),
        protocol,
        database,
        databases,
        test,
        ratio,
        (seed,),
        scheme,
        to=Path(to),
        labels=path_of(labels),
        labelled=path_of(labelled),
        validation=path_of(validation),
        unlabelled_databases=unlabelled_databases,
        name=name,
        strict=strict,
    )
    return path


def build_report(runs: str | Path, out: str | Path = "report") -> Path:
    """Tables, statistics and figures on one page (`ecgmatch report`). Returns the page."""
    from ecgmatch_dist.report.build import build_report

    return build_report(Path(runs), Path(out))


def load(
    folder: str | Path,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    *,
    batch: int = 32,
    nearest: int = 3,
    only: bool = True,
    trees: bool = False,
) -> "Predictor":
    """The model of a finished run, with its preprocessing, thresholds, calibration and known cases (`ecgmatch predict`).

    `folder`: of a run, or one that `ecgmatch export` wrote, or the name of such a one on the Hugging Face hub (`hub://org/name`).
    `batch`: windows that go through the network at once. `nearest`: known cases that each prediction names. `only`: Normal is
    not predicted beside another class. `trees`: the trees that the run has asked answer, too. `docs/predict.md` has examples.
    """
    from ecgmatch_dist.predict.model import Predictor

    return Predictor(folder, device, batch=batch, nearest=nearest, only=only, trees=trees)
