"""The run folder: all files of a run, readable by people and by the report (docs/run-folder.md)."""

import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from ecgmatch_dist.config import Config
from ecgmatch_dist.data.split_file import Split
from ecgmatch_dist.distributed.collectives import all_sum_nograd
from ecgmatch_dist.distributed.session import Ranks
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.evaluate import Predictions
from ecgmatch_dist.record import calibration as calibration_file
from ecgmatch_dist.record import config_file
from ecgmatch_dist.record.ancestors import ancestors, attribution
from ecgmatch_dist.record.calibration import fit_calibration
from ecgmatch_dist.record.environment import describe_environment
from ecgmatch_dist.record.model_card import model_card
from ecgmatch_dist.record.predictions import predictions_file, write_arrays
from ecgmatch_dist.record.result import Result, read_result
from ecgmatch_dist.record.weights import ModelNotes, save_weights
from ecgmatch_dist.recovery.generations import Fence


class RunFolder:
    """`runs/<name>/`. Rank 0 writes, all ranks read."""

    fence: Fence
    """Keeps older copies of the run from writing; set by `enter`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def best(self) -> Path:
        """Weights of the best model."""
        return self.path / "best.safetensors"

    @property
    def finished(self) -> bool:
        return (self.path / "result.json").is_file()

    def result(self) -> Result:
        """The result of a finished run."""
        return read_result(self.path / "result.json")

    def check(self, config: Config) -> None:
        """Refuse a folder that holds a run with other settings."""
        path = self.path / "config.json"
        if path.is_file():
            config_file.read_config(path).check(config, self.path)

    def enter(self, config: Config, ranks: Ranks) -> None:
        """Acquire the fence and record the settings. A collective: if rank 0 fails, all ranks raise."""
        generation, refusal = 0, None
        if ranks.main:
            try:
                self.fence = Fence.acquire(self.path)
                self._record_start(config, ranks.world)
                generation = self.fence.generation
            except UserError as error:
                refusal = error
            except OSError as error:
                refusal = UserError(f"{self.path}: cannot be written: {error}")
        generation = int(all_sum_nograd(torch.tensor(generation)).item())  # all ranks wait here
        if not generation:
            raise refusal or UserError(f"{self.path}: rank 0 could not enter it, and reports why")
        self.fence = Fence(self.path, generation, main=ranks.main)

    def _record_start(self, config: Config, world: int) -> None:
        self.fence.write_json(self.path / "config.json", config_file.to_file(config))
        self.fence.write_json(self.path / "environment.json", asdict(describe_environment(world)))
        self.fence.write(self.path / "split.json", lambda path: shutil.copyfile(config.split, path))

    def save_best(self, model: nn.Module, notes: ModelNotes) -> None:
        """Write the weights of the best model, with what is needed to use them."""
        self.fence.write(self.best, lambda path: save_weights(path, model, notes))

    def restore_best(self, saved: Path) -> None:
        """Restore the best weights of a checkpoint: those in the folder may be of a later step, which will be repeated."""
        self.fence.write(self.best, lambda path: shutil.copyfile(saved, path))

    def save_predictions(self, part: str, ids: Sequence[str], predictions: Predictions) -> None:
        (self.path / "predictions").mkdir(parents=True, exist_ok=True)
        arrays = {
            "ids": np.array(ids),
            "labels": predictions.labels,
            "probabilities": predictions.probabilities.astype(np.float32),
            "features": predictions.features.astype(np.float32),
        }
        self.save_arrays(predictions_file(self.path, part), arrays)
        if part == "validation":
            calibration = fit_calibration(predictions.labels, arrays["probabilities"])
            self.fence.write_json(self.path / "calibration.json", calibration_file.to_file(calibration))

    def save_arrays(self, path: Path, arrays: dict[str, NDArray[Any]]) -> None:
        self.fence.write(path, lambda temporary: write_arrays(temporary, arrays))

    def finish(self, result: Result, split: Split) -> None:
        """Write the model card, then the result, which marks the run as finished."""
        card = model_card(result, split, attribution(ancestors(self.path)))
        self.fence.write_text(self.path / "model_card.md", card)
        self.fence.write_json(self.path / "result.json", asdict(result))
