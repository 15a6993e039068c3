"""Recordings of any format -> one `Recording`: twelve standard leads in mV.

    from ecgmatch_dist.data.formats.read import find, from_array, read

    read("ecg.xml")                                              # a file that says everything itself
    read("ecg.csv", rate=500, unit="uV")                         # rate and unit are not in the file
    read("ecg.npy", rate=400, unit="mV", leads=["I", "II", ...])
    for ref in find("folder"):                                   # also the recordings inside an HDF5 file
        read(ref, rate=400, unit="mV", leads=LEADS)
    from_array(signal, rate=500, unit="mV", leads=LEADS)         # an array [leads, samples] or [samples, leads]

`Rejected` says why a recording cannot be used (`kind` and `detail`); a missing library is a `UserError` that names the extra.
III, aVR, aVL and aVF are derived from I and II (flag `derived:III`). Other missing leads are zero (flag `missing:V3`). Fewer
than two leads with a signal are refused. The flag `unit?` means that the voltages are far from those of an ECG.

One file per format. A reader makes a `Tracing` of what the file says; `leads.py` knows names, units and derived leads;
`read.py` chooses the reader by the file's suffix or its first bytes.
"""
