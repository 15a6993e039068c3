"""EDF and BDF, read by edfio."""

import warnings

import numpy as np

from ecgmatch_dist.data.formats.leads import places
from ecgmatch_dist.data.formats.libraries import library
from ecgmatch_dist.data.formats.recording import Layout, RecordRef, Rejected, Tracing, known_patient


def read(ref: RecordRef, layout: Layout) -> Tracing:
    """Signals that are named like leads. Those of another rate than the leads are left out."""
    edfio = library("edfio")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(truncated|data records)")
        try:
            file = (edfio.read_bdf if ref.path.suffix.lower() == ".bdf" else edfio.read_edf)(ref.path)
        except UserWarning:
            raise Rejected("cut short", "the file ends before the data that its header promises") from None
        except (IndexError, ValueError, OverflowError):  # the library's words for a header that ends too early
            size = ref.path.stat().st_size
            raise Rejected("unreadable", f"not an EDF file, or damaged, or cut after {size:,} bytes") from None
    labels = [str(signal.label) for signal in file.signals]
    place = places(labels, layout.lead_map)
    leads = [file.signals[at] for at in place.values()]
    rates = {float(signal.sampling_frequency) for signal in leads}
    if len(rates) > 1:
        raise Rejected("rate", f"leads of different rates: {' '.join(f'{rate:g}' for rate in sorted(rates))} Hz")
    others = [label for at, label in enumerate(labels) if at not in place.values()]
    if not leads:
        raise Rejected("leads", f"none of the signals is a lead: {', '.join(others)} (see `lead_map`)")
    return Tracing(
        np.stack([signal.data for signal in leads]).astype(np.float32),
        [signal.label for signal in leads],
        [signal.physical_dimension or layout.unit for signal in leads],
        rates.pop(),
        patient=known_patient(file.patient.code),
        sex={"F": "Female", "M": "Male"}.get(file.patient.sex, ""),
        others=others,
    )
