"""One ECG of twelve leads as files of every format that is read. Other libraries write them where there are any."""

import base64
import binascii
import struct
from collections.abc import Callable
from pathlib import Path

import edfio
import h5py
import numpy as np
import pandas as pd
import pydicom
from pydicom.data import get_testdata_file

from ecgmatch_dist.data.formats.leads import LEADS
from tests.support.recordings import make_signal

RATE = 250
ALL = {"rate": RATE, "unit": "mV", "leads": LEADS}


def related(n: int = 500) -> np.ndarray:
    """[12, n] in mV, whose limb leads are related as those of a patient."""
    x = make_signal(3, n=n)
    x[2], x[3], x[4], x[5] = x[1] - x[0], -(x[0] + x[1]) / 2, x[0] - x[1] / 2, x[1] - x[0] / 2
    return x


def as_csv(path: Path, x: np.ndarray, rate: int = RATE) -> None:
    table = pd.DataFrame(x.T, columns=[f"Lead {lead} [mV]" for lead in LEADS])
    table.insert(0, "time", np.arange(len(table)) / rate)
    table.to_csv(path, index=False)


def as_german_csv(path: Path, x: np.ndarray, rate: int = RATE) -> None:
    table = pd.DataFrame(1000 * x.T, columns=[f"Ableitung {lead} (µV)" for lead in LEADS])
    table.insert(0, "Zeit (ms)", 1000 * np.arange(len(table)) / rate)
    table.to_csv(path, index=False, sep=";", decimal=",")


def as_npy(path: Path, x: np.ndarray, rate: int = RATE) -> None:
    np.save(path, x.T.astype(np.float32))


def as_hdf5(path: Path, x: np.ndarray, rate: int = RATE) -> None:
    padded = np.pad(x.T, ((6, 6), (0, 0)))
    with h5py.File(path, "w") as file:
        file["tracings"] = np.stack([padded, 2 * padded, 0 * padded]).astype(np.float32)
        file["exam_id"] = [77, 88, 0]


