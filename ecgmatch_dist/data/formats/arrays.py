"""Plain arrays, and NPY files of them: rate, unit and lead names must be named."""

from collections.abc import Sequence

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
    leads = needed_leads(layout, min(array.shape))
    count = len(leads)
    if count not in array.shape or array.shape[0] == array.shape[1]:
        raise Rejected("layout", f"an array {list(array.shape)}, but `leads` names {count}")
    signal = (array if array.shape[0] == count else array.T).astype(np.float32)
    return Tracing(signal, leads, [needed_unit(layout)] * count, needed_rate(layout))


def needed_rate(layout: Layout, found: float | None = None) -> float:
    """The file's rate, or the named one."""
    rate = found or layout.rate
    if not rate:
        raise Rejected("rate", "the file does not say its sampling rate; name it (rate = 500)")
    return rate


def needed_unit(layout: Layout) -> str:
    if not layout.unit:
        raise Rejected("units", 'the file does not say its unit; name it (unit = "mV" or "uV")')
    return layout.unit


def needed_leads(layout: Layout, count: int, said: str = "") -> Sequence[str]:
    if not layout.leads:
        raise Rejected(
            "leads", f"the file does not name its {count} leads{said}; name them in their order (leads = [{EXAMPLE}])"
        )
    return layout.leads
