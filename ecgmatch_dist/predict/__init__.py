"""Use a trained model: any ECG in, an answer with its reasons out (docs/predict.md).

files.py -> read.py -> prepare.py        which files; read them in parallel; as the training shards were made
model.py  cases.py  influence.py         the network's answer; known cases that are alike; what mattered
table.py  paper.py  page.py              a row per ECG; ECG paper; a page per ECG
command.py                               `ecgmatch predict`
"""
