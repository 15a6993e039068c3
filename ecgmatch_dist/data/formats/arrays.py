"""Plain arrays, and NPY files of them: rate, unit and lead names must be named."""

import numpy as np
from numpy.typing import NDArray

from ecgmatch_dist.data.formats.recording import Layout, RecordRef, Rejected, Tracing
from ecgmatch_dist.data.preprocess import LEADS

EXAMPLE = ", ".join(f'"{lead}"' for lead in LEADS)


def read(ref: RecordRef, layout: Layout) -> Tracing:
    """An NPY file."""
    try:
        array = np.load(ref.path, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise Rejected("unreadable", str(error).splitlines()[0] if str(error) else "not an NPY file") from None
    return tracing_of(array, layout)


def tracing_of(array: NDArray[np.generic], layout: Layout) -> Tracing:
    """An array [leads, samples] or [samples, leads] of any kind of number."""
    if array.ndim > 2:
        array = np.squeeze(array)
    if array.ndim != 2 or array.dtype.kind not in "iuf" or 0 in array.shape:
        raise Rejected("layout", f"an array of {array.dtype} {list(array.shape)} instead of numbers [leads, samples]")
    rate = ask(layout, min(array.shape))
    count = len(layout.leads)
    if count not in array.shape or array.shape[0] == array.shape[1]:
        raise Rejected("layout", f"an array {list(array.shape)}, but `leads` names {count}")
    signal = (array if array.shape[0] == count else array.T).astype(np.float32)
    return Tracing(signal, layout.leads, [layout.unit] * count, rate)


def ask(layout: Layout, leads: int = 0, said: str = "", *, found: float | None = None, unit: bool = True) -> float:
    """The rate: `found` in the file, or the layout's. Raises Rejected if something is said by neither: all of it at once.

    `leads`: how many the file does not name (`said`: what it says instead); `unit`: whether the file lacks it."""
    rate = found or layout.rate or 0.0
    missing = [
        (kind, what, example)
        for kind, lacks, what, example in (
            ("leads", leads and not layout.leads, f"name its {leads} leads{said}", f"leads = [{EXAMPLE}]"),
            ("rate", not rate, "say its sampling rate", "rate = 500"),
            ("units", unit and not layout.unit, "say its unit", 'unit = "mV" or "uV"'),
        )
        if lacks
    ]
    if missing:
        kinds, whats, examples = zip(*missing, strict=True)
        name = "name it" if len(missing) == 1 and not leads else "name them"
        raise Rejected(kinds[0], f"the file does not {' or '.join(whats)}; {name} ({', '.join(examples)})")
    return rate
