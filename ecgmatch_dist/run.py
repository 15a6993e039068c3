"""The run folder: everything that is known about a run, in files that people and the report can open."""

import dataclasses
import datetime
import glob
import importlib.metadata
import json
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import distributed as dist
from torch import nn

from ecgmatch_dist import __version__
from ecgmatch_dist.config import Config
from ecgmatch_dist.distributed import Ranks, all_sum_nograd
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.evaluate import Predictions
from ecgmatch_dist.fence import Fence

PACKAGES = (
    "torch",
    "numpy",
    "scipy",
    "scikit-learn",
    "pandas",
    "webdataset",
    "wfdb",
    "faiss-cpu",
    "faiss-gpu",
    "submitit",
)


def environment(world_size: int) -> dict[str, Any]:
    """Who computed this, where and with what."""
    packages = {}
    for name in PACKAGES:
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    here = Path(__file__).parent
    git = subprocess.run(
        ["git", "-C", here, "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    )
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] or [platform.machine()]
    return {
        "version": __version__,
        "git": git.stdout.strip() or None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "packages": packages,
        "host": socket.gethostname(),
        "command": sys.argv,
        "world_size": world_size,
        "devices": devices,
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


class RunFolder:
    """`runs/<name>/`. Rank 0 writes, all ranks read."""

    fence: Fence
    """Whether this copy of the run may still write; known since `enter`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def best(self) -> Path:
        """Weights of the model that is kept."""
        return self.path / "best.safetensors"

    @property
    def result(self) -> dict[str, Any] | None:
        """The result of a finished run."""
        path = self.path / "result.json"
        return json.loads(path.read_text()) if path.is_file() else None

    def check(self, config: Config) -> None:
        """Refuse a folder in which another configuration ran."""
        path = self.path / "config.json"
        if not path.is_file():
            return
        recorded = json.loads(path.read_text())
        if recorded["meaning"] == config.meaning():
            return
        field = _first_difference(recorded, config.to_json())
        raise UserError(
            f"{self.path} holds a run with another configuration ({field}): "
            "give this one a --tag or --name of its own, or remove the folder"
        )

    def enter(self, config: Config, ranks: Ranks) -> None:
        """Become the one copy of this run that writes here, and note what is run. Called by all ranks: if rank 0 cannot, none
        goes on."""
        generation, refusal = 0, None
        if ranks.main:
            try:
                self.fence = Fence.take(self.path)
                self._note(config, ranks.world)
                generation = self.fence.generation
            except UserError as error:
                refusal = error
            except OSError as error:
                refusal = UserError(f"{self.path}: cannot be written: {error}")
        generation = int(all_sum_nograd(torch.tensor(generation)).item())  # all ranks wait for it here
        if not generation:
            raise refusal or UserError(f"{self.path}: rank 0 could not enter it, and tells why")
        self.fence = Fence(self.path, generation, looks=ranks.main)

    def _note(self, config: Config, world: int) -> None:
        self.fence.write_json(self.path / "config.json", {**config.to_json(), "meaning": config.meaning()})
        self.fence.write_json(self.path / "environment.json", environment(world))
        self.fence.write(self.path / "split.json", lambda path: shutil.copyfile(config.split, path))

    def save_best(self, model: nn.Module, facts: dict[str, Any]) -> None:
        """The kept weights, with what is needed to use them: classes, thresholds, sampling rate, length, width."""
        state = {name: t for name, t in model.state_dict().items() if not name.startswith("auxiliary.")}
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
        metadata = {name: json.dumps(value) for name, value in facts.items()}
        self.fence.write(self.best, lambda path: save_file(tensors, path, metadata))

    def restore_best(self, kept: Path) -> None:
        """Back to the weights that a checkpoint kept: those here may be of a step that is now to be done again."""
        self.fence.write(self.best, lambda path: shutil.copyfile(kept, path))

    def save_predictions(self, part: str, ids: Sequence[str], predictions: Predictions) -> None:
        (self.path / "predictions").mkdir(exist_ok=True)
        p, z = predictions.probabilities.astype(np.float32), predictions.features.astype(np.float32)
        name = f"predictions/{part}.npz"
        self.save_arrays(name, ids=np.array(ids), labels=predictions.labels, probabilities=p, features=z)

    def save_arrays(self, name: str, **arrays: NDArray[Any]) -> None:
        def write(path: Path) -> None:
            with path.open("wb") as file:
                np.savez(file, allow_pickle=False, **arrays)

        self.fence.write(self.path / name, write)

    def finish(self, result: dict[str, Any]) -> None:
        """Write the model card, then the result: its presence means that the run is finished."""
        self.fence.write_text(self.path / "model_card.md", model_card(result))
        self.fence.write_json(self.path / "result.json", result)


def start_of(config: Config, split: str, ranks: Ranks, member: int = 0) -> Config:
    """The supervised run that `config` starts from, or another member of its committee: one of the same meaning in the folder
    of runs, whatever it is called; else a new one, under the run's tag if the plain name is taken. Rank 0 looks, all ranks
    use what it found."""
    start = config.supervised(member)
    if ranks.main:
        found = config.runs.glob(f"{glob.escape(split)}.supervised*/config.json")
        # Finished ones first: of two that mean the same, the other may be at work in a job of its own.
        paths = sorted(found, key=lambda path: not (path.parent / "result.json").is_file())
        records = [json.loads(path.read_text()) for path in paths]
        fitting = [record for record in records if record["meaning"] == start.meaning()]
        if fitting:
            start = dataclasses.replace(start, name=fitting[0]["name"], tag=fitting[0]["tag"])
        elif any((record["tag"], record["name"]) == (start.tag, "") for record in records):
            start = dataclasses.replace(start, tag=",".join(filter(None, [config.tag, start.tag])))
    names = [start.name, start.tag]
    if ranks.world > 1:
        dist.broadcast_object_list(names, src=0)
    return dataclasses.replace(start, name=names[0], tag=names[1])


def _first_difference(old: dict[str, Any], new: dict[str, Any], where: str = "") -> str:
    for key, value in new.items():
        before = old.get(key)
        if isinstance(value, dict) and isinstance(before, dict):
            if found := _first_difference(before, value, f"{where}{key}."):
                return found
        elif before != value and key not in ("split", "shards", "runs", "name", "tag"):
            return f"{where}{key} was {before!r}, is {value!r}"
    return ""


def model_card(result: dict[str, Any]) -> str:
    """What the model is, what it was trained on, how good it is and what it must not be used for."""
    test = result["test"]
    rows = "\n".join(
        f"| {name} | {v['ap']:.3f} | {v['auc']:.3f} | {v['recall']:.3f} | {v['precision']:.3f} | {v['threshold']:.3f} |"
        for name, v in test["per_class"].items()
        if name not in test["absent"]
    )
    names = ("map", "macro_auc", "macro_gbeta", "ranking_loss", "hamming_loss", "coverage")
    values = " | ".join(f"{test[name]:.3f}" for name in names)
    return f"""# {result["name"]}

Multi-label 12-lead ECG classifier ({", ".join(result["classes"])}), trained with {result["method"]} on
{", ".join(result["databases"])} ({result["protocol"]} protocol, {result["ratio"]:.1%} of the training part labelled, seed
{result["seed"]}). The weights are those of step {result["best_step"]}, chosen by validation MAP; thresholds maximise F2 on
the validation part. The test part chose nothing.

| test | MAP | macro AUC | macro G-beta | ranking loss | Hamming loss | coverage |
| --- | --- | --- | --- | --- | --- | --- |
| | {values} |

| class | AP | AUC | recall | precision | threshold |
| --- | --- | --- | --- | --- | --- |
{rows}

For research. Not a medical device: it has not been validated for any clinical decision. Recordings must be preprocessed as
the training shards were (sampling rate, length, filter: see `best.safetensors`).
"""
