"""From recordings to a trained model, in Python: synthetic ECGs, shards, a split, a supervised run and FixMatch from there.

python examples/train.py FOLDER           three minutes on two cores; again: what is done is not done again
"""

import sys
from dataclasses import replace
from pathlib import Path

import ecgmatch_dist as em
from ecgmatch_dist.data.synthetic.databases import make_databases
from ecgmatch_dist.methods.fixmatch import FixMatchSettings
from ecgmatch_dist.presets import demo


def main(folder: Path, recordings: int = 500, steps: int = 150) -> Path:
    """Train in `folder`; returns the run's folder."""
    make_databases(folder / "raw", recordings, databases=["chapman"])
    em.build_shards("chapman", folder / "raw", folder / "shards", preset="cpu")
    split = em.make_split(folder / "shards", "within", database="chapman", ratio=0.1, to=folder / "splits")

    settings = demo()
    config = replace(
        settings,
        split=split,
        shards=str(folder / "shards"),
        runs=folder / "runs",
        method=FixMatchSettings(threshold=0.9),
        optim=replace(settings.optim, steps=steps),
        pretrain=replace(settings.pretrain, steps=steps),
    )
    run = em.train(config)
    result = run.result()
    print(f"{run.path}: test MAP {result.test.map:.3f}, macro AUC {result.test.macro_auc:.3f}")
    return run.path


if __name__ == "__main__":
    main(Path(sys.argv[1]))
