"""A folder as people have it: recordings of five formats, and a workbook with labels of some."""

from pathlib import Path

import edfio
import h5py
import numpy as np
import pandas as pd

from tests.support.recordings import LEADS, make_signal, write_record

CODES = ("164889003", "59118001", "426783006")


def write_mixed(folder: Path, words: tuple[str, ...] = CODES) -> None:
    """Four recordings of each of five formats, and labels for 15 of the 20."""
    folder.mkdir()
    rows = []
    for i in range(4):
        x = make_signal(i, n=1000)
        write_record(folder, f"wfdb{i}", x, codes="")
        pd.DataFrame(x.T, columns=list(LEADS)).to_csv(folder / f"Station {i}.csv", index=False)
        np.save(folder / f"array.{i}.npy", x.T)
        signals = [
            edfio.EdfSignal(row, 100, label=lead, physical_dimension="mV") for row, lead in zip(x, LEADS, strict=True)
        ]
        edfio.Edf(signals).write(folder / f"edf{i}.edf")
        rows += [f"wfdb{i}", f"Station {i}.csv", f"array.{i}", f"edf{i}.edf", 900 + i]
    with h5py.File(folder / "many.h5", "w") as file:
        file["tracings"] = np.stack([make_signal(i, n=1000).T for i in range(4)])
        file["exam_id"] = np.arange(900, 904)
    table = pd.DataFrame(
        {"record": rows[:15], "Befund": [words[i % len(words)] for i in range(15)], "Patient": range(15)}
    )
    table.to_excel(folder / "Befunde.xlsx", index=False)
