"""Long recordings in pieces of the length that training uses. The pieces of `rec` are rec-seg1, rec-seg2, ...

They are one unit of a split and share the recording's labels: `recording_of` leads back to it."""

import re
from dataclasses import replace

import numpy as np

from ecgmatch_dist.data.formats.recording import Recording
from ecgmatch_dist.data.preprocess import Preprocess

SEGMENT = r"-seg\d+$"


def recording_of(key: str) -> str:
    """The name of the recording that a piece belongs to; of anything else, the name itself. Also for ids "database/key"."""
    return re.sub(SEGMENT, "", key)


def cut(recording: Recording, settings: Preprocess) -> list[Recording]:
    """Pieces that fill the length, without overlap. A rest that fills half of it is one too. A short recording is one piece,
    under its own name."""
    window = int(np.ceil(settings.length * recording.rate / settings.rate))
    samples = recording.signal.shape[1]
    if samples <= window:
        return [recording]
    starts = [start for start in range(0, samples, window) if samples - start >= window / 2]
    return [
        replace(recording, key=f"{recording.key}-seg{number}", signal=recording.signal[:, start : start + window])
        for number, start in enumerate(starts, 1)
    ]
