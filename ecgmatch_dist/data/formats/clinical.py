"""What ECG carts and archives write, read by ecgdatakit: DICOM, HL7 aECG, MUSE and Philips XML, SCP-ECG, MFER, ISHNE."""

import warnings
from pathlib import Path

import numpy as np

from ecgmatch_dist.data.formats.arrays import ask
from ecgmatch_dist.data.formats.libraries import library
from ecgmatch_dist.data.formats.recording import Layout, RecordRef, Rejected, Tracing, known_patient

DEFLATED = "1.2.840.10008.1.2.1.99"
KINDS = "DICOM, HL7 aECG, MUSE and Philips XML, SCP-ECG, MFER, ISHNE"


def recognises(path: Path) -> bool:
    """Whether ecgdatakit knows the file by its content."""
    return library("ecgdatakit").FileParser.detect_format(path) is not None


def read(ref: RecordRef, layout: Layout) -> Tracing:
    kit = library("ecgdatakit")
    _check_deflated(ref.path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about metadata; units and lengths are checked here
        try:
            record = kit.FileParser.parse(ref.path)
        except kit.exceptions.UnsupportedFormatError:
            raise Rejected("format", f"no ECG in it, or one of a kind that is not read; read are {KINDS}") from None
        except ImportError:
            library("pydicom")
            raise
    leads = record.leads
    if not leads:
        raise Rejected("leads", "the file holds no leads")
    lengths, rates = {len(lead.samples) for lead in leads}, {float(lead.sampling_rate) for lead in leads}
    if len(lengths) > 1 or len(rates) > 1:
        raise Rejected("layout", f"leads of different lengths or rates: {sorted(lengths)} samples, {sorted(rates)} Hz")
    rate = ask(layout, found=rates.pop(), unit=all(lead.is_raw for lead in leads))
    patient = record.patient
    return Tracing(
        np.stack([lead.samples for lead in leads]),
        [str(lead.label) for lead in leads],
        [layout.unit if lead.is_raw else str(lead.units) for lead in leads],  # raw: the file does not say its unit
        rate,
        patient=known_patient(str(patient.patient_id or "")),
        age="" if patient.age is None else f"{patient.age}",
        sex={"F": "Female", "M": "Male"}.get(patient.sex, ""),
    )


def _check_deflated(path: Path) -> None:
    """Reject a DICOM file that is compressed as a whole: a small one may unfold to any size."""
    with path.open("rb") as file:
        if file.read(132)[128:] != b"DICM":
            return
    if getattr(library("pydicom").filereader.read_file_meta_info(path), "TransferSyntaxUID", "") == DEFLATED:
        raise Rejected("format", "a deflated DICOM file; save it without compression")
