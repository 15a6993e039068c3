"""Recordings and tables of other formats that mean harm: files that unfold, claim too much, or lead to other files."""

import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pydicom
import pytest
from pydicom.uid import DeflatedExplicitVRLittleEndian

from ecgmatch_dist.data.formats.read import find, read
from ecgmatch_dist.data.formats.recording import Rejected
from ecgmatch_dist.data.label_table import read_table
from ecgmatch_dist.errors import UserError
from tests.support.formats import ALL, as_dicom, as_hdf5, related
from tests.support.mutate import bounded_memory

SECRET = np.arange(12 * 400, dtype=np.float32)


def elsewhere(path: Path, place: Callable[[h5py.File, Path], None]) -> None:
    """An HDF5 file whose numbers are in another one."""
    secret = path.with_name("secret.bin")
    SECRET.tofile(secret)
    as_hdf5(path.with_name("other.hdf5"), related())
    with h5py.File(path, "w") as file:
        place(file, secret)


def external(file: h5py.File, secret: Path) -> None:
    file.create_dataset("tracings", (1, 400, 12), "f4", external=[(str(secret), 0, SECRET.nbytes)])


def linked(file: h5py.File, secret: Path) -> None:
    file["tracings"] = h5py.ExternalLink(str(secret.with_name("other.hdf5")), "tracings")


def linked_twice(file: h5py.File, secret: Path) -> None:
    file["other"] = h5py.ExternalLink(str(secret.with_name("other.hdf5")), "/")
    file["tracings"] = h5py.SoftLink("/other/tracings")


def virtual(file: h5py.File, secret: Path) -> None:
    layout = h5py.VirtualLayout((3, 512, 12), "f4")
    layout[:] = h5py.VirtualSource(secret.with_name("other.hdf5"), "tracings", (3, 512, 12))
    file.create_virtual_dataset("tracings", layout)


def names_elsewhere(file: h5py.File, secret: Path) -> None:
    file["tracings"] = np.ones((3, 400, 12), "f4")
    file.create_dataset("exam_id", (3,), "i8", external=[(str(secret), 0, 24)])


@pytest.mark.parametrize("place", [external, linked, linked_twice, virtual, names_elsewhere])
def test_hdf5_that_leads_to_other_files(tmp_path: Path, place: Callable[[h5py.File, Path], None]) -> None:
    elsewhere(tmp_path / "ecg.hdf5", place)
    (ref,) = find(tmp_path / "ecg.hdf5")
    assert ref.key == "ecg"
    with pytest.raises(Rejected, match=r"another file|no dataset `tracings`|holds 3 recordings"):
        read(ref, **ALL)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("shape", "chunks"),
    [((10**12, 400, 12), (1, 400, 12)), ((1, 10**10, 12), (1, 400, 12)), ((1, 10**6, 10**5), (1, 400, 12)),
     ((10**5, 400, 12), (10**5, 400, 12))],
)  # fmt: skip
def test_hdf5_that_claims_too_much(tmp_path: Path, shape: tuple[int, ...], chunks: tuple[int, ...]) -> None:
    with h5py.File(tmp_path / "ecg.hdf5", "w") as file:
        file.create_dataset("tracings", shape, "f4", chunks=chunks, compression="gzip")
    (ref,) = find(tmp_path / "ecg.hdf5")
    with bounded_memory(), pytest.raises(Rejected, match="at most"):
        read(ref, **ALL)  # type: ignore[arg-type]


def test_dicom_that_unfolds(tmp_path: Path) -> None:
    as_dicom(tmp_path / "good.dcm", related())
    data = pydicom.dcmread(tmp_path / "good.dcm")
    data.file_meta.TransferSyntaxUID = DeflatedExplicitVRLittleEndian
    data.save_as(tmp_path / "ecg.dcm")
    with pytest.raises(Rejected, match="deflated"):
        read(tmp_path / "ecg.dcm")


@pytest.mark.parametrize("name", ["ecg.npy", "ecg.csv", "ecg.edf", "ecg.xml", "ecg.scp", "ecg.dcm", "ecg.ecg"])
def test_a_file_without_end(tmp_path: Path, name: str) -> None:
    with (tmp_path / name).open("wb") as file:
        file.truncate(10**12)
    with bounded_memory(), pytest.raises(Rejected, match="1,000,000,000,000 bytes"):
        read(tmp_path / name, **ALL)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["p", "p.csv", "p.npy", "p.h5", "p.edf", "p.dcm", "p.xml", "p.scp", "p.ecg"])
def test_a_pipe_is_refused_at_once(tmp_path: Path, name: str) -> None:
    """`ecgmatch predict RUN <(zcat ecg.csv.gz)` waited for ever."""
    os.mkfifo(tmp_path / name)
    (ref,) = find(tmp_path / name)
    with pytest.raises(Rejected, match=f"unreadable: {name} is not a regular file"):
        read(ref, rate=500, unit="mV")


def test_a_workbook_that_unfolds(tmp_path: Path) -> None:
    path = tmp_path / "labels.xlsx"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as book, book.open("xl/workbook.xml", "w") as member:
        for _ in range(300):
            member.write(bytes(2**20))
    assert path.stat().st_size < 2**20
    with bounded_memory(), pytest.raises(UserError, match="unfolds to 314,572,800 bytes, at most"):
        read_table(path)