def as_edf(path: Path, x: np.ndarray, rate: int = RATE, patient: str = "P-7") -> None:
    signals = [
        edfio.EdfSignal(1000 * row, rate, label=f"ECG {lead}", physical_dimension="uV")
        for row, lead in zip(x, LEADS, strict=True)
    ]
    breath = edfio.EdfSignal(np.sin(np.arange(25 * x.shape[1] // rate)), 25, label="Resp")
    edfio.Edf([breath, *signals[::-1]], patient=edfio.Patient(code=patient, sex="F")).write(path)


def as_muse(path: Path, x: np.ndarray, rate: int = RATE) -> None:
    """Eight leads, as MUSE stores them; 2.5 uV a count."""
    leads = "".join(
        f"<LeadData><LeadByteCountTotal>{2 * x.shape[1]}</LeadByteCountTotal>"
        f"<LeadSampleCountTotal>{x.shape[1]}</LeadSampleCountTotal>"
        f"<LeadAmplitudeUnitsPerBit>2.5</LeadAmplitudeUnitsPerBit><LeadAmplitudeUnits>MICROVOLTS</LeadAmplitudeUnits>"
        f"<LeadID>{lead}</LeadID><FirstSampleBaseline>0</FirstSampleBaseline><LeadSampleSize>2</LeadSampleSize>"
        f"<WaveFormData>{base64.b64encode(np.round(400 * x[v]).astype('<i2').tobytes()).decode()}</WaveFormData></LeadData>"
        for v, lead in enumerate(LEADS)
        if lead in ("I", "II") or lead[0] == "V"
    )
    path.write_text(
        f'<?xml version="1.0"?><RestingECG><PatientDemographics><PatientID>P-7</PatientID></PatientDemographics>'
        f"<Waveform><WaveformType>Rhythm</WaveformType><SampleBase>{rate}</SampleBase><SampleExponent>0</SampleExponent>"
        f"<NumberofLeads>8</NumberofLeads>{leads}</Waveform></RestingECG>"
    )


def as_aecg(path: Path, x: np.ndarray, rate: int = RATE) -> None:
    sequences = "".join(
        f'<component><sequence><code code="MDC_ECG_LEAD_{lead.upper()}" codeSystem="2.16.840.1.113883.6.24"/>'
        f'<value xsi:type="SLIST_PQ"><origin value="0" unit="uV"/><scale value="1" unit="uV"/>'
        f"<digits>{' '.join(str(round(1000 * value)) for value in x[v])}</digits></value></sequence></component>"
        for v, lead in enumerate(LEADS)
    )
    path.write_text(
        '<?xml version="1.0"?><AnnotatedECG xmlns="urn:hl7-org:v3" xmlns:xsi="http://www.w3.org/2001/XMLSchema-instance">'
        '<component><series><code code="RHYTHM" codeSystem="2.16.840.1.113883.5.4"/><component><sequenceSet>'
        '<component><sequence><code code="TIME_ABSOLUTE" codeSystem="2.16.840.1.113883.5.4"/><value xsi:type="GLIST_TS">'
        f'<head value="20200101120000"/><increment value="{1 / rate}" unit="s"/></value></sequence></component>'
        f"{sequences}</sequenceSet></component></series></component></AnnotatedECG>"
    )


def as_scp(path: Path, x: np.ndarray, rate: int = RATE) -> None:
    """By the standard's own words (EN 1064), without compression: no library here writes SCP-ECG that can be read. That the
    file is one, BioSig says below."""
    codes = dict(zip(LEADS, (1, 2, 61, 62, 63, 64, 3, 4, 5, 6, 7, 8), strict=True))
    samples = np.round(1000 * x).astype("<i2")  # of 1000 nV
    rows = b"".join(struct.pack("<IIB", 1, x.shape[1], codes[lead]) for lead in LEADS)
    sizes = b"".join(struct.pack("<H", 2 * x.shape[1]) for _ in LEADS)
    bodies = {
        1: struct.pack("<BH4s", 2, 4, b"P-7\0") + struct.pack("<BH", 255, 0),
        3: struct.pack("<BB", 12, 0x04 | 12 << 3) + rows,
        6: struct.pack("<HHBB", 1000, round(1e6 / rate), 0, 0) + sizes + samples.tobytes(),
    }
    lengths = {0: 16 + 10 * 12} | {number: 16 + len(body) + len(body) % 2 for number, body in bodies.items()}
    places = dict(zip(lengths, 7 + np.cumsum([0, *lengths.values()][:-1]), strict=True))
    bodies[0] = b"".join(struct.pack("<HII", n, lengths.get(n, 0), places.get(n, 0)) for n in range(12))
    content = b""
    for number, length in lengths.items():
        name = b"SCPECG" if number == 0 else b""
        section = struct.pack("<HIBB6s", number, length, 20, 20, name) + bodies[number].ljust(length - 16, b"\0")
        content += struct.pack("<H", binascii.crc_hqx(section, 0xFFFF)) + section
    content = struct.pack("<I", 6 + len(content)) + content
    path.write_bytes(struct.pack("<H", binascii.crc_hqx(content, 0xFFFF)) + content)


def as_philips(path: Path, x: np.ndarray, rate: int = RATE) -> None:
    """By the schema of Philips (1.03), without compression, 2 uV a count."""
    counts = np.round(500 * x).astype("<i2")
    path.write_text(
        '<?xml version="1.0"?><restingecgdata xmlns="http://www3.medical.philips.com">'
        "<documentinfo><documenttype>SierraECG</documenttype><documentversion>1.03</documentversion></documentinfo>"
        f"<dataacquisition><signalcharacteristics><samplingrate>{rate}</samplingrate><signalresolution>2</signalresolution>"
        "<numberchannelsvalid>12</numberchannelsvalid><numberchannelsallocated>12</numberchannelsallocated>"
        "<acquisitiontype>STD-12</acquisitiontype></signalcharacteristics></dataacquisition>"
        f'<waveforms><parsedwaveforms dataencoding="Base64" compressflag="False" numberofleads="12" '
        f'durationperchannel="{1000 * x.shape[1] // rate}" leadlabels="{" ".join(LEADS)}">'
        f"{base64.b64encode(counts.tobytes()).decode()}</parsedwaveforms></waveforms></restingecgdata>"
    )


def as_ishne(path: Path, x: np.ndarray, rate: int = RATE) -> None:
    """By the format's own words (Badilini 1998): a header of 522 bytes, then all leads of a sample, sample after sample."""
    header = bytearray(522)
    struct.pack_into("<8s2x4i", header, 0, b"ISHNE1.0", 0, x.shape[1], 522, 522)
    struct.pack_into("<h", header, 26, 1)
    struct.pack_into("<h12h12h12h", header, 156, 12, *range(5, 17), *[0] * 12, *[1000] * 12)  # 1000 nV
    struct.pack_into("<h", header, 272, rate)
    path.write_bytes(bytes(header) + np.round(1000 * x.T).astype("<i2").tobytes())


def as_mfer(path: Path, x: np.ndarray, rate: int = RATE) -> None:
    """By the standard's own words (ISO 22077-1): little endian, twelve channels of one block, in uV."""

    def entry(tag: int, value: bytes) -> bytes:
        length = bytes([len(value)]) if len(value) < 128 else b"\x84" + struct.pack(">I", len(value))
        return bytes([tag]) + length + value

    codes = dict(zip(LEADS, (1, 2, 61, 62, 63, 64, 3, 4, 5, 6, 7, 8), strict=True))
    names = b"".join(b"\x3f" + bytes([v, 3]) + entry(9, bytes([codes[lead]])) for v, lead in enumerate(LEADS))
    parts = (
        entry(1, b"\1"), entry(2, b"\1\1\0"), entry(5, b"\x0c"), entry(4, struct.pack("<I", x.shape[1])), entry(6, b"\1"),
        entry(10, b"\0"), entry(11, b"\0\0" + struct.pack("<H", rate)), entry(12, b"\0\xfa\1"), names,
        entry(30, np.round(1000 * x).astype("<i2").tobytes()),
    )  # fmt: skip
    path.write_bytes(b"".join(parts) + b"\x80\0")


def as_dicom(path: Path, _: np.ndarray) -> None:
    """The beginning of the ECG that pydicom brings."""
    data = pydicom.dcmread(str(get_testdata_file("waveform_ecg.dcm")))
    for wave in data.WaveformSequence:
        wave.NumberOfWaveformSamples = 100
        wave.WaveformData = wave.WaveformData[: 2 * 100 * wave.NumberOfWaveformChannels]
    data.save_as(path)


WRITERS: dict[str, tuple[Callable[..., None], dict[str, object]]] = {
    "ecg.csv": (as_csv, {}),
    "german 1.5.csv": (as_german_csv, {}),
    "ecg.npy": (as_npy, ALL),
    "ecg.edf": (as_edf, {}),
    "muse.xml": (as_muse, {}),
    "aecg.xml": (as_aecg, {}),
    "ecg.scp": (as_scp, {}),
    "philips.xml": (as_philips, {}),
    "ecg.ecg": (as_ishne, {}),
    "ecg.mwf": (as_mfer, {}),
}
OTHER = {"ecg.hdf5": as_hdf5, "ecg.dcm": as_dicom}
"""Those that hold other recordings than the one that they are given, or several."""
