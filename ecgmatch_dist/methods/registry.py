"""From a configuration to the method that it names."""

from torch import Tensor

from ecgmatch_dist.config import Config
from ecgmatch_dist.methods import configs
from ecgmatch_dist.methods.base import Method
from ecgmatch_dist.methods.dst import DST
from ecgmatch_dist.methods.ecgmatch import ECGMatch
from ecgmatch_dist.methods.fixmatch import FixMatch
from ecgmatch_dist.methods.flexmatch import FlexMatch
from ecgmatch_dist.methods.mixmatch import MixMatch
from ecgmatch_dist.methods.msdnn import MSDNN
from ecgmatch_dist.methods.percentmatch import PercentMatch
from ecgmatch_dist.methods.softmatch import SoftMatch
from ecgmatch_dist.methods.supervised import Supervised
from ecgmatch_dist.methods.ups import UPS


def build(config: Config, labels: Tensor, rows: int, seed: int) -> Method:
    """The method of `config`; `labels` [N_B, C] of the whole labelled part, `rows` in the unlabelled part."""
    classes, steps, width, device = labels.shape[1], config.optim.steps, config.model.width, labels.device
    match config.method:
        case configs.ECGMatch() as settings:
            return ECGMatch(settings, labels, config.bank.view)
        case configs.Supervised() | configs.FullySupervised():
            return Supervised()
        case configs.FixMatch() as settings:
            return FixMatch(settings)
        case configs.FlexMatch() as settings:
            return FlexMatch(settings, rows, classes, device)
        case configs.SoftMatch() as settings:
            return SoftMatch(settings, labels)
        case configs.PercentMatch() as settings:
            return PercentMatch(settings, labels, rows, steps)
        case configs.DST() as settings:
            return DST(settings, width, classes, steps, seed)
        case configs.MixMatch() as settings:
            return MixMatch(settings, steps)
        case configs.UPS() as settings:
            return UPS(settings, rows, classes, steps, seed, device)
        case configs.MSDNN() as settings:
            return MSDNN(settings, width, steps, labels.dtype, device)
