"""`ecgmatch` alone: what lies in this folder, and the command that comes next. Looks at names of files; needs no torch."""

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from shlex import quote

PRESET = {(500, 6144): "paper", (100, 1024): "few_labels"}
"""Rate and length of shards -> the preset to suggest for them."""
RECORDINGS = (".hea", ".dcm", ".edf", ".xml", ".scp", ".mat")
LOOKED_AT = 5000  # files in data/raw: enough to know whether there are recordings, also on a slow file system


def advise(folder: Path) -> list[str]:
    """Lines to print: what was found here, and what to do next."""
    runs = sorted(path.parent for path in (folder / "runs").glob("*/config.json"))
    splits = sorted((folder / "splits").glob("*.json"))
    shards = sorted(path.parent for path in (folder / "data" / "shards").glob("*/dataset.json"))
    if runs:
        return after_training(runs)
    if splits and shards:
        return ready_to_train(splits, shards)
    if shards:
        found = f"shards of {', '.join(path.name for path in shards)} in data/shards, and no split"
        return [found, f"ecgmatch split within --database {quote(shards[0].name)} --shards data/shards"]
    if recipe := adopted(folder):
        found = (
            f"a recipe, {recipe.name}, and no shards (look at {recipe.stem}_preview.html and at the lines marked EDIT)"
        )
        build = f"ecgmatch shards build {quote(recipe.name)} --raw YOUR_FOLDER --out data/shards --preset cpu"
        return [found, build]
    if any(recordings(folder / "data" / "raw")):
        found = "recordings in data/raw, and no shards (chapman: or another recipe in shards/, or your own: docs/own-data.md)"
        return [found, "ecgmatch shards build chapman --raw data/raw --out data/shards --preset cpu"]
    return [
        "no recordings, shards or runs here (data/raw, data/shards, splits, runs)",
        "ecgmatch demo                               # the whole path on synthetic ECGs, 5 minutes",
        "ecgmatch adopt YOUR_FOLDER --name my_data   # your own ECGs, of which some are labelled",
        "ecgmatch download chapman --to data/raw     # a public database",
        "ecgmatch predict chapman_ptbxl YOUR_ECG     # by the model that comes with the package",
    ]


def adopted(folder: Path) -> Path | None:
    """The recipe that `ecgmatch adopt` has written here: it has its preview beside it."""
    previews = sorted(folder.glob("*_preview.html"))
    recipes = (path.with_name(path.name.removesuffix("_preview.html") + ".toml") for path in previews)
    return next((path for path in recipes if path.is_file()), None)


def after_training(runs: list[Path]) -> list[str]:
    done = [run for run in runs if (run / "result.json").is_file()]
    found = f"{len(done)} finished runs in runs" if len(done) != 1 else "a finished run in runs"
    if len(done) < len(runs):
        left = next(run.name for run in runs if run not in done)
        found += f", {len(runs) - len(done)} unfinished ({left}): the command that began a run continues it"
    if not done:
        return [found, "ecgmatch monitor                           # TensorBoard"]
    kept = next((run for run in done if ".supervised" not in run.name), done[0])
    return [
        found,
        "ecgmatch report runs --out report           # tables, statistics, figures on one page",
        f"ecgmatch predict {quote(f'runs/{kept.name}')} new/ecg1.hea --pages pages",
    ]


def ready_to_train(splits: list[Path], shards: list[Path]) -> list[str]:
    split = quote(str(splits[0].relative_to(splits[0].parents[1])))
    found = f"shards of {', '.join(path.name for path in shards)}, {len(splits)} split{'s' * (len(splits) > 1)}, no run"
    preset = preset_for(shards[0])
    return [found, f"ecgmatch train{f' --preset {preset}' if preset else ''} --split {split} --shards data/shards"]


def preset_for(shards: Path) -> str:
    """Empty: no preset is meant for shards of this kind, or the file says nothing."""
    try:
        dataset = json.loads((shards / "dataset.json").read_text(encoding="utf-8"))
        return PRESET.get((dataset["rate"], dataset["length"]), "")
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def recordings(folder: Path) -> Iterator[Path]:
    files = islice(folder.rglob("*"), LOOKED_AT) if folder.is_dir() else iter(())
    return (path for path in files if path.suffix.lower() in RECORDINGS)
