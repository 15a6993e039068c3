"""`torchrun --nproc-per-node 8 -m ecgmatch_dist.doctor`."""

import tyro

from ecgmatch_dist.doctor import main

tyro.cli(main, prog="ecgmatch doctor")
