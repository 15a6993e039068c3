"""From a configuration to the method that it names."""

from torch import Tensor

from ecgmatch_dist.config import Config
from ecgmatch_dist.methods import configs
from ecgmatch_dist.methods.base import Method
from ecgmatch_dist.methods.ecgmatch import ECGMatch
from ecgmatch_dist.methods.supervised import Supervised


def build(config: Config, labels: Tensor) -> Method:
    """The method of `config`; `labels` [N_B, C] are those of the whole labelled part."""
    match config.method:
        case configs.ECGMatch():
            return ECGMatch(config.method, labels, config.bank.view)
        case configs.Supervised():
            return Supervised()
