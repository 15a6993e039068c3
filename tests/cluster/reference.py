"""`torchrun reference.py CONFIGS`: the runs of a JSON list of configurations, one after the other on the same ranks."""

import json
import sys
from pathlib import Path

import torch

from ecgmatch_dist.config import from_json
from ecgmatch_dist.distributed import session
from ecgmatch_dist.train import train

if __name__ == "__main__":
    torch.set_num_threads(1)
    with session("cpu") as ranks:
        for value in json.loads(Path(sys.argv[1]).read_text()):
            train(from_json(value), ranks)
