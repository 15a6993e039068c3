"""The doctor's small training in one process: `python -m ecgmatch_dist.doctor.alone DEVICE BATCH FILE`."""

import sys

import torch

from ecgmatch_dist.distributed.session import Ranks, use_device
from ecgmatch_dist.doctor.ranks import small_training

if __name__ == "__main__":
    device = torch.device(sys.argv[1])
    use_device(device)
    torch.save(small_training(Ranks(0, 1, 0, 1, device), int(sys.argv[2])), sys.argv[3])
