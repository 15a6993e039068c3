"""From a recording to the network's input, exactly as the training shards were made. Without torch, for reading processes.

A recording that is longer than the input is seen whole: in windows that overlap by half or more, evenly spaced from its first
sample to its last. (Shards keep the first window only.)
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ecgmatch_dist.data.formats.recording import Recording, Rejected
from ecgmatch_dist.data.preprocess import Preprocess, preprocess
from ecgmatch_dist.data.windows import places

LONGEST = 900  # seconds; a few of them must fit into memory at once
HARDLY_LONGER = 1.05


@dataclass(frozen=True)
class Inputs:
    """What the network has to know of its input."""

    preprocess: Preprocess
    crop: int
    """Samples of the crops that it was trained on; 0: it takes the whole length at once."""


@dataclass(frozen=True)
class Prepared:
    """A recording, ready for the network."""

    record: str
    path: str
    x: NDArray[np.float16]
    """[windows, 12, T]. Half precision, like the shards that the network was trained on."""
    flags: tuple[str, ...]


def prepare(recording: Recording, inputs: Inputs, path: str = "") -> Prepared:
    """Preprocess all windows of a recording. Raises Rejected."""
    seconds = recording.signal.shape[1] / recording.rate
    if seconds > LONGEST:
        raise Rejected("too long", f"{seconds / 60:.0f} minutes; cut it into pieces of at most {LONGEST // 60}")
    n, rate = recording.signal.shape[1], recording.rate
    settings = inputs.preprocess
    window = window_samples(n, rate, settings)
    pieces = [recording.signal[:, start : start + window] for start in places(n, window)]
    made = [preprocess(piece, rate, settings) for piece in pieces]
    x = np.stack([signal for signal, _ in made]).astype(np.float16)
    flags = [flag for _, own in made for flag in own]
    if len(pieces) > 1:  # each may be cropped by less than a sample, but nothing is left out
        flags = [*(flag for flag in flags if flag != "cropped"), f"windows:{len(pieces)}"]
    return Prepared(recording.key, path, x, tuple(dict.fromkeys([*recording.flags, *flags])))


def window_samples(samples: int, rate: float, settings: Preprocess) -> int:
    """Samples of a recording that the network sees at once. One that is hardly longer than the input is cropped, as in the
    shards: its last instant is not worth a second window."""
    window = int(np.ceil(settings.length * rate / settings.rate))
    return samples if samples <= HARDLY_LONGER * window else window
