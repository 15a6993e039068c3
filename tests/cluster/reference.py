"""`torchrun -m tests.cluster.reference CONFIGS`: the runs of a JSON list of configurations, one after the other."""

import json
import sys
from pathlib import Path

from ecgmatch_dist.config import from_json
from ecgmatch_dist.distributed.session import session
from ecgmatch_dist.train import train

if __name__ == "__main__":
    with session("cpu"):  # one process group for all of them
        for value in json.loads(Path(sys.argv[1]).read_text()):
            train(from_json(value))
